"""Which tables and figures stand in which section of the report, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass

from moopd.evaluation.results import Results
from moopd.evaluation.tables import Table, Tables, markdown


@dataclass(frozen=True)
class Part:
    """A table under an optional heading; `folded` ones open on demand."""

    table: Table
    title: str = ""
    folded: bool = False

    @property
    def markdown(self) -> str:
        return markdown(self.table)


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    text: str
    parts: tuple[Part, ...]
    figure: str = ""


@dataclass(frozen=True)
class Tile:
    value: str
    label: str
    detail: str


def sections(results: Results) -> list[Section]:
    """Sections that the results can fill, in reading order."""
    tables = Tables(results)
    made = [
        _main(tables),
        _differences(results, tables),
        _runs(results, tables),
        Section(
            "sets",
            "Per set",
            "The same score in every set; sets count equally in the macro average.",
            (Part(tables.per_set(), f"avg@{results.num_attempts} per set", folded=True),),
            "sets",
        ),
        _curves(results, tables),
        _workload(results, tables),
        _budgets(results, tables),
        _funnel(results, tables),
        _coverage(results, tables),
        _extraction(tables),
        _breakdown(results, tables),
    ]
    return [section for section in made if section is not None and _filled(section)]


def tiles(results: Results) -> list[Tile]:
    """The reference's score and its differences to the other main rows."""
    reference = results.system(results.reference)
    macro = reference.strict["avg"].macro
    found = [
        Tile(
            f"{macro.value:.1f} %",
            f"{reference.title}, macro avg@{results.num_attempts}",
            f"[{macro.low:.1f}, {macro.high:.1f}]"
            + (f", paper {reference.reported.avg_at_4:g}" if reference.reported.avg_at_4 else ""),
        )
    ]
    for difference in results.differences_of("avg", "main"):
        one, paper = difference.macro, difference.reported
        found.append(
            Tile(
                f"{one.value:+.1f}".replace("-", "−"),
                f"points over {results.title(difference.second)}",
                f"[{one.low:.1f}, {one.high:.1f}]".replace("-", "−")
                + (f", paper {paper.value:+.2f}" if paper else ""),
            )
        )
    return found


def _filled(section: Section) -> bool:
    return bool(section.figure) or any(part.table.rows for part in section.parts)


def _main(tables: Tables) -> Section:
    text = (
        "Strict score: the answer tag of the last Answerer output by normalised exact match; a "
        "missing or malformed answer is wrong and stays in the denominator. The small line below a "
        "value is its interval, the next one the paper's number. maj is answer selection: the "
        "attempts vote with their normalised answers, and of equal counts the earliest attempt's "
        "answer wins."
    )
    return Section("results", "Results", text, (Part(tables.main()),))


def _differences(results: Results, tables: Tables) -> Section | None:
    if not results.differences:
        return None
    text = (
        "Both rows of a pair are resampled with the same questions. Rows of the ablation table are "
        "compared at the fixed last step. A thick bar is the interval over questions for fixed "
        "policies"
    )
    several = any(difference.over_runs for difference in results.differences)
    text += (
        "; the thin one also resamples the training runs, and a difference survives when that "
        "interval leaves zero out too."
        if several
        else ". One training run each: nothing here speaks about other runs."
    )
    main = Part(tables.differences())
    other = Part(tables.differences("other"), "All other pairs", folded=True)
    parts = [part for part in (main, other) if part.table.rows]
    n = results.num_attempts
    for metric, title in (("pass", f"pass@{n}"), ("all", f"{n}/{n}"), ("maj", f"maj@{n}")):
        parts.append(Part(tables.differences(None, metric), f"Differences in {title}", folded=True))
    return Section("differences", "Differences", text, tuple(parts), "forest")


def _runs(results: Results, tables: Tables) -> Section | None:
    if not any(system.run_spread is not None for system in results.systems):
        return None
    text = (
        "Every trained row was trained once per seed. The hierarchical bootstrap draws runs first "
        "and questions inside them; rows with the same seeds are paired by seed. With few runs it "
        "still understates what further runs would show."
    )
    return Section("runs", "Training runs", text, (Part(tables.runs()),))


def _curves(results: Results, tables: Tables) -> Section:
    text = (
        "Development questions, one attempt each at evaluation sampling. The collapse panel shows "
        "whether workflows stop searching while they still write reports and answers; the table "
        "shows the same shares on the test."
    )
    figure = "curves" if results.curves else ""
    part = Part(tables.shares(), "Behaviour on the test")
    return Section("training", "Training and collapse", text, (part,), figure)


def _workload(results: Results, tables: Tables) -> Section | None:
    if not any(system.workload for system in results.systems):
        return None
    text = (
        "What a workflow costs: attempts are averaged in questions, questions in sets, sets "
        "equally. Squares are cascades, circles hierarchies."
    )
    return Section("workload", "Workload", text, (Part(tables.workload()),), "workload")


def _budgets(results: Results, tables: Tables) -> Section | None:
    if not any(system.budgets for system in results.systems):
        return None
    text = (
        "The share of workflows that are correct and used at most so much, from the saved records: "
        "systems at equal budgets, though none was told a budget."
    )
    parts = tuple(
        Part(tables.budgets(kind), f"Budgets of {kind}", folded=True)
        for kind in ("searches", "tokens")
        if any(kind in system.budgets for system in results.systems)
    )
    return Section("budgets", "Equal budgets", text, parts, "budgets")


def _funnel(results: Results, tables: Tables) -> Section | None:
    if not any(system.funnel for system in results.systems):
        return None
    text = (
        "For each failed workflow the first broken link between search and answer. Whether a text "
        "holds the answer is decided by normalised containment, which says nothing for yes/no "
        "questions: they stand apart."
    )
    parts = (
        Part(tables.funnel("span"), "Counts", folded=True),
        Part(tables.funnel("yes_no"), "Counts, yes/no questions", folded=True),
    )
    kept = tuple(part for part in parts if part.table.rows)
    return Section("funnel", "Where workflows fail", text, kept, "funnel")


def _coverage(results: Results, tables: Tables) -> Section:
    n = results.num_attempts
    text = (
        f"Coverage is pass@{n}, consistency {n}/{n}; between them lies how the attempts of a "
        "question spread."
    )
    parts = (
        Part(tables.coverage()),
        Part(tables.failures(), "Format failures by role and kind", folded=True),
    )
    return Section("coverage", "Coverage, consistency, format", text, parts)


def _extraction(tables: Tables) -> Section:
    text = (
        "How much the strict reading of the answer decides. The flexible rules were fixed in a "
        "file before scoring and never see a reference answer. The completion bound is an "
        "assumption: every missing or malformed answer of the other system counts as right."
    )
    parts = (
        Part(tables.extraction(), "Flexible extraction"),
        Part(tables.completion(), "Completion bound"),
    )
    return Section("extraction", "Answer extraction", text, parts)


def _breakdown(results: Results, tables: Tables) -> Section | None:
    kinds = {one.kind for system in results.systems for one in system.breakdown}
    if not kinds:
        return None
    parts = tuple(
        Part(tables.breakdown(kind), title)
        for kind, title in (("hops", "By hops"), ("family", "By question family"))
        if kind in kinds
    )
    text = "Groups of questions across sets, every question counted once."
    return Section("breakdown", "By kind of question", text, parts)
