"""Sampled statistics as the estimates that a report prints."""

from __future__ import annotations

from collections.abc import Sequence

from moopd.evaluation.bootstrap import Interval, Sampled, intervals
from moopd.evaluation.results import BySet, Estimate

PERCENT = 100.0


def by_set(sampled: Sampled, confidence: float, factor: float = PERCENT) -> BySet:
    return many_by_set([sampled], confidence, factor)[0]


def many_by_set(
    samples: Sequence[Sampled], confidence: float, factor: float = PERCENT
) -> list[BySet]:
    """One BySet per sample; values times `factor`."""
    found = []
    for sampled, of_names in zip(samples, intervals(samples, confidence), strict=True):
        made = {
            name: _estimate(value, interval, factor)
            for name, value, interval in zip(sampled.names, sampled.point, of_names, strict=True)
        }
        macro = made.pop(sampled.names[-1])
        found.append(BySet(sets=made, macro=macro))
    return found


def _estimate(value: float, interval: Interval, factor: float) -> Estimate:
    return Estimate(value=value * factor, low=interval.low * factor, high=interval.high * factor)
