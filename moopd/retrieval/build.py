"""The two entries to retrieval: build an index from a config, open one by the same config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moopd.config import ConfigError, EncoderConfig, RetrievalConfig
from moopd.retrieval.artefact import (
    Progress,
    build_folder,
    identity,
    read_fingerprint,
    require_equal,
    seal,
)
from moopd.retrieval.base import IndexMismatchError, Retriever, ScoredRetriever
from moopd.retrieval.client import RemoteRetriever
from moopd.retrieval.corpus import CorpusSurvey, find_corpus, indexed_text, read_passages, survey
from moopd.retrieval.encoder import Device, E5Encoder, Encoder, HashingEncoder
from moopd.retrieval.index import DenseRetriever, dense_bytes, num_shards, write_shards
from moopd.retrieval.lexical import (
    LexicalRetriever,
    lexical_bytes,
    lexical_fingerprint,
    write_lexical,
)
from moopd.retrieval.probe import probe_encoder, probe_index

_FORMAT = 1
_REBUILD = "build the index again with this config, or open it with the config that built it"


def build_index(
    config: RetrievalConfig, corpus_path: Path, out: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Build the index folder `out`, or keep it where it is already this one; its fingerprint.

    Resumes an interrupted build of the same corpus and config; `out` is replaced in one rename.
    Raises CorpusError, IndexBuildError (disk, probe), ConfigError (kind remote builds nothing).
    """
    if config.kind == "remote":
        raise ConfigError("retrieval.kind: got 'remote', which has no index of its own to build")
    corpus_path = find_corpus(corpus_path)
    corpus = survey(corpus_path)
    if config.kind == "lexical":
        plan = _plan("lexical", lexical_fingerprint(), corpus)
        return _kept(out, plan) or _build_lexical(corpus_path, corpus, out, plan, progress)
    encoder = make_encoder(config.encoder, config.device)
    plan = _plan("dense", encoder.fingerprint, corpus) | {"shard_size": config.shard_size}
    return _kept(out, plan) or _build_dense(
        encoder, config.shard_size, corpus_path, corpus, out, plan, progress
    )


def open_retriever(config: RetrievalConfig, index_dir: Path) -> Retriever:
    """The retriever of a config over an index that was built with an equal one.

    Raises IndexMismatchError naming what differs. Kind remote needs `url` alone.
    """
    if config.kind == "remote":
        if config.url is None:
            raise ConfigError("retrieval.url: got none, expected the address of a server")
        return RemoteRetriever(config.url)
    return open_index(config, index_dir)


def open_index(config: RetrievalConfig, index_dir: Path) -> ScoredRetriever:
    """The same for an index that lies here (kinds dense and lexical): what a server serves."""
    found = read_fingerprint(index_dir)
    if config.kind not in ("dense", "lexical") or found.get("kind") != config.kind:
        raise IndexMismatchError(
            f"{index_dir}: got a {found.get('kind')} index, expected kind {config.kind!r}; "
            f"{_REBUILD}"
        )
    if config.kind == "lexical":
        require_equal(found["encoder"], lexical_fingerprint(), str(index_dir), _REBUILD)
        return LexicalRetriever(index_dir)
    encoder = make_encoder(config.encoder, config.device)
    require_equal(found["encoder"], encoder.fingerprint, str(index_dir), _REBUILD)
    encoder.load(index_dir)
    shards = num_shards(found["corpus"]["num_passages"], found["shard_size"])
    return DenseRetriever(encoder, index_dir, shards, config.device)


def make_encoder(config: EncoderConfig, device: Device = "cpu") -> Encoder:
    if config.kind == "hashing":
        return HashingEncoder(config.dimension)
    if config.model is None:
        raise ConfigError(
            "retrieval.encoder.model: got none, expected a local folder or a hub name (kind e5)"
        )
    return E5Encoder(
        config.model,
        query_prefix=config.query_prefix,
        passage_prefix=config.passage_prefix,
        max_tokens=config.max_tokens,
        batch_size=config.batch_size,
        device=device,
    )


def _plan(kind: str, encoder: dict[str, Any], corpus: CorpusSurvey) -> dict[str, Any]:
    described = {"sha256": corpus.sha256, "num_passages": corpus.num_passages}
    return {"format": _FORMAT, "kind": kind, "encoder": encoder, "corpus": described}


def _kept(out: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The fingerprint of what lies at `out` if it is complete and just what is wanted."""
    try:
        found = read_fingerprint(out)
    except IndexMismatchError:
        return None
    return found if identity(found) == plan else None


def _build_lexical(
    corpus_path: Path,
    corpus: CorpusSurvey,
    out: Path,
    plan: dict[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    with build_folder(out, plan, lexical_bytes(corpus)) as folder:
        write_lexical(corpus_path, corpus, folder, progress)
        retriever = LexicalRetriever(folder)
        return seal(folder, plan | {"probe": probe_index(retriever, retriever.store)})


def _build_dense(
    encoder: Encoder,
    shard_size: int,
    corpus_path: Path,
    corpus: CorpusSurvey,
    out: Path,
    plan: dict[str, Any],
    progress: Progress | None,
) -> dict[str, Any]:
    with build_folder(out, plan, dense_bytes(corpus, encoder.dimension)) as folder:
        pairs = probe_encoder(encoder)
        encoder.fit(indexed_text(passage) for passage in read_passages(corpus_path))
        encoder.save(folder)
        write_shards(encoder, corpus_path, corpus, shard_size, folder, progress)
        shards = num_shards(corpus.num_passages, shard_size)
        retriever = DenseRetriever(encoder, folder, shards, "cpu")
        probe = probe_index(retriever, retriever.store) | {"pairs": pairs}
        return seal(folder, plan | {"probe": probe})
