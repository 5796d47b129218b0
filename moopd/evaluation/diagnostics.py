"""How workflows behave: collapse shares (section A.5), format failures, coverage, consistency."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moopd.data.normalize import normalize_answer
from moopd.evaluation.metrics import Column, whole
from moopd.evaluation.records import RecordsError
from moopd.evaluation.scoring import Scored


class Share(NamedTuple):
    """`number` of `total` workflows, kept as whole numbers so that runs can be pooled."""

    number: int
    total: int

    @property
    def percent(self) -> float:
        return 100 * self.number / self.total

    @classmethod
    def pooled(cls, shares: Iterable[Share]) -> Share:
        numbers, totals = zip(*shares, strict=True)
        return cls(sum(numbers), sum(totals))


def collapse_shares(scored: Scored) -> dict[str, Share]:
    """Shares of workflows, every workflow counted once as the paper does (0 of 20,000)."""
    counts, total = scored.attempts.counts, scored.attempts.num_records
    shares = {"with_answer": Share(sum(f is None for f in scored.failures), total)}
    if "num_searches" in counts:
        shares["no_search"] = Share(int((counts["num_searches"] == 0).sum()), total)
    if "num_subtasks" in counts:
        shares["with_subtasks"] = Share(int((counts["num_subtasks"] > 0).sum()), total)
    if "num_reports" in counts:
        shares["with_reports"] = Share(int((counts["num_reports"] > 0).sum()), total)
    stops = [stop for stop in scored.attempts.stops if stop]
    for reason, number in sorted(Counter(stops).items()):
        shares[f"stop_{reason}"] = Share(number, len(stops))
    return shares


def format_failures(scored: Scored) -> dict[str, int]:
    """`role/kind` -> how many turns, as recorded; `final_answer/kind` from the outputs."""
    found: Counter[str] = Counter()
    for text in scored.attempts.format_failures:
        if text and text != "{}":
            found.update(_failure_counts(scored.attempts.system, text))
    found.update(f"final_answer/{kind}" for kind in scored.failures if kind is not None)
    return dict(sorted(found.items()))


def _failure_counts(system: str, text: str) -> dict[str, int]:
    try:
        counts = json.loads(text)
    except (ValueError, RecursionError):
        counts = None
    if not isinstance(counts, dict) or any(type(n) is not int or n < 0 for n in counts.values()):
        raise RecordsError(
            f"{system}: format_failures: got {text[:80]}, expected an object of counts such as "
            '{"searcher/unclosed": 1}'
        )
    return counts


def correct_histogram(scored: Scored) -> list[int]:
    """Questions by how many of their attempts are right: 0, 1, ... A."""
    numbers = scored.strict.correct.sum(axis=1)
    counts = np.bincount(numbers, minlength=scored.attempts.num_attempts + 1)
    return [int(count) for count in counts]


def agreement_column(scored: Scored) -> Column:
    """Pairs of attempts with the same normalised answer, of all pairs; no answer agrees with
    nothing. Consistency apart from being right."""
    size = scored.attempts.num_attempts
    answers = scored.strict.answers
    pairs = [_agreeing(answers[start : start + size]) for start in range(0, len(answers), size)]
    return whole(pairs, max(1, size * (size - 1) // 2))


def completed_column(scored: Scored) -> Column:
    """avg@4 if every missing or malformed final answer were right: an assumption, no measurement
    (section A.4)."""
    size = scored.attempts.num_attempts
    failed = np.array([f is not None for f in scored.failures]).reshape(-1, size)
    return whole((scored.strict.correct | failed).sum(axis=1), size)


def _agreeing(answers: Sequence[str | None]) -> int:
    votes = Counter(normalize_answer(answer) for answer in answers if answer is not None)
    return sum(n * (n - 1) // 2 for vote, n in votes.items() if vote)
