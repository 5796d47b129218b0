"""What the workflows need from retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moopd.types import Passage


class RetrievalError(RuntimeError):
    """The retriever could not answer; recorded as such, never as "no passages found"."""


class IndexBuildError(RuntimeError):
    """An index cannot be built here (disk, empty corpus) or does not rank (probe)."""


class IndexMismatchError(RuntimeError):
    """An index on disk is missing, incomplete, or was not made by what wants to read it."""


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Best passages first for each query; fewer than `top_k` when the corpus is smaller.

        Raises ValueError for `top_k` < 1 and RetrievalError when retrieval itself fails.
        """
        ...


class ScoredRetriever(Retriever, Protocol):
    """A retriever that holds its index here; what the server serves."""

    @property
    def num_passages(self) -> int: ...

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """As `search`, with scores; ties by corpus order, so a shorter list is a prefix."""
        ...


def check_request(queries: Sequence[str], top_k: int) -> None:
    """Raise ValueError for a request that no retriever can answer."""
    if isinstance(queries, str):
        raise ValueError(f"queries: got one string {queries[:60]!r}, expected a list of strings")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k: got {top_k!r}, expected a whole number of at least 1")
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise ValueError(
                f"query {number}: got {type(query).__name__} {query!r}, expected a string"
            )


def passages_only(hits: list[list[Hit]]) -> list[list[Passage]]:
    return [[hit.passage for hit in found] for found in hits]
