"""Exact inner-product search (FAISS, flat) over encoded passages kept in memory-mapped shards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moopd.retrieval.artefact import Progress, finished
from moopd.retrieval.base import (
    Hit,
    IndexBuildError,
    RetrievalError,
    check_request,
    passages_only,
)
from moopd.retrieval.corpus import CorpusSurvey, indexed_text, read_passages, to_line
from moopd.retrieval.encoder import Device, Encoder, Vectors
from moopd.retrieval.store import PassageStore, PassageWriter
from moopd.types import Passage

_LOG = logging.getLogger(__name__)
_VECTORS = "vectors-{:05d}.npy"
_CHUNK = 4096
_BLAS_QUERIES = 8
_MARGIN = 16
"""Extra candidates that are scored again; see `DenseRetriever`."""


class DenseRetriever:
    """Flat inner-product search over an index folder.

    BLAS, its batch sizes and the GPU round differently; the candidates are therefore scored again
    in float64, ties by corpus order, so that a query's passages do not depend on its neighbours.
    """

    def __init__(self, encoder: Encoder, folder: Path, num_shards: int, device: Device) -> None:
        self._encoder = encoder
        self._store = PassageStore(folder, num_shards)
        self._shards = [
            np.load(folder / _VECTORS.format(shard), mmap_mode="r", allow_pickle=False)
            for shard in range(num_shards)
        ]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self._gpu: Any | None = None
        if device != "cpu":
            self._gpu = _gpu_index(self._shards, encoder.dimension, device)

    @property
    def num_passages(self) -> int:
        return len(self._store)

    @property
    def on_gpu(self) -> bool:
        return self._gpu is not None

    @property
    def store(self) -> PassageStore:
        return self._store

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return passages_only(self.search_scored(queries, top_k))

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        check_request(queries, top_k)
        if not queries:
            return []
        vectors = self._encoder.encode_queries(queries)
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if broken.size:
            raise RetrievalError(
                f"query {int(broken[0])} {queries[int(broken[0])][:60]!r}: got a vector with "
                "non-finite numbers, expected finite ones; check the encoder's weights and dtype"
            )
        candidates = self._nearest(vectors, min(top_k + _MARGIN, self.num_passages))
        return [
            self._ranked(vector, row, top_k)
            for vector, row in zip(vectors, candidates, strict=True)
        ]

    def _nearest(self, vectors: Vectors, k: int) -> NDArray[np.int64]:
        """Positions (Q, k) of the best candidates, in no promised order."""
        if self._gpu is not None:
            found: NDArray[np.int64] = self._gpu.search(vectors, k)[1]
            return found
        import faiss

        _prefer_blas(self._encoder.dimension)
        scores = np.zeros((len(vectors), 0), np.float32)
        positions = np.zeros((len(vectors), 0), np.int64)
        for start, shard in zip(self._starts[:-1], self._shards, strict=True):
            best, rows = faiss.knn(
                vectors, np.asarray(shard), min(k, len(shard)), metric=faiss.METRIC_INNER_PRODUCT
            )
            scores = np.concatenate([scores, best], axis=1)
            positions = np.concatenate([positions, rows + start], axis=1)
            order = np.lexsort((positions, -scores), axis=1)[:, :k]
            scores = np.take_along_axis(scores, order, axis=1)
            positions = np.take_along_axis(positions, order, axis=1)
        return positions

    def _ranked(self, vector: Vectors, candidates: NDArray[np.int64], top_k: int) -> list[Hit]:
        if not vector.any():
            return []  # nothing of the query is left: no passage is evidence for it
        positions = np.sort(candidates[candidates >= 0])
        exact = self._vectors_at(positions).astype(np.float64) @ vector.astype(np.float64)
        best = np.lexsort((positions, -exact))[:top_k]
        return [Hit(self._store[int(positions[i])], float(exact[i])) for i in best]

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        """Rows of ascending positions."""
        cuts = np.searchsorted(positions, self._starts)
        return np.concatenate(
            [
                shard[positions[low:high] - start]
                for shard, start, low, high in zip(
                    self._shards, self._starts[:-1], cuts[:-1], cuts[1:], strict=True
                )
                if low < high
            ]
        )


def _prefer_blas(dimension: int) -> None:
    """Let FAISS multiply matrices from 8 queries on, where that is up to 4 times faster.

    Its own limit, a setting of the whole process, is 20 queries before version 1.15 and 128,000
    numbers (250 queries of 512) from there.
    """
    import faiss

    if faiss.cvar.distance_compute_blas_threshold not in (_BLAS_QUERIES, _BLAS_QUERIES * dimension):
        counts_queries = faiss.cvar.distance_compute_blas_threshold <= 20
        faiss.cvar.distance_compute_blas_threshold = (
            _BLAS_QUERIES if counts_queries else _BLAS_QUERIES * dimension
        )


def _gpu_index(shards: Sequence[Vectors], dimension: int, device: Device) -> Any | None:
    """The shards as one FAISS index on the GPU; None where FAISS has no GPU or it is too small."""
    import faiss

    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        if device == "gpu":
            _LOG.warning("retrieval.device is gpu, but this faiss sees none: searching on the CPU")
        return None
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), dimension)
    try:
        for shard in shards:
            index.add(np.ascontiguousarray(shard))
    except RuntimeError as error:
        size = sum(shard.nbytes for shard in shards) / 1e9
        _LOG.warning("an index of %.1f GB stays on the CPU: %s", size, error)
        return None
    return index


# ---------------------------------------------------------------- building


def num_shards(num_passages: int, shard_size: int) -> int:
    return -(-num_passages // shard_size)


def dense_bytes(corpus: CorpusSurvey, dimension: int) -> int:
    """Disk an index takes: float32 vectors, passages, one int64 offset a passage."""
    return corpus.num_bytes + corpus.num_passages * (4 * dimension + 8)


def write_shards(
    encoder: Encoder,
    corpus_path: Path,
    corpus: CorpusSurvey,
    shard_size: int,
    folder: Path,
    progress: Progress | None,
) -> None:
    """Encode the corpus shard by shard; a shard that lies there complete is not encoded again.

    Memory: one chunk of passages and its vectors, whatever the corpus. Raises IndexBuildError for
    non-finite vectors and for a corpus that changed since it was surveyed.
    """
    passages = read_passages(corpus_path)
    digest = hashlib.sha256()
    for shard in range(num_shards(corpus.num_passages, shard_size)):
        size = min(shard_size, corpus.num_passages - shard * shard_size)
        chunks = _chunks(islice(passages, size), digest)
        if _complete(folder / _VECTORS.format(shard), (size, encoder.dimension)):
            for _ in chunks:
                pass
        else:
            _write_shard(encoder, chunks, folder, shard, size)
        if progress is not None:
            progress(shard * shard_size + size, corpus.num_passages)
    if next(passages, None) is not None or digest.hexdigest() != corpus.sha256:
        raise IndexBuildError(f"{corpus_path} changed while its index was built; build it again")


def _write_shard(
    encoder: Encoder, chunks: Iterator[list[Passage]], folder: Path, shard: int, size: int
) -> None:
    writer = PassageWriter(folder, shard)
    with finished(folder / _VECTORS.format(shard)) as temporary:
        vectors = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.float32, shape=(size, encoder.dimension)
        )
        start = 0
        for chunk in chunks:
            encoded = encoder.encode_passages([indexed_text(passage) for passage in chunk])
            broken = np.flatnonzero(~np.isfinite(encoded).all(axis=1))
            if broken.size:
                raise IndexBuildError(
                    f"passage {chunk[int(broken[0])].id!r}: got a vector with non-finite numbers, "
                    "expected finite ones; check the encoder's weights and dtype"
                )
            vectors[start : start + len(chunk)] = encoded
            writer.write(chunk)
            start += len(chunk)
        vectors.flush()
        del vectors
        # The vectors come last: where they lie, the shard's passages do too.
        writer.close()


def _chunks(passages: Iterator[Passage], digest: Any) -> Iterator[list[Passage]]:
    while chunk := list(islice(passages, _CHUNK)):
        for passage in chunk:
            digest.update(to_line(passage))
        yield chunk


def _complete(path: Path, shape: tuple[int, int]) -> bool:
    if not path.is_file():
        return False
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    return bool(vectors.shape == shape)
