from __future__ import annotations

import gzip
import json
from math import log
from pathlib import Path

import numpy as np
import pytest

from moopd.retrieval.build import build_index, open_index
from moopd.retrieval.lexical import _best
from moopd.types import Passage
from tests.retrieval.support import LEXICAL, world, write_corpus

MINI = Path(__file__).parents[3] / "shared" / "data" / "real" / "mini"


def _retriever(tmp_path, texts):
    passages = [Passage(str(i), "", text) for i, text in enumerate(texts)]
    build_index(LEXICAL, write_corpus(tmp_path / "c.jsonl", passages), tmp_path / "index")
    return open_index(LEXICAL, tmp_path / "index")


def test_score_by_hand(tmp_path):
    # N = 3, mean length (2 + 2 + 5) / 3 = 3; "river" stands in one passage, twice, of length 5.
    # idf = ln(1 + (3 - 1 + 0.5) / (1 + 0.5)) = ln(8/3)
    # tf part = 2 / (2 + 0.9 (1 - 0.4 + 0.4 x 5/3)) = 2 / (2 + 0.9 x 1.2666..) = 2 / 3.14
    retriever = _retriever(tmp_path, ["red stone", "blue stone", "river red river blue stone"])
    (hits,) = retriever.search_scored(["the River"], 3)
    assert [hit.passage.id for hit in hits] == ["2"]
    assert hits[0].score == pytest.approx(log(8 / 3) * 2 / 3.14, abs=1e-6)


def test_ties_keep_corpus_order(tmp_path):
    retriever = _retriever(tmp_path, ["other words here", *["same words here"] * 9])
    for _ in range(3):
        (found,) = retriever.search(["same"], 4)
        assert [p.id for p in found] == ["1", "2", "3", "4"]


def test_best_by_hand():
    scores = np.array([0.5, 2.0, 0.0, 2.0, 0.5, 3.0, 0.5], np.float32)
    assert _best(scores, 1).tolist() == [5]
    assert _best(scores, 2).tolist() == [5, 1]
    assert _best(scores, 4).tolist() == [5, 1, 3, 0]
    assert _best(scores, 7).tolist() == [5, 1, 3, 0, 4, 6]
    assert _best(scores, 70).tolist() == [5, 1, 3, 0, 4, 6]


def test_edges(tmp_path):
    retriever = _retriever(tmp_path, ["one sun", "two moons", "!!!"])
    assert retriever.search([], 3) == []
    assert [len(hits) for hits in retriever.search(["sun", "two one", "unseen", ""], 9)] == [
        1,
        2,
        0,
        0,
    ]
    with pytest.raises(ValueError, match="top_k"):
        retriever.search(["sun"], 0)


def test_finds_the_fact_in_the_top_3(tmp_path):
    passages, queries = world()
    build_index(LEXICAL, write_corpus(tmp_path / "c.jsonl", passages), tmp_path / "index")
    found = open_index(LEXICAL, tmp_path / "index").search([query for query, _ in queries], 3)
    hit = [wanted in {p.id for p in row} for row, (_, wanted) in zip(found, queries, strict=True)]
    assert np.mean(hit) >= 0.99


@pytest.mark.skipif(not MINI.is_dir(), reason="no real questions beside the repository")
def test_real_questions_find_a_supporting_passage(tmp_path):
    build_index(LEXICAL, MINI / "corpus.jsonl.gz", tmp_path / "index")
    with gzip.open(MINI / "questions.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    found = open_index(LEXICAL, tmp_path / "index").search([row["question"] for row in rows], 3)
    hit = [
        any(p.id in row["support_ids"] for p in passages)
        for row, passages in zip(rows, found, strict=True)
    ]
    assert len(rows) == 566
    assert np.mean(hit) == pytest.approx(0.883, abs=0.01)
