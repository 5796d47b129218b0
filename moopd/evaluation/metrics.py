"""Scores per question: avg@4, pass@4, 4/4 (section 4) and maj@4.

Values are whole numbers with a common divisor, so that every sum over questions is exact and does
not depend on the order of addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moopd.data.normalize import normalize_answer
from moopd.evaluation.scoring import Verdicts

METRICS = ("avg", "pass", "all", "maj")
"""Mean over the attempts, at least one right, all right, the majority answer right."""
MACRO = "macro"
"""The equal-weight mean of the sets, beside their names."""


class Column(NamedTuple):
    """A value per question: `values` (Q,) whole numbers, to be divided by `divisor`."""

    values: NDArray[np.float64]
    divisor: float = 1.0


def metric_columns(verdicts: Verdicts) -> dict[str, Column]:
    """One column per name in METRICS."""
    correct = verdicts.correct
    return {
        "avg": whole(correct.sum(axis=1), correct.shape[1]),
        "pass": whole(correct.any(axis=1)),
        "all": whole(correct.all(axis=1)),
        "maj": whole(majority_correct(verdicts)),
    }


def whole(values: object, divisor: float = 1.0) -> Column:
    """Counts or truth values per question as a column."""
    return Column(np.asarray(values, dtype=np.float64), divisor)


def majority_correct(verdicts: Verdicts) -> NDArray[np.bool_]:
    """Whether the majority answer of each question is right, (Q,).

    Attempts vote with their normalised answer; those without one do not vote. Of several answers
    with the most votes, the one that the earliest attempt gave wins.
    """
    num_questions, num_attempts = verdicts.correct.shape
    chosen = np.zeros(num_questions, dtype=np.bool_)
    for number in range(num_questions):
        start = number * num_attempts
        winner = majority_attempt(verdicts.answers[start : start + num_attempts])
        chosen[number] = winner is not None and verdicts.correct[number, winner]
    return chosen


def majority_attempt(answers: Sequence[str | None]) -> int | None:
    """The earliest attempt that gave the winning answer; None where nobody votes."""
    votes = [normalize_answer(answer) if answer is not None else "" for answer in answers]
    # most_common keeps the order of first appearance among equals: the stated tie rule.
    ranked = Counter(vote for vote in votes if vote).most_common(1)
    return votes.index(ranked[0][0]) if ranked else None


def set_means(column: Column, sets: Mapping[str, slice]) -> dict[str, float]:
    """Mean of a column in every set, and their equal-weight mean under MACRO."""
    means = {
        name: float(column.values[place].sum()) / (place.stop - place.start) / column.divisor
        for name, place in sets.items()
    }
    return {**means, MACRO: sum(means.values()) / len(means)}
