"""Text to unit vectors: a hashing encoder that needs nothing, and E5 on transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moopd.retrieval.words import index_words

Vectors = NDArray[np.float32]
Device = Literal["cpu", "gpu", "auto"]


class Encoder(Protocol):
    """Queries and passages to (N, dimension) float32 rows of length 1 (0 where nothing is left)."""

    @property
    def dimension(self) -> int: ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """All that decides the vectors; an index is only read by an encoder with an equal one."""
        ...

    def fit(self, texts: Iterable[str]) -> None:
        """Learn from the corpus what the encoder wants to know of it, if anything."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `fit` learnt; the bytes depend on the corpus alone."""
        ...

    def load(self, folder: Path) -> None: ...

    def encode_queries(self, queries: Sequence[str]) -> Vectors: ...

    def encode_passages(self, texts: Sequence[str]) -> Vectors: ...


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_FEATURE_BITS = 40
_DF_BITS = 20
_PAIR_WEIGHT = 0.3
_CHUNK = 2048
_MAX_CACHED_WORDS = 2_000_000


class _WordHashes(dict[str, int]):
    """Word -> 64-bit hash, the same on every machine and in every process."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        if len(self) < _MAX_CACHED_WORDS:
            self[word] = value
        return value


class HashingEncoder:
    """Signed hashed word stems and pairs of neighbours, (1 + log tf) * idf, summed and normalised.

    Without `fit` every feature has idf 1.
    """

    def __init__(self, dimension: int) -> None:
        if dimension < 8:
            raise ValueError(f"dimension: got {dimension}, expected at least 8")
        self.dimension = dimension
        self._hashes = _WordHashes()
        self._idf: NDArray[np.float64] | None = None
        self._document_frequency = np.zeros(1 << _DF_BITS, np.int64)
        self._num_documents = 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "hashing",
            "version": 1,
            "dimension": self.dimension,
            "features": f"stems, pairs x {_PAIR_WEIGHT}",
            "pooling": "signed sum, (1 + log tf) * idf, l2",
            "query_prefix": "",
            "passage_prefix": "",
        }

    def fit(self, texts: Iterable[str]) -> None:
        self._document_frequency[:] = 0
        self._num_documents = 0
        remaining = iter(texts)
        while chunk := list(islice(remaining, _CHUNK)):
            _, features, _ = self._features(chunk)
            buckets = (features & np.uint64((1 << _DF_BITS) - 1)).astype(np.int64)
            self._document_frequency += np.bincount(buckets, minlength=1 << _DF_BITS)
            self._num_documents += len(chunk)
        self._set_idf()

    def save(self, folder: Path) -> None:
        used = np.flatnonzero(self._document_frequency)
        table = np.stack([used, self._document_frequency[used]], axis=1)
        header = np.array([[-1, self._num_documents]], np.int64)
        np.save(folder / "idf.npy", np.concatenate([header, table]), allow_pickle=False)

    def load(self, folder: Path) -> None:
        table = np.load(folder / "idf.npy", allow_pickle=False)
        self._num_documents = int(table[0, 1])
        self._document_frequency[:] = 0
        self._document_frequency[table[1:, 0]] = table[1:, 1]
        self._set_idf()

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode(queries)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts)

    def _set_idf(self) -> None:
        df = self._document_frequency
        idf = np.log1p((self._num_documents - df + 0.5).clip(min=0.5) / (df + 0.5))
        # What no passage has can match nothing: it would only add noise to a query.
        self._idf = np.where(df > 0, idf, 0.0)

    def _encode(self, texts: Sequence[str]) -> Vectors:
        parts = [self._encode_chunk(texts[i : i + _CHUNK]) for i in range(0, len(texts), _CHUNK)]
        return np.concatenate(parts) if parts else np.zeros((0, self.dimension), np.float32)

    def _encode_chunk(self, texts: Sequence[str]) -> Vectors:
        rows, features, counts = self._features(texts)
        weights = 1.0 + np.log(counts)
        if self._idf is not None:
            weights *= self._idf[(features & np.uint64((1 << _DF_BITS) - 1)).astype(np.int64)]
        weights[(features & np.uint64(1)) == 1] *= _PAIR_WEIGHT
        weights[(features >> np.uint64(_DF_BITS)) & np.uint64(1) == 1] *= -1.0
        columns = (features >> np.uint64(_DF_BITS + 1)) % np.uint64(self.dimension)
        cells = rows * self.dimension + columns.astype(np.int64)
        flat = np.bincount(cells, weights, minlength=len(texts) * self.dimension)
        vectors = flat.reshape(len(texts), self.dimension)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1.0)).astype(np.float32)

    def _features(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
        """(text row, feature, times) of every distinct feature; bit 0 tells a pair from a word."""
        words = [index_words(text) for text in texts]
        lookup = self._hashes.__getitem__
        hashes = np.array([lookup(w) for line in words for w in line], np.uint64)
        rows = np.repeat(np.arange(len(words)), [len(line) for line in words])
        inside = rows[1:] == rows[:-1]
        pairs = _mixed(hashes[:-1] * _MIX[0] + hashes[1:])[inside]
        one = np.uint64(1)
        shift = np.uint64(64 - _FEATURE_BITS)
        features = np.concatenate([(hashes >> shift) & ~one, (pairs >> shift) | one])
        keys = np.concatenate([rows, rows[1:][inside]]).astype(np.uint64)
        keys = (keys << np.uint64(_FEATURE_BITS)) | features
        keys, counts = np.unique(keys, return_counts=True)
        rows = (keys >> np.uint64(_FEATURE_BITS)).astype(np.int64)
        return rows, keys & np.uint64((1 << _FEATURE_BITS) - 1), counts


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of splitmix64: neighbouring inputs give unrelated outputs."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


class E5Encoder:
    """A transformers encoder, prefixed, averaged over the attention mask, L2-normalised.

    `model` is a local folder or a hub name with safetensors weights. bfloat16 on a GPU.
    """

    def __init__(
        self,
        model: str,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_tokens: int = 512,
        batch_size: int = 256,
        device: Device = "cpu",
    ) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        network: Any = AutoModel.from_pretrained(
            model, use_safetensors=True, dtype=torch.float32
        ).eval()
        self.dimension: int = network.config.hidden_size
        positions = getattr(network.config, "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, positions)
        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix
        self._batch_size = batch_size
        self._digest = _weights_digest(network)
        self._vocabulary = _vocabulary_digest(self._tokenizer)
        on_gpu = device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._network = network.to(self._device, torch.bfloat16 if on_gpu else torch.float32)
        self._lock = Lock()

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "e5",
            "weights_sha256": self._digest,
            "vocabulary_sha256": self._vocabulary,
            "dimension": self.dimension,
            "pooling": "mean over the mask, l2",
            "query_prefix": self._query_prefix,
            "passage_prefix": self._passage_prefix,
            "max_tokens": self._max_tokens,
        }

    def fit(self, texts: Iterable[str]) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode([self._query_prefix + query for query in queries])

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode([self._passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        # Neighbours in length share a batch, so that little is spent on padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        with self._lock:
            for rows in _batches(order, self._batch_size):
                vectors[rows] = self._forward([texts[i] for i in rows])
        return vectors

    def _forward(self, texts: list[str]) -> Vectors:
        import torch

        batch = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
        ).to(self._device)
        with torch.inference_mode():
            states = self._network(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1).float()
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            unit = torch.nn.functional.normalize(pooled, dim=1)
        result: Vectors = unit.cpu().numpy()
        return result


def _batches(order: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _weights_digest(network: Any) -> str:
    """sha256 over names and float32 values: the same for a folder, its copy and the hub."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().float().numpy().tobytes())
    return digest.hexdigest()


def _vocabulary_digest(tokenizer: Any) -> str:
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}\t{token}\n".encode())
    return digest.hexdigest()
