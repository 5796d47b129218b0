"""Question bootstrap inside each set (section A.2), the same draws for every system.

A draw is kept as the number of times that each question was drawn, so that 4,000 resamples of any
number of columns are one matrix product. Counts and columns hold whole numbers: sums are exact, and
the same seed gives the same bytes whatever the number of threads or the order of the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moopd.config import StatisticsConfig
from moopd.evaluation.attempts import QuestionSet
from moopd.evaluation.metrics import MACRO, Column, set_means

_BLOCK = 256
_STACK = 16
"""Draws and samples handled at once: what stays in the cache is several times faster."""

Draws = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Sampled:
    """A statistic in every set and on average: point values, and `draws` (sets + 1, D).

    The last row of `draws` and the last name are the equal-weight mean of the sets.
    """

    names: tuple[str, ...]
    point: tuple[float, ...]
    draws: Draws

    def __sub__(self, other: Sampled) -> Sampled:
        if self.names != other.names or self.draws.shape != other.draws.shape:
            raise ValueError(
                f"cannot pair {self.names} with {other.names}: both need the same sets and draws"
            )
        point = tuple(a - b for a, b in zip(self.point, other.point, strict=True))
        return Sampled(self.names, point, self.draws - other.draws)


class Interval(NamedTuple):
    low: float
    high: float


@lru_cache(maxsize=64)
def question_draws(
    ids: tuple[str, ...], name: str, num_draws: int, seed: int
) -> NDArray[np.uint16]:
    """How often each question of set `name` is drawn, (D, n). Depends on seed, name and ids alone:
    systems and runs on the same questions share their draws, other questions get others."""
    digest = hashlib.sha256("\n".join((name, *ids)).encode()).digest()
    words = np.frombuffer(digest[:16], dtype="<u4").tolist()
    rng = np.random.default_rng([seed & 0xFFFFFFFF, *words])
    size = len(ids)
    counts = np.empty((num_draws, size), dtype=np.uint16)
    rows = np.arange(_BLOCK, dtype=np.int64)[:, None] * size
    for start in range(0, num_draws, _BLOCK):
        block = counts[start : start + _BLOCK]
        drawn = rng.integers(0, size, block.shape, dtype=np.int64)
        drawn += rows[: len(block)]
        block[:] = np.bincount(drawn.ravel(), minlength=block.size).reshape(block.shape)
    counts.flags.writeable = False
    return counts


def bootstrap(
    columns: Mapping[Key, Column], questions: QuestionSet, config: StatisticsConfig
) -> dict[Key, Sampled]:
    """Every column resampled with the same draws."""
    keys = list(columns)
    names = (*questions.sets, MACRO)
    draws = np.zeros((len(keys), len(names), config.num_draws))
    if keys:
        matrix = np.stack([columns[key].values for key in keys], axis=1)
        divisors = np.array([columns[key].divisor for key in keys])
        ids = questions.ids
        for place, (name, part) in enumerate(questions.sets.items()):
            counts = question_draws(ids[part], name, config.num_draws, config.seed)
            scale = divisors * (part.stop - part.start)
            for start in range(0, config.num_draws, _BLOCK):
                block = slice(start, start + _BLOCK)
                sums = counts[block].astype(np.float64) @ matrix[part]
                draws[:, place, block] = (sums / scale).T
        draws[:, -1] = draws[:, :-1].sum(axis=1) / len(questions.sets)
    return {
        key: Sampled(names, tuple(set_means(columns[key], questions.sets).values()), draws[number])
        for number, key in enumerate(keys)
    }


def intervals(samples: Sequence[Sampled], confidence: float) -> list[tuple[Interval, ...]]:
    """Percentile intervals, one per name of every sample."""
    tail = (1 - confidence) / 2
    found = []
    for start in range(0, len(samples), _STACK):
        stacked = np.stack([sample.draws for sample in samples[start : start + _STACK]])
        ends = np.quantile(stacked, [tail, 1 - tail], axis=-1, overwrite_input=True)
        for lows, highs in zip(*ends.tolist(), strict=True):
            found.append(tuple(Interval(*ends) for ends in zip(lows, highs, strict=True)))
    return found


def mean_of_runs(runs: Sequence[Sampled]) -> Sampled:
    """The average over runs of fixed policies: questions resampled, runs not."""
    point = tuple(sum(values) / len(runs) for values in zip(*(r.point for r in runs), strict=True))
    return Sampled(runs[0].names, point, _mean([run.draws for run in runs]))


def over_runs(runs: Mapping[int, Sampled], config: StatisticsConfig) -> Sampled:
    """Hierarchical bootstrap: runs are drawn first, then questions inside them.

    Which runs a draw takes depends on the run numbers alone, so that two systems trained with the
    same seeds are paired by seed.
    """
    numbers = sorted(runs)
    rng = np.random.default_rng([config.seed & 0xFFFFFFFF, 0x52554E53, *numbers])
    picks = rng.integers(0, len(numbers), (config.num_draws, len(numbers)))
    stacked = np.stack([runs[number].draws for number in numbers])
    everywhere = np.arange(config.num_draws)
    drawn = [stacked[picks[:, k], :, everywhere].T for k in range(len(numbers))]
    average = mean_of_runs([runs[number] for number in numbers])
    return Sampled(average.names, average.point, _mean(drawn))


def _mean(parts: Sequence[Draws]) -> Draws:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total / len(parts)
