"""Sequences that begin alike share one row: what a causal model computes once is computed once."""

from __future__ import annotations

from collections.abc import Sequence

Ids = tuple[int, ...]


def merge_prefixes(sequences: Sequence[Ids]) -> tuple[list[Ids], list[int]]:
    """Rows such that each sequence is a prefix of its row; the row number of each sequence.

    In lexicographic order everything between a sequence and its extension begins with it too, so
    walking backwards it is enough to look at the row met last.
    """
    rows: list[Ids] = []
    row_of = [0] * len(sequences)
    for number in sorted(range(len(sequences)), key=sequences.__getitem__, reverse=True):
        ids = sequences[number]
        if not rows or rows[-1][: len(ids)] != ids:
            rows.append(ids)
        row_of[number] = len(rows) - 1
    return rows, row_of
