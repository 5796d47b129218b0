from __future__ import annotations

import numpy as np
import pytest

from moopd.retrieval.base import RetrievalError
from moopd.retrieval.build import build_index, open_index
from moopd.retrieval.corpus import survey
from moopd.retrieval.encoder import HashingEncoder
from moopd.retrieval.index import DenseRetriever, dense_bytes, num_shards
from moopd.types import Passage
from tests.retrieval.support import NanEncoder, hashing_config, world, write_corpus


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The world's 400 passages in 3 shards: the corpus path, the index folder, the retriever."""
    root = tmp_path_factory.mktemp("dense")
    corpus = write_corpus(root / "c.jsonl", world()[0])
    config = hashing_config(dimension=512, shard_size=150)
    build_index(config, corpus, root / "index")
    return corpus, root / "index", open_index(config, root / "index")


def _small(tmp_path, passages):
    config = hashing_config()
    build_index(config, write_corpus(tmp_path / "c.jsonl", passages), tmp_path / "index")
    return open_index(config, tmp_path / "index")


def test_finds_the_fact_in_the_top_3(built):
    queries = world()[1]
    found = built[2].search([query for query, _ in queries], 3)
    hit = [wanted in {p.id for p in row} for row, (_, wanted) in zip(found, queries, strict=True)]
    assert np.mean(hit) >= 0.99


def test_equals_brute_force_over_all_shards(built):
    passages, queries = world()
    encoder = HashingEncoder(512)
    encoder.load(built[1])
    texts = [query for query, _ in queries[::7]]
    vectors = encoder.encode_passages([p.text for p in passages]).astype(np.float64)
    exact = encoder.encode_queries(texts).astype(np.float64) @ vectors.T
    for row, hits in zip(exact, built[2].search_scored(texts, 5), strict=True):
        order = np.lexsort((np.arange(len(row)), -np.round(row, 9)))[:5]
        np.testing.assert_allclose([hit.score for hit in hits], row[order], atol=1e-6)
        assert [hit.passage.id for hit in hits] == [passages[i].id for i in order]


def test_a_query_does_not_depend_on_its_neighbours(built):
    texts = [query for query, _ in world()[1][:60]]
    together = built[2].search_scored(texts, 3)
    assert together == [built[2].search_scored([text], 3)[0] for text in texts]
    assert together == [row[:3] for row in built[2].search_scored(texts, 10)]


def test_top_k_above_the_corpus_gives_fewer_hits(tmp_path):
    passages = [Passage(str(i), "", text) for i, text in enumerate(["one sun", "two", "last one"])]
    retriever = _small(tmp_path, passages)
    for queries in (["one sun"], ["one sun"] * 40):
        for hits in retriever.search(queries, 10):
            assert len(hits) == 3 and len({p.id for p in hits}) == 3
            assert hits[0].id == "0"


def test_ties_keep_corpus_order_whatever_the_batch(tmp_path):
    passages = [Passage(str(i), "", "the same words again") for i in range(12)]
    retriever = _small(tmp_path, passages)
    for size in (1, 19, 20, 33):
        for hits in retriever.search(["same words"] * size, 4):
            assert [p.id for p in hits] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("top_k", [0, -1, 1.5, None, True])
def test_bad_top_k_is_an_error(built, top_k):
    with pytest.raises(ValueError, match="top_k"):
        built[2].search(["a"], top_k)


def test_zero_queries_and_bad_queries(built):
    assert built[2].search([], 3) == []
    with pytest.raises(ValueError, match="query 1: got float nan, expected a string"):
        built[2].search(["fine", float("nan")], 3)
    with pytest.raises(ValueError, match="one string"):
        built[2].search("a string", 3)


def test_a_query_without_words_has_no_evidence(built):
    wordless, normal = built[2].search(["?!", "silver harbor"], 3)
    assert wordless == [] and len(normal) == 3


def test_nan_vector_is_an_error_that_names_the_query(built):
    encoder = NanEncoder(512)
    encoder.load(built[1])
    retriever = DenseRetriever(encoder, built[1], 3, "cpu")
    with pytest.raises(RetrievalError, match="query 1 'nan of silver'"):
        retriever.search(["silver harbor", "nan of silver"], 3)


def test_device_auto_gives_the_same_hits(built):
    texts = [query for query, _ in world()[1][:30]]
    encoder = HashingEncoder(512)
    encoder.load(built[1])
    for device in ("auto", "gpu"):
        other = DenseRetriever(encoder, built[1], 3, device)
        assert other.search_scored(texts, 3) == built[2].search_scored(texts, 3)


def test_sizes_by_hand(built):
    # 400 passages x (512 x 4 + 8) bytes beside the lines; 400 in shards of 150: 3.
    corpus = survey(built[0])
    assert dense_bytes(corpus, 512) == corpus.num_bytes + 400 * 2056
    assert [num_shards(n, 150) for n in (1, 150, 151, 400)] == [1, 1, 2, 3]
    assert survey(built[0]).num_passages == len(built[2].store)
    with pytest.raises(IndexError, match="position"):
        built[2].store[-1]


def test_passages_come_back_as_they_were(built):
    assert built[2].store.many(range(400)) == world()[0]
