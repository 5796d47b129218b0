"""Speed of the statistics: `python benchmarks/statistics.py [--full]`.

Work: 13 systems x 20,000 records, 4,000 paired draws, three metrics, all 78 pairs, every set and
the macro average. The same work is timed as a loop over scipy.stats.bootstrap (a sample of its
calls, or all of them with --full), then 260,000 outputs are scored.
"""

from __future__ import annotations

import sys
from pathlib import Path

# ruff: noqa: E402  (this file's name would hide the standard library's `statistics`)
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from itertools import combinations

# Products of small blocks: a second BLAS thread waits more than it works.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from moopd.config import StatisticsConfig
from moopd.evaluation.attempts import Attempts, QuestionSet, question_set
from moopd.evaluation.bootstrap import Interval, bootstrap, intervals
from moopd.evaluation.metrics import Column, metric_columns
from moopd.evaluation.scoring import Verdicts, load_rules, score
from moopd.types import DATASETS, Question

NUM_SYSTEMS = 13
NUM_ATTEMPTS = 4
METRICS = ("avg", "pass", "all")
SIZES = dict(zip(DATASETS, (813, 813, 813, 812, 812, 812, 125), strict=True))
LIMITS = {"seconds": 3.0, "GiB": 1.0, "times": 50.0, "scoring seconds": 10.0}

Key = tuple[int, int | None, str]
"""(system, None, metric), or (first, second, metric) of a paired difference."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="run every call of the scipy loop")
    full = parser.parse_args().full
    questions = question_set(
        Question(f"{name}-{k:04d}", name, "?", (f"gold {k}",))
        for name, size in SIZES.items()
        for k in range(size)
    )
    columns = _columns(questions)
    started = time.perf_counter()
    ours = _ours(columns, questions)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report = _Report()
    size = f"{NUM_SYSTEMS} systems x {NUM_ATTEMPTS * len(questions):,} records"
    print(f"{size}, {StatisticsConfig().num_draws:,} draws: {len(ours)} statistics in every set")
    report.line("statistics", seconds, "s", seconds <= LIMITS["seconds"], "at most 3")
    report.line("peak memory of the process", peak, "GiB", peak <= LIMITS["GiB"], "at most 1")

    chosen = list(ours) if full else list(ours)[:: max(1, len(ours) // 8)]
    theirs, scipy_seconds = _scipy(columns, questions, chosen)
    whole = scipy_seconds * len(ours) / len(chosen)
    how = "measured" if full else f"from {len(chosen)} of {len(ours)} statistics"
    report.line(f"loop over scipy.stats.bootstrap, {how}", whole, "s")
    times = whole / seconds
    report.line("ratio", times, "x", times >= LIMITS["times"], "at least 50")
    ends = [zip(ours[key][-1], theirs[key][-1], strict=True) for key in chosen]
    worst = max(abs(a - b) for of_key in ends for a, b in of_key)
    report.line("largest gap between the ends of two macro intervals", 100 * worst, "points")

    scoring = _scoring(questions)
    number = NUM_SYSTEMS * NUM_ATTEMPTS * len(questions)
    met = scoring <= LIMITS["scoring seconds"]
    report.line(f"scoring {number:,} outputs, strict and flexible", scoring, "s", met, "at most 10")
    sys.exit(0 if report.good else 1)


class _Report:
    """Prints one line per figure and remembers whether all limits were met."""

    def __init__(self) -> None:
        self.good = True

    def line(
        self, name: str, value: float, unit: str, met: bool | None = None, limit: str = ""
    ) -> None:
        verdict = "" if met is None else f"  ({limit}: {'met' if met else 'MISSED'})"
        self.good &= met is not False
        print(f"{name:<58}{value:>9.2f} {unit}{verdict}", flush=True)


def _columns(questions: QuestionSet) -> dict[tuple[int, str], Column]:
    rng = np.random.default_rng(0)
    hardness = rng.beta(0.8, 1.2, len(questions))[:, None]
    found: dict[tuple[int, str], Column] = {}
    for system in range(NUM_SYSTEMS):
        correct = rng.random((len(questions), NUM_ATTEMPTS)) < hardness * (0.6 + 0.03 * system)
        made = metric_columns(Verdicts(("x",) * correct.size, correct))
        found.update({(system, metric): made[metric] for metric in METRICS})
    return found


def _keys() -> Iterator[Key]:
    for metric in METRICS:
        for system in range(NUM_SYSTEMS):
            yield system, None, metric
        for first, second in combinations(range(NUM_SYSTEMS), 2):
            yield first, second, metric


def _ours(
    columns: dict[tuple[int, str], Column], questions: QuestionSet
) -> dict[Key, tuple[Interval, ...]]:
    sampled = bootstrap(columns, questions, StatisticsConfig())
    keys = list(_keys())
    samples = [
        sampled[first, metric]
        if second is None
        else sampled[first, metric] - sampled[second, metric]
        for first, second, metric in keys
    ]
    return dict(zip(keys, intervals(samples, 0.95), strict=True))


def _scipy(
    columns: dict[tuple[int, str], Column], questions: QuestionSet, keys: list[Key]
) -> tuple[dict[Key, tuple[Interval, ...]], float]:
    from scipy.stats import bootstrap as resample

    def interval(
        data: tuple[NDArray[np.float64], ...], statistic: Callable[..., NDArray[np.float64]]
    ) -> Interval:
        made = resample(data, statistic, n_resamples=4000, method="percentile", batch=1000,
                        vectorized=True, rng=np.random.default_rng(0))  # fmt: skip
        return Interval(*(float(end) for end in made.confidence_interval))

    def mean(sample: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return np.asarray(np.mean(sample, axis=axis))

    def macro(*samples: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return np.asarray(np.mean([np.mean(one, axis=axis) for one in samples], axis=0))

    found: dict[Key, tuple[Interval, ...]] = {}
    started = time.perf_counter()
    for first, second, metric in keys:
        column = columns[first, metric]
        values = column.values / column.divisor
        if second is not None:
            values = values - columns[second, metric].values / column.divisor
        sets = tuple(values[part] for part in questions.sets.values())
        found[first, second, metric] = (*(interval((one,), mean) for one in sets),
                                        interval(sets, macro))  # fmt: skip
    return found, time.perf_counter() - started


def _scoring(questions: QuestionSet) -> float:
    shapes = (
        "<answer>gold {k}</answer>",
        "The reports say so. <answer> the Gold {k}! </answer>",
        "<answer>something else, {k}</answer>",
        "**Final answer:** gold {k}.\nThis follows from the second report.",
        "I cannot tell from these reports what the place number {k} may be, so I will not answer.",
    )
    outputs = [
        shapes[(k + attempt) % len(shapes)].format(k=k)
        for k in range(len(questions))
        for attempt in range(NUM_ATTEMPTS)
    ]
    rules = load_rules()
    nothing: tuple[None, ...] = (None,) * len(outputs)
    systems = [
        Attempts(f"s{system}", 0, "", questions, NUM_ATTEMPTS, tuple(outputs), nothing, {}, nothing,
                 None)
        for system in range(NUM_SYSTEMS)
    ]  # fmt: skip
    started = time.perf_counter()
    for attempts in systems:
        score(attempts, rules)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
