from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from moopd.config import ConfigError, RetrievalConfig
from moopd.retrieval import artefact, build
from moopd.retrieval.base import IndexBuildError, IndexMismatchError
from moopd.retrieval.build import build_index, open_retriever
from moopd.retrieval.client import RemoteRetriever
from moopd.retrieval.corpus import CorpusError
from tests.retrieval.support import (
    LEXICAL,
    ConstantEncoder,
    CountingEncoder,
    OtherQueries,
    hashing_config,
    world,
    write_corpus,
)

CONFIG = hashing_config(dimension=128, shard_size=100)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", world()[0])


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()


def _use(monkeypatch, encoder):
    monkeypatch.setattr(build, "make_encoder", lambda config, device="cpu": encoder)
    return encoder


@pytest.mark.parametrize("config", [CONFIG, LEXICAL], ids=["dense", "lexical"])
def test_bytes_are_the_same_in_every_process(tmp_path, corpus, config):
    build_index(config, corpus, tmp_path / "here")
    code = (
        "import sys; from pathlib import Path; from moopd.config import RetrievalConfig;"
        "from moopd.retrieval.build import build_index;"
        "build_index(RetrievalConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]),"
        " Path(sys.argv[3]))"
    )
    arguments = [config.model_dump_json(), str(corpus), str(tmp_path / "there")]
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "123"},
    )
    assert digest(tmp_path / "here") == digest(tmp_path / "there")
    assert not list((tmp_path / "here").rglob("*.pkl"))


def test_fingerprint_tells_what_was_built(tmp_path, corpus):
    fingerprint = build_index(CONFIG, corpus, tmp_path / "index")
    assert fingerprint["encoder"]["dimension"] == 128
    assert fingerprint["corpus"]["num_passages"] == 400
    assert fingerprint["probe"] == {"asked": 32, "found": 32, "pairs": 8}
    assert fingerprint == json.loads((tmp_path / "index" / "fingerprint.json").read_text())
    assert sorted(tmp_path.iterdir()) == sorted(
        [corpus, tmp_path / "index", tmp_path / ".index.lock"]
    )


def test_the_same_index_is_kept_and_another_replaced(tmp_path, corpus, monkeypatch):
    out = tmp_path / "index"
    build_index(CONFIG, corpus, out)
    encoder = _use(monkeypatch, CountingEncoder(128))
    build_index(CONFIG, corpus, out)
    assert encoder.encoded == 0
    write_corpus(corpus, world()[0][:200])
    assert build_index(CONFIG, corpus, out)["corpus"]["num_passages"] == 200
    assert len(list(out.glob("vectors-*.npy"))) == 2
    (out / "vectors-00001.npy").unlink()
    _use(monkeypatch, CountingEncoder(128))
    build_index(CONFIG, corpus, out)
    assert (out / "vectors-00001.npy").is_file()


@pytest.mark.parametrize(
    "config, message",
    [
        (hashing_config(dimension=64), "dimension: got 128, expected 64"),
        (LEXICAL, "got a dense index, expected kind 'lexical'"),
    ],
)
def test_another_config_is_refused(tmp_path, corpus, config, message):
    build_index(CONFIG, corpus, tmp_path / "index")
    with pytest.raises(IndexMismatchError, match=message):
        open_retriever(config, tmp_path / "index")


def test_another_pooling_or_prefix_is_refused(tmp_path, corpus):
    build_index(CONFIG, corpus, tmp_path / "index")
    path = tmp_path / "index" / "fingerprint.json"
    for field in ("pooling", "query_prefix"):
        stored = json.loads(path.read_text())
        stored["encoder"][field] = "other"
        changed = tmp_path / field
        shutil.copytree(tmp_path / "index", changed)
        (changed / "fingerprint.json").write_text(json.dumps(stored))
        with pytest.raises(IndexMismatchError, match=f"{field}: got 'other', expected"):
            open_retriever(CONFIG, changed)


def test_missing_and_damaged_indexes_are_refused(tmp_path, corpus):
    with pytest.raises(IndexMismatchError, match="build it first"):
        open_retriever(CONFIG, tmp_path / "none")
    out = tmp_path / "index"
    build_index(CONFIG, corpus, out)
    with (out / "passages-00002.jsonl").open("ab") as stream:
        stream.truncate(100)
    with pytest.raises(IndexMismatchError, match=r"passages-00002.jsonl: got 100 bytes"):
        open_retriever(CONFIG, out)
    (out / "passages-00002.jsonl").unlink()
    with pytest.raises(IndexMismatchError, match=r"passages-00002.jsonl: got no file"):
        open_retriever(CONFIG, out)


def test_a_killed_build_resumes_and_equals_an_uninterrupted_one(tmp_path, corpus, monkeypatch):
    build_index(CONFIG, corpus, tmp_path / "whole")
    # 8 probe passages and 2 shards of 100 pass, the third shard does not.
    _use(monkeypatch, CountingEncoder(128, dies_after=208))
    out = tmp_path / "index"
    with pytest.raises(MemoryError):
        build_index(CONFIG, corpus, out)
    assert not out.exists()
    left = tmp_path / ".index.building"
    assert sorted(f.name for f in left.glob("vectors*")) == [
        "vectors-00000.npy",
        "vectors-00001.npy",
    ]
    encoder = _use(monkeypatch, CountingEncoder(128))
    steps: list[tuple[int, int]] = []
    build_index(CONFIG, corpus, out, lambda done, total: steps.append((done, total)))
    assert encoder.encoded == 208
    assert steps == [(100, 400), (200, 400), (300, 400), (400, 400)]
    assert digest(out) == digest(tmp_path / "whole")
    assert not left.exists()


def test_what_another_plan_left_is_not_resumed(tmp_path, corpus, monkeypatch):
    _use(monkeypatch, CountingEncoder(128, dies_after=208))
    with pytest.raises(MemoryError):
        build_index(CONFIG, corpus, tmp_path / "index")
    passages = world()[0]
    write_corpus(corpus, [*passages[1:], passages[0]])
    encoder = _use(monkeypatch, CountingEncoder(128))
    build_index(CONFIG, corpus, tmp_path / "index")
    assert encoder.encoded == 408


def test_a_failed_rebuild_leaves_the_old_index(tmp_path, corpus, monkeypatch):
    out = tmp_path / "index"
    build_index(CONFIG, corpus, out)
    before = digest(out)
    write_corpus(corpus, world()[0][:300])
    _use(monkeypatch, CountingEncoder(128, dies_after=150))
    with pytest.raises(MemoryError):
        build_index(CONFIG, corpus, out)
    assert digest(out) == before


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, corpus, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(artefact.shutil, "disk_usage", lambda path: usage)
    encoder = _use(monkeypatch, CountingEncoder(128))
    with pytest.raises(IndexBuildError, match=r"0.00 GB of free disk, expected 0.07 GB"):
        build_index(CONFIG, corpus, tmp_path / "index")
    assert encoder.encoded == 0 and not (tmp_path / "index").exists()


def test_a_disk_that_fills_up_leaves_what_is_done(tmp_path, corpus, monkeypatch):
    encoder = _use(monkeypatch, CountingEncoder(128))

    def full(texts):
        if encoder.encoded >= 108:
            raise OSError(28, "No space left on device")
        return CountingEncoder.encode_passages(encoder, texts)

    monkeypatch.setattr(encoder, "encode_passages", full)
    with pytest.raises(IndexBuildError, match="No space left on device; what is done is kept"):
        build_index(CONFIG, corpus, tmp_path / "index")
    assert (tmp_path / ".index.building" / "vectors-00000.npy").is_file()
    assert not list((tmp_path / ".index.building").glob("*.part"))


@pytest.mark.parametrize("encoder", [ConstantEncoder(128), OtherQueries(128)])
def test_an_encoder_that_cannot_rank_fails_the_probe(tmp_path, corpus, monkeypatch, encoder):
    _use(monkeypatch, encoder)
    with pytest.raises(IndexBuildError, match=r"known-answer probe: got \d of 8 .* prefixes"):
        build_index(CONFIG, corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_an_index_that_cannot_rank_fails_the_probe(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(build, "probe_encoder", lambda encoder: 8)
    _use(monkeypatch, OtherQueries(128))
    with pytest.raises(IndexBuildError, match=r"got \d+ of 32 passages in the top 3"):
        build_index(CONFIG, corpus, tmp_path / "index")


def test_a_corpus_without_text_builds_nothing(tmp_path, corpus):
    with corpus.open("a") as stream:
        stream.write('{"id": "x", "title": "no text"}\n')
    for config in (CONFIG, LEXICAL):
        with pytest.raises(CorpusError, match="line 401: got a passage without text"):
            build_index(config, corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_a_corpus_that_changes_meanwhile_is_refused(tmp_path, corpus, monkeypatch):
    surveyed = build.survey(corpus)
    write_corpus(corpus, reversed(world()[0]))
    monkeypatch.setattr(build, "survey", lambda path: surveyed)
    with pytest.raises(IndexBuildError, match="changed while its index was built"):
        build_index(CONFIG, corpus, tmp_path / "index")


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    # 1,600 vectors of 2,048 numbers are 13 MB; chunks of 50 are 0.4 MB (float64: 0.8 MB).
    monkeypatch.setattr("moopd.retrieval.index._CHUNK", 50)
    monkeypatch.setattr("moopd.retrieval.encoder._CHUNK", 50)
    config = hashing_config(dimension=2048, shard_size=400)
    peaks = []
    for times in (1, 4):
        corpus = write_corpus(tmp_path / f"{times}.jsonl", world()[0] * times)
        tracemalloc.start()
        build_index(config, corpus, tmp_path / f"index{times}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000


def test_remote_needs_an_address_and_builds_nothing(tmp_path, corpus):
    remote = RetrievalConfig(kind="remote", url="http://127.0.0.1:1")
    assert isinstance(open_retriever(remote, tmp_path), RemoteRetriever)
    with pytest.raises(ConfigError, match=r"retrieval\.url: got none"):
        open_retriever(RetrievalConfig(kind="remote"), tmp_path)
    with pytest.raises(ConfigError, match="remote"):
        build_index(remote, corpus, tmp_path / "index")
    e5 = RetrievalConfig.model_validate({"encoder": {"kind": "e5"}})
    with pytest.raises(ConfigError, match=r"encoder\.model: got none"):
        build_index(e5, corpus, tmp_path / "index")


def test_a_place_with_spaces_and_letters(tmp_path):
    place = tmp_path / "größe à b"
    place.mkdir()
    corpus = write_corpus(place / "corpus.jsonl", world()[0])
    for config in (CONFIG, LEXICAL):
        build_index(config, corpus, place / config.kind)
        assert open_retriever(config, place / config.kind).search(["silver harbor"], 1)[0]


def test_importing_the_entries_needs_no_heavy_module():
    code = (
        "import sys, moopd.retrieval.build, moopd.retrieval.server;"
        "heavy = {'torch', 'faiss', 'bm25s', 'transformers', 'fastapi', 'httpx', 'pyarrow'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
