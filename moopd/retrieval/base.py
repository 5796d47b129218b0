"""What the workflows need from retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moopd.types import Passage


class RetrievalError(RuntimeError):
    """The retriever could not answer; recorded as such, never as "no passages found"."""


class Retriever(Protocol):
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Best passages first for each query; fewer than `top_k` when the corpus is smaller.

        Raises ValueError for `top_k` < 1 and RetrievalError when retrieval itself fails.
        """
        ...
