"""Equal-budget comparison: what share of workflows is right and finished within a budget.

Saved records answer this without new runs: a workflow that used more than the budget counts as
wrong. It says nothing about how a system would act if it knew its budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moopd.evaluation.attempts import Attempts
from moopd.evaluation.metrics import Column, whole
from moopd.evaluation.scoring import Scored

_USED = {"searches": ("num_searches",), "tokens": ("input_tokens", "output_tokens")}
KINDS = tuple(_USED)
MAX_POINTS = 13


def kinds(attempts: Attempts) -> tuple[str, ...]:
    """Budgets that the records can speak about: searches, tokens (input + output)."""
    return tuple(kind for kind, names in _USED.items() if all(n in attempts.counts for n in names))


def budget_grid(systems: Sequence[Attempts], kind: str) -> tuple[int, ...]:
    """Budgets for all systems alike, from nothing up to the most that any workflow used.

    Up to MAX_POINTS - 1 every number of searches is a point; above, and for tokens, points are
    quantiles of what was used, the largest included.
    """
    used = np.concatenate([_used(attempts, kind).ravel() for attempts in systems])
    most = int(used.max())
    if kind == "searches" and most < MAX_POINTS:
        return tuple(range(most + 1))
    cuts = np.quantile(used, np.linspace(0, 1, MAX_POINTS), method="higher")
    return tuple(sorted({0, *(int(cut) for cut in cuts)}))


def budget_columns(scored: Scored, kind: str, budgets: Sequence[int]) -> list[Column]:
    """One column per budget: attempts that are right and used at most that much."""
    used = _used(scored.attempts, kind)
    size = scored.attempts.num_attempts
    return [
        whole((scored.strict.correct & (used <= budget)).sum(axis=1), size) for budget in budgets
    ]


def _used(attempts: Attempts, kind: str) -> NDArray[np.float64]:
    first, *rest = (attempts.counts[name] for name in _USED[kind])
    return sum(rest, start=first)
