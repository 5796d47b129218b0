"""The GPU branch through a stand-in for FAISS's GPU classes: the same hits as on the CPU."""

from __future__ import annotations

import logging

import faiss
import numpy as np
import pytest

from moopd.retrieval.build import build_index, make_encoder
from moopd.retrieval.index import DenseRetriever
from tests.retrieval.support import hashing_config, world, write_corpus

CONFIG = hashing_config(dimension=128, shard_size=150)


class FakeGpuIndex:
    """Rounds as another device would, and pads with -1 as FAISS does."""

    limit = 10_000

    def __init__(self, resources: object, dimension: int) -> None:
        self._flat = faiss.IndexFlatIP(dimension)

    def add(self, vectors: np.ndarray) -> None:
        if self._flat.ntotal + len(vectors) > self.limit:
            raise RuntimeError("Error: out of memory")
        self._flat.add(vectors)

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rounded = vectors.astype(np.float16).astype(np.float32)
        scores, positions = self._flat.search(rounded, k + 2)
        return scores, positions


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: object(), raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", FakeGpuIndex, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)


def _retriever(tmp_path, device):
    corpus = write_corpus(tmp_path / "c.jsonl", world()[0])
    build_index(CONFIG, corpus, tmp_path / "index")
    encoder = make_encoder(CONFIG.encoder)
    encoder.load(tmp_path / "index")
    return DenseRetriever(encoder, tmp_path / "index", 3, device)


def test_the_gpu_gives_the_hits_of_the_cpu(tmp_path, gpu):
    texts = [query for query, _ in world()[1]]
    on_gpu, on_cpu = _retriever(tmp_path, "gpu"), _retriever(tmp_path, "cpu")
    assert on_gpu.on_gpu and not on_cpu.on_gpu
    assert on_gpu.search_scored(texts, 3) == on_cpu.search_scored(texts, 3)
    assert len(on_gpu.search(["silver harbor"], 1000)[0]) == 400


def test_an_index_too_large_for_the_gpu_stays_on_the_cpu(tmp_path, gpu, monkeypatch, caplog):
    monkeypatch.setattr(FakeGpuIndex, "limit", 200)
    with caplog.at_level(logging.WARNING):
        retriever = _retriever(tmp_path, "auto")
    assert not retriever.on_gpu
    assert "out of memory" in caplog.text
    assert retriever.search(["director of silver harbor"], 3)[0][0].id == "p0-0"


def test_no_gpu_is_told_when_one_was_asked_for(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert not _retriever(tmp_path, "auto").on_gpu
        assert caplog.text == ""
        assert not _retriever(tmp_path, "gpu").on_gpu
    assert "faiss" in caplog.text
