"""BM25 (bm25s) for machines without an encoder model. The whole index is held in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moopd.retrieval.artefact import Progress
from moopd.retrieval.base import Hit, check_request, passages_only
from moopd.retrieval.corpus import CorpusSurvey, indexed_text, read_passages
from moopd.retrieval.store import PassageStore, PassageWriter
from moopd.retrieval.words import index_words
from moopd.types import Passage

K1, B = 0.9, 0.4
"""Common choice for Wikipedia passages of about 100 words."""

_FOLDER = "bm25"


class LexicalRetriever:
    """BM25 over words; a passage that shares no word with the query is never a hit."""

    def __init__(self, folder: Path) -> None:
        self._index: Any = _bm25s().BM25.load(
            folder / _FOLDER, load_vocab=True, mmap=True, allow_pickle=False
        )
        self._store = PassageStore(folder, num_shards=1)

    @property
    def num_passages(self) -> int:
        return len(self._store)

    @property
    def store(self) -> PassageStore:
        return self._store

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return passages_only(self.search_scored(queries, top_k))

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        check_request(queries, top_k)
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[Hit]:
        vocabulary = self._index.vocab_dict
        tokens = [vocabulary[word] for word in index_words(query) if word in vocabulary]
        if not tokens:
            return []
        scores: NDArray[np.float32] = self._index.get_scores_from_ids(tokens)
        positions = _best(scores, top_k)
        return [Hit(self._store[int(i)], float(scores[i])) for i in positions]


def _best(scores: NDArray[np.float32], top_k: int) -> NDArray[np.intp]:
    """Positions of the best positive scores, ties by corpus order."""
    if top_k < len(scores):
        least = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        candidates = np.flatnonzero((scores >= least) & (scores > 0))
    else:
        candidates = np.flatnonzero(scores > 0)
    return candidates[np.lexsort((candidates, -scores[candidates]))][:top_k]


def _bm25s() -> Any:
    """bm25s tries JAX out when it is imported, and JAX takes three quarters of a GPU's memory."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        import bm25s
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before
    return bm25s


def lexical_fingerprint() -> dict[str, Any]:
    return {"kind": "bm25", "version": 1, "method": "lucene", "k1": K1, "b": B}


def lexical_bytes(corpus: CorpusSurvey) -> int:
    """Disk an index takes at most: passages, and 8 bytes for about every word of 4 bytes."""
    return corpus.num_bytes * 3 + corpus.num_passages * 8


def write_lexical(
    corpus_path: Path, corpus: CorpusSurvey, folder: Path, progress: Progress | None
) -> None:
    """Index a corpus. The vocabulary is numbered in order of appearance: stable bytes."""
    vocabulary: dict[str, int] = {}
    writer = PassageWriter(folder, 0)
    tokens: list[NDArray[np.int32]] = []
    for passage in _counted(corpus_path, corpus, progress):
        writer.write([passage])
        words = index_words(indexed_text(passage))
        ids = [vocabulary.setdefault(word, len(vocabulary)) for word in words]
        tokens.append(np.array(ids, np.int32))
    writer.close()
    index = _bm25s().BM25(k1=K1, b=B, method="lucene", backend="numpy")
    index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder / _FOLDER, allow_pickle=False, show_progress=False)


def _counted(
    corpus_path: Path, corpus: CorpusSurvey, progress: Progress | None
) -> Iterator[Passage]:
    for done, passage in enumerate(read_passages(corpus_path), start=1):
        yield passage
        if progress is not None and (done % 10_000 == 0 or done == corpus.num_passages):
            progress(done, corpus.num_passages)
