"""The tables of the report as plain cells; HTML, Markdown and the terminal show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moopd.evaluation.plots import PLACES
from moopd.evaluation.results import Difference, Estimate, Results, SystemResult

_MANY_QUESTIONS = 1000
"""From so many questions on scores are printed with two decimals, as the paper prints them."""


@dataclass(frozen=True)
class Cell:
    """One entry: what was found here, its interval, the paper's number."""

    text: str
    interval: str = ""
    paper: str = ""
    mark: str = ""
    """A class for the page: `row` heads a line, `good`, `bad`, `open` colour a verdict."""
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> str:
        """The cell in one line of text."""
        paper = f"(paper {self.paper})" if self.paper else ""
        return " ".join(part for part in (self.text, self.interval, paper, *self.notes) if part)


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


EMPTY = Cell("–", mark="open")


class Tables:
    """Every table of one Results."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._n = results.num_attempts
        self._digits = 2 if sum(results.sets.values()) >= _MANY_QUESTIONS else 1

    def main(self) -> Table:
        """Macro scores with intervals, the paper's beside them."""
        n = self._n
        rows = []
        for system in self._results.systems:
            reported = system.reported
            papers = (reported.avg_at_4, reported.pass_at_4, reported.all_4, None)
            scores = [system.strict[name].macro for name in ("avg", "pass", "all", "maj")]
            cells = [self._cell(s, p) for s, p in zip(scores, papers, strict=True)]
            rows.append((self._head(system), *cells))
        header = ("system", f"avg@{n}", f"pass@{n}", f"{n}/{n}", f"maj@{n}")
        return Table(header, tuple(rows), "Macro averages over the sets, in percent.")

    def differences(self, group: str | None = None, metric: str = "avg") -> Table:
        """Paired differences of one group; the hierarchical interval where runs allow it."""
        chosen = [
            d
            for d in self._results.differences_of(metric)
            if (d.group != "other" if group is None else d.group == group)
        ]
        several = any(d.over_runs for d in chosen)
        header = ["difference", "macro", "sets won", "verdict"]
        if several:
            header[2:2] = ["over runs"]
        rows = tuple(self._difference(d, several) for d in chosen)
        return Table(tuple(header), rows, "Percentage points, paired on questions and draws.")

    def per_set(self) -> Table:
        sets = list(self._results.sets)
        header = ("system", *(f"{name} ({self._results.sets[name]})" for name in sets))
        rows = tuple(
            (
                self._head(system),
                *(
                    self._cell(system.strict["avg"].sets[name], system.reported.per_set.get(name))
                    for name in sets
                ),
            )
            for system in self._results.systems
        )
        return Table(
            header, rows, f"avg@{self._n} in percent; in brackets the number of questions."
        )

    def runs(self) -> Table:
        """Between-run spread; only rows that were trained several times."""
        rows = []
        for system in self._results.systems:
            if system.run_spread is None or system.over_runs is None:
                continue
            values = ", ".join(self._number(value) for value in system.run_avg.values())
            rows.append(
                (
                    self._head(system),
                    Cell(values),
                    Cell(self._number(system.run_spread)),
                    self._cell(system.strict["avg"].macro),
                    self._cell(system.over_runs),
                )
            )
        header = ("system", "macro of each run", "std", "questions resampled", "runs and questions")
        return Table(
            header, tuple(rows), f"Macro avg@{self._n}; std is the unbiased one over runs."
        )

    def workload(self) -> Table:
        names = ("searches", "repeated_queries", "calls", "rounds", "input_tokens", "output_tokens")
        rows = []
        for system in self._results.systems:
            reported = system.reported
            papers = {
                "searches": reported.searches,
                "input_tokens": reported.input_tokens,
                "output_tokens": reported.output_tokens,
            }
            cells = [
                self._amount(system.workload[name].macro, papers.get(name))
                if name in system.workload
                else EMPTY
                for name in names
            ]
            rows.append((self._head(system), *cells))
        header = ("system", *(name.replace("_", " ") for name in names))
        return Table(header, tuple(rows), "Per workflow; tokens summed over turns.")

    def shares(self) -> Table:
        """Collapse diagnostics on the test."""
        names = ["no_search", "with_subtasks", "with_reports", "with_answer"]
        names += sorted({n for s in self._results.systems for n in s.shares if n not in names})
        rows = tuple(
            (
                self._head(system),
                *(
                    Cell(
                        f"{system.shares[name]:.2f}", paper=_paper(system.reported.shares.get(name))
                    )
                    if name in system.shares
                    else EMPTY
                    for name in names
                ),
            )
            for system in self._results.systems
        )
        header = ("system", *(name.replace("_", " ") for name in names))
        return Table(header, rows, "Percent of all workflows, each counted once.")

    def coverage(self) -> Table:
        size = self._n
        header = ("system", *(f"{k} of {size} right" for k in range(size + 1)), "agreement")
        rows = tuple(
            (
                self._head(system),
                *(Cell(f"{number:,}") for number in system.histogram),
                self._cell(system.agreement),
            )
            for system in self._results.systems
        )
        note = (
            "Questions by right attempts; agreement: equal pairs of answers, right or wrong, in %."
        )
        return Table(header, rows, note)

    def failures(self) -> Table:
        """Malformed turns by role and kind, per 100 workflows."""
        systems = self._results.systems
        kinds = sorted({kind for system in systems for kind in system.failures})
        rows = tuple(
            (
                Cell(kind.replace("/", ": ").replace("_", " "), mark="row"),
                *(Cell(f"{100 * s.failures.get(kind, 0) / s.num_records:.2f}") for s in systems),
            )
            for kind in kinds
        )
        header = ("turn: kind", *(system.title for system in systems))
        return Table(
            header, rows, "Turns per 100 workflows; final answer: as the strict score reads."
        )

    def extraction(self) -> Table:
        """Strict beside flexible, and the reference's lead under both."""
        leads = {
            d.second: d
            for d in self._results.differences_of("flexible_avg")
            if d.first == self._results.reference
        }
        reference = self._results.title(self._results.reference)
        rows = tuple(
            (
                self._head(system),
                self._cell(system.strict["avg"].macro),
                self._cell(system.flexible["avg"].macro),
                self._cell(leads[system.name].macro) if system.name in leads else EMPTY,
            )
            for system in self._results.systems
        )
        n = self._n
        header = ("system", f"strict avg@{n}", f"flexible avg@{n}", f"{reference} ahead, flexible")
        return Table(header, rows, "The same outputs; the rules never see a reference answer.")

    def completion(self) -> Table:
        rows = tuple(
            (
                self._head(self._results.system(bound.other)),
                Cell(f"{bound.num_failures:,}"),
                Cell(self._number(bound.completed_avg)),
                self._cell(bound.difference),
            )
            for bound in self._results.completion
        )
        reference = self._results.title(self._results.reference)
        header = (
            "system",
            "format failures",
            "avg if all were right",
            f"left of {reference}'s lead",
        )
        return Table(header, rows, "An assumption in favour of the other system, no measured gain.")

    def funnel(self, kind: str) -> Table:
        systems = [system for system in self._results.systems if system.funnel]
        counts = {system.name: getattr(system.funnel, kind) for system in systems}
        header = ("system", *(wording for wording, _ in PLACES.values()), "all")
        rows = tuple(
            (
                self._head(system),
                *(Cell(f"{counts[system.name][place]:,}") for place in PLACES),
                Cell(f"{sum(counts[system.name].values()):,}"),
            )
            for system in systems
            if sum(counts[system.name].values())
        )
        return Table(header, rows, "Workflows; each has exactly one place.")

    def budgets(self, kind: str) -> Table:
        systems = [system for system in self._results.systems if system.budgets.get(kind)]
        points = [point.budget for point in systems[0].budgets[kind]] if systems else []
        rows = tuple(
            (self._head(system), *(self._cell(point.share) for point in system.budgets[kind]))
            for system in systems
        )
        return Table(
            ("system", *(f"≤ {point:,}" for point in points)), rows, "Percent of workflows."
        )

    def breakdown(self, kind: str) -> Table:
        systems = [s for s in self._results.systems if any(b.kind == kind for b in s.breakdown)]
        groups = {b.group: b.num_questions for s in systems for b in s.breakdown if b.kind == kind}
        rows = tuple(
            (
                self._head(system),
                *(self._cell(b.avg) for b in system.breakdown if b.kind == kind),
            )
            for system in systems
        )
        header = ("system", *(f"{group.replace('_', ' ')} ({n})" for group, n in groups.items()))
        return Table(header, rows, f"avg@{self._n} in percent, every question counted once.")

    def _difference(self, difference: Difference, several: bool) -> tuple[Cell, ...]:
        first = self._results.title(difference.first)
        second = self._results.title(difference.second)
        paper = difference.reported
        printed = f"{paper.value:.2f} [{paper.low:.2f}, {paper.high:.2f}]" if paper else ""
        cells = [
            Cell(f"{first} − {second}", mark="row"),
            Cell(self._signed(difference.macro.value), self._interval(difference.macro), printed),
        ]
        if several:
            runs = difference.over_runs
            cells.append(Cell(self._signed(runs.value), self._interval(runs)) if runs else EMPTY)
        cells.append(Cell(f"{difference.num_wins} of {len(difference.sets)}"))
        return (*cells, _verdict(difference))

    def _head(self, system: SystemResult) -> Cell:
        return Cell(system.title, mark="row", notes=tuple(f"({note})" for note in system.notes))

    def _cell(self, estimate: Estimate, paper: float | None = None) -> Cell:
        return Cell(self._number(estimate.value), self._interval(estimate), _paper(paper))

    def _amount(self, estimate: Estimate, paper: float | None) -> Cell:
        def show(x: float) -> str:
            return f"{x:,.0f}" if estimate.value >= 100 else f"{x:.2f}"

        interval = f"[{show(estimate.low)}, {show(estimate.high)}]"
        printed = "" if paper is None else (f"{paper:,.0f}" if paper >= 100 else f"{paper:.2f}")
        return Cell(show(estimate.value), interval, printed)

    def _number(self, value: float) -> str:
        return f"{value:.{self._digits}f}".replace("-", "−")

    def _signed(self, value: float) -> str:
        return f"{value:+.{self._digits}f}".replace("-", "−")

    def _interval(self, estimate: Estimate) -> str:
        return f"[{self._number(estimate.low)}, {self._number(estimate.high)}]"


def _paper(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def _verdict(difference: Difference) -> Cell:
    if not difference.macro.excludes_zero:
        return Cell("interval holds zero", mark="open")
    mark = "good" if difference.macro.low > 0 else "bad"
    side = "above zero" if mark == "good" else "below zero"
    if difference.survives_runs is None:
        return Cell(f"{side}; one run", mark=mark)
    if difference.survives_runs:
        return Cell(f"{side}, survives runs", mark=mark)
    return Cell(f"{side}, not over runs", mark="open")


def markdown(table: Table) -> str:
    """The table in GitHub's pipe syntax."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule: Sequence[str] = ["---"] + ["---:"] * (len(table.header) - 1)
    rows = [line(cell.plain for cell in row) for row in table.rows]
    return "\n".join([line(table.header), line(rule), *rows])
