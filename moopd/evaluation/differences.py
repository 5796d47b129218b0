"""Paired differences between rows, and the completion bound (sections 4.1 and A.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from moopd.config import StatisticsConfig
from moopd.evaluation.bootstrap import Sampled, mean_of_runs, over_runs
from moopd.evaluation.estimates import by_set, many_by_set
from moopd.evaluation.results import CompletionBound, Difference, Estimate
from moopd.evaluation.rows import Row, partner_at_last_step
from moopd.evaluation.samples import Runs

Samples = Mapping[str, Mapping[str, Mapping[int, Sampled]]]
"""System -> column -> run -> sampled."""

COMPARED = ("avg", "pass", "all", "maj", "flexible_avg")


def paired_differences(
    rows: Sequence[Row], samples: Samples, reference: str, config: StatisticsConfig
) -> tuple[Difference, ...]:
    """All pairs of rows and metrics; the reference comes first where it takes part."""
    pairs = _pairs(rows, reference)
    keys = [(*pair, metric) for pair in pairs for metric in COMPARED]
    fixed = [
        mean_of_runs(list(samples[a][metric].values()))
        - mean_of_runs(list(samples[b][metric].values()))
        for a, b, _, metric in keys
    ]
    estimates = many_by_set(fixed, config.confidence)
    reported = {row.name: row.reported.leads for row in rows}
    found = []
    for (first, second, group, metric), estimate in zip(keys, estimates, strict=True):
        lead = reported[first].get(second) if metric == "avg" else None
        found.append(
            Difference(
                first=first,
                second=second,
                metric=metric,
                group=group,
                sets=estimate.sets,
                macro=estimate.macro,
                num_wins=sum(one.value > 0 for one in estimate.sets.values()),
                over_runs=_over_runs(samples[first][metric], samples[second][metric], config),
                reported=None
                if lead is None
                else Estimate(value=lead[0], low=lead[1], high=lead[2]),
            )
        )
    return tuple(found)


def completion_bounds(
    runs: Runs,
    completed: Mapping[str, Sampled],
    samples: Samples,
    reference: str,
    config: StatisticsConfig,
) -> tuple[CompletionBound, ...]:
    """Reference as it is against every other row with all its format failures counted right."""
    ours = mean_of_runs(list(samples[reference]["avg"].values()))
    return tuple(
        CompletionBound(
            reference=reference,
            other=name,
            num_failures=sum(
                failure is not None for scored in runs[name].values() for failure in scored.failures
            ),
            completed_avg=by_set(sampled, config.confidence).macro.value,
            difference=by_set(ours - sampled, config.confidence).macro,
        )
        for name, sampled in completed.items()
        if name != reference
    )


def _pairs(rows: Sequence[Row], reference: str) -> list[tuple[str, str, str]]:
    """(first, second, group) of every pair; elsewhere the later row comes first."""
    last = partner_at_last_step(reference, rows)
    ablations = {row.name for row in rows if row.is_ablation}
    found = []
    for earlier, later in combinations([row.name for row in rows], 2):
        names = {earlier, later}
        if last in names and (other := (names - {last}).pop()) in ablations:
            found.append((str(last), other, "ablation"))
        elif reference in names:
            other = (names - {reference}).pop()
            group = "other" if other == last or (last and other in ablations) else "main"
            found.append((reference, other, group))
        else:
            found.append((later, earlier, "other"))
    return found


def _over_runs(
    first: Mapping[int, Sampled], second: Mapping[int, Sampled], config: StatisticsConfig
) -> Estimate | None:
    if len(first) < 2 and len(second) < 2:
        return None
    return by_set(over_runs(first, config) - over_runs(second, config), config.confidence).macro
