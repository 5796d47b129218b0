"""What the workflows cost (section A.3): attempts averaged in questions, questions in sets, sets
equally. Tokens are summed over turns, so repeated history counts again."""

from __future__ import annotations

from moopd.evaluation.attempts import Attempts
from moopd.evaluation.metrics import Column, whole

WORKLOAD = {
    "searches": "num_searches",
    "repeated_queries": "num_repeated_queries",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "calls": "num_calls",
    "rounds": "num_rounds",
}
"""Name in reports -> column of the records."""


def workload_columns(attempts: Attempts) -> dict[str, Column]:
    """One column per workload figure that the records hold; others are left out, never zero."""
    return {
        name: whole(attempts.counts[column].sum(axis=1), attempts.num_attempts)
        for name, column in WORKLOAD.items()
        if column in attempts.counts
    }
