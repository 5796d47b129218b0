"""The numbers of one row: scores, workload, shares, funnel, budgets, breakdowns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import stdev

from moopd.config import Scale, StatisticsConfig
from moopd.evaluation import budget, diagnostics, protocol
from moopd.evaluation.bootstrap import Sampled, mean_of_runs, over_runs
from moopd.evaluation.estimates import by_set, many_by_set
from moopd.evaluation.funnel import Place, funnel
from moopd.evaluation.metrics import Column, metric_columns
from moopd.evaluation.results import (
    Breakdown,
    BudgetPoint,
    BySet,
    FunnelCounts,
    SystemResult,
)
from moopd.evaluation.rows import Row
from moopd.evaluation.samples import Runs, by_run, pooled, regrouped
from moopd.evaluation.scoring import Scored
from moopd.evaluation.workload import workload_columns
from moopd.types import Question

_FLEXIBLE = "flexible_"
_GROUPS: dict[str, Callable[[Question], str]] = {
    "family": lambda question: question.family,
    "hops": lambda question: "" if question.num_hops is None else str(question.num_hops),
}


def score_columns(scored: Scored) -> dict[str, Column]:
    """Strict metrics under their names, flexible ones with `flexible_` before."""
    flexible = metric_columns(scored.flexible)
    return {
        **metric_columns(scored.strict),
        **{f"{_FLEXIBLE}{name}": column for name, column in flexible.items()},
    }


@dataclass(frozen=True)
class Numbers:
    """Resampled columns of all rows; each kind is one pass over the questions."""

    runs: Runs
    config: StatisticsConfig

    @cached_property
    def scores(self) -> dict[str, dict[str, dict[int, Sampled]]]:
        return by_run(self.runs, score_columns, self.config)

    @cached_property
    def others(self) -> dict[str, dict[str, Sampled]]:
        """Workload, agreement and the completed score, means over runs."""
        return pooled(self.runs, _other_columns, self.config)

    @cached_property
    def completed(self) -> dict[str, Sampled]:
        return {name: columns["completed"] for name, columns in self.others.items()}

    @cached_property
    def budgets(self) -> dict[str, dict[str, tuple[BudgetPoint, ...]]]:
        """kind -> system -> curve."""
        return {kind: self._curves(kind) for kind in budget.KINDS}

    @cached_property
    def breakdowns(self) -> dict[str, list[Breakdown]]:
        found: dict[str, list[Breakdown]] = {name: [] for name in self.runs}
        for kind, group_of in _GROUPS.items():
            for name, groups in self._grouped(kind, group_of).items():
                found[name] += groups
        return found

    def _curves(self, kind: str) -> dict[str, tuple[BudgetPoint, ...]]:
        able = {
            name: of_system
            for name, of_system in self.runs.items()
            if all(kind in budget.kinds(scored.attempts) for scored in of_system.values())
        }
        if not able:
            return {}
        grid = budget.budget_grid([s.attempts for of in able.values() for s in of.values()], kind)

        def columns_of(scored: Scored) -> dict[str, Column]:
            columns = budget.budget_columns(scored, kind, grid)
            return {str(limit): column for limit, column in zip(grid, columns, strict=True)}

        sampled = pooled(able, columns_of, self.config)
        curves = {}
        for name, columns in sampled.items():
            points = many_by_set([columns[str(limit)] for limit in grid], self.config.confidence)
            curves[name] = tuple(
                BudgetPoint(budget=limit, share=point.macro)
                for limit, point in zip(grid, points, strict=True)
            )
        return curves

    def _grouped(
        self, kind: str, group_of: Callable[[Question], str]
    ) -> dict[str, list[Breakdown]]:
        sets = [s.attempts.questions for of in self.runs.values() for s in of.values()]
        groups = [Counter(group_of(q) for q in one.questions if group_of(q)) for one in sets]
        # Runs on other questions can be averaged only where they have the same groups.
        if len({tuple(sorted(one)) for one in groups}) != 1 or len(groups[0]) < 2:
            return {}
        sampled = pooled(
            self.runs,
            lambda scored: {"avg": metric_columns(scored.strict)["avg"]},
            self.config,
            lambda questions: regrouped(questions, group_of),
        )
        return {
            name: [
                Breakdown(kind=kind, group=group, num_questions=groups[0][group], avg=estimate)
                for group, estimate in by_set(columns["avg"], self.config.confidence).sets.items()
            ]
            for name, columns in sampled.items()
        }


def system_result(row: Row, numbers: Numbers, scale: Scale | None) -> SystemResult:
    """Everything about one row."""
    runs = [scored for _, scored in sorted(numbers.runs[row.name].items())]
    samples = numbers.scores[row.name]
    confidence = numbers.config.confidence
    run_avg = {str(run): 100 * one.point[-1] for run, one in sorted(samples["avg"].items())}
    several = len(run_avg) > 1
    hierarchical = over_runs(samples["avg"], numbers.config) if several else None
    strict, flexible = _scores(samples, confidence)
    others = numbers.others[row.name]
    return SystemResult(
        name=row.name,
        title=row.title,
        workflow=row.system.workflow if row.system else "",
        checkpoint=row.checkpoint,
        runs=tuple(sorted(numbers.runs[row.name])),
        num_records=sum(scored.attempts.num_records for scored in runs),
        strict=strict,
        flexible=flexible,
        run_avg=run_avg,
        run_spread=stdev(run_avg.values()) if several else None,
        over_runs=by_set(hierarchical, confidence).macro if hierarchical else None,
        workload={
            name: by_set(sampled, confidence, 1.0)
            for name, sampled in others.items()
            if name not in ("agreement", "completed")
        },
        shares=_shares(runs),
        histogram=tuple(map(sum, zip(*map(diagnostics.correct_histogram, runs), strict=True))),
        agreement=by_set(others["agreement"], confidence).macro,
        failures=_failures(runs),
        funnel=_funnel(runs),
        budgets={
            kind: curves[row.name] for kind, curves in numbers.budgets.items() if row.name in curves
        },
        breakdown=tuple(numbers.breakdowns[row.name]),
        reported=row.reported,
        notes=protocol.system_notes(row.system, scale),
    )


def _other_columns(scored: Scored) -> dict[str, Column]:
    return {
        **workload_columns(scored.attempts),
        "agreement": diagnostics.agreement_column(scored),
        "completed": diagnostics.completed_column(scored),
    }


def _scores(
    samples: Mapping[str, Mapping[int, Sampled]], confidence: float
) -> tuple[dict[str, BySet], dict[str, BySet]]:
    names = list(samples)
    means = [mean_of_runs(list(samples[name].values())) for name in names]
    made = dict(zip(names, many_by_set(means, confidence), strict=True))
    strict = {name: made[name] for name in names if not name.startswith(_FLEXIBLE)}
    return strict, {name: made[f"{_FLEXIBLE}{name}"] for name in strict}


def _shares(runs: Sequence[Scored]) -> dict[str, float]:
    found = [diagnostics.collapse_shares(scored) for scored in runs]
    names = dict.fromkeys(name for shares in found for name in shares)
    empty = diagnostics.Share(0, 0)
    return {
        name: diagnostics.Share.pooled(
            # A stop reason that a run never had counts as none of its workflows.
            shares.get(name, empty._replace(total=scored.attempts.num_records))
            for shares, scored in zip(found, runs, strict=True)
        ).percent
        for name in names
    }


def _failures(runs: Sequence[Scored]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for scored in runs:
        counts.update(diagnostics.format_failures(scored))
    return dict(sorted(counts.items()))


def _funnel(runs: Sequence[Scored]) -> FunnelCounts | None:
    found = [funnel(scored) for scored in runs]
    made = [one for one in found if one is not None]
    if len(made) != len(runs):
        return None
    return FunnelCounts(
        span={place.value: sum(one.span[place] for one in made) for place in Place},
        yes_no={place.value: sum(one.yes_no[place] for one in made) for place in Place},
    )
