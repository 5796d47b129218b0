"""A small world of names, corpora on disk, and encoders that fail on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from moopd.config import RetrievalConfig
from moopd.retrieval.encoder import HashingEncoder, Vectors
from moopd.types import Passage


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words("silver golden quiet broken hidden winter summer crimson hollow distant")
SECOND = _words("harbor river mountain garden mirror shadow forest island bridge valley")
PEOPLE = _words("anna boris clara david elena felix greta hugo irene jonas")
FAMILY = _words("keller novak rossi weber santos dubois larsen kovac moreau haas")
RELATIONS = (
    ("the director of {} is {}", "director of {}"),
    ("the lead actor of {} is {}", "lead actor of {}"),
    ("the composer of {} is {}", "who is the composer of {}"),
    ("{} was released by the company of {}", "company that released {}"),
)


def world() -> tuple[list[Passage], list[tuple[str, str]]]:
    """400 sentences over 100 two-word names, and (query, id of the passage that answers it)."""
    passages, queries = [], []
    for number, (first, second) in enumerate((f, s) for f in FIRST for s in SECOND):
        film = f"{first} {second}"
        for kind, (sentence, query) in enumerate(RELATIONS):
            person = f"{PEOPLE[(number * 7 + kind) % 10]} {FAMILY[(number * 3 + kind * 5) % 10]}"
            identity = f"p{number}-{kind}"
            passages.append(Passage(identity, "", sentence.format(film, person)))
            queries.append((query.format(film), identity))
    return passages, queries


def write_corpus(path: Path, passages: Iterable[Passage]) -> Path:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in passages]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def hashing_config(dimension: int = 256, shard_size: int = 100_000) -> RetrievalConfig:
    encoder = {"kind": "hashing", "dimension": dimension}
    return RetrievalConfig.model_validate(
        {"kind": "dense", "encoder": encoder, "shard_size": shard_size}
    )


LEXICAL = RetrievalConfig(kind="lexical")


class CountingEncoder(HashingEncoder):
    """Counts the passages it encodes; dies once after `dies_after` of them."""

    def __init__(self, dimension: int, dies_after: int | None = None) -> None:
        super().__init__(dimension)
        self.encoded = 0
        self.dies_after = dies_after

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        if self.dies_after is not None and self.encoded + len(texts) > self.dies_after:
            raise MemoryError("killed")
        self.encoded += len(texts)
        return super().encode_passages(texts)


class ConstantEncoder(HashingEncoder):
    """Every text gets the same vector: what a wrong pooling can come to."""

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        return np.full((len(texts), self.dimension), self.dimension**-0.5, np.float32)

    encode_queries = encode_passages


class OtherQueries(HashingEncoder):
    """Healthy vectors on both sides, in two unrelated spaces: what a wrong prefix can come to."""

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return np.roll(super().encode_queries(queries), 1, axis=1)


class NanEncoder(HashingEncoder):
    """A query that holds the word nan has a broken vector."""

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        vectors = super().encode_queries(queries)
        vectors[[i for i, query in enumerate(queries) if "nan" in query.split()]] = np.nan
        return vectors
