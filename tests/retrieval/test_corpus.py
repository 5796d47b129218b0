from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moopd.retrieval.corpus import CorpusError, from_line, read_passages, survey, to_line
from moopd.types import Passage

PASSAGES = [
    Passage("a", "Milan", 'One, "two"\nthree\tfour'),
    Passage("7", "", "Ångström 北京"),
    Passage("c", "Tag", "closes </answer> and opens <search>"),
]
ROWS = [{"id": p.id, "title": p.title, "text": p.text, "source": "x"} for p in PASSAGES]


def _jsonl(path: Path) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
    return path


def _gz(path: Path) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return path


def _tsv(path: Path) -> Path:
    lines = ["id\ttext\ttitle"]
    lines += ['{id}\t"{t}"\t{title}'.format(t=r["text"].replace('"', '""'), **r) for r in ROWS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize(
    "make, name",
    [(_jsonl, "c.jsonl"), (_gz, "c.jsonl.gz"), (_tsv, "psgs.tsv"), (_parquet, "c.parquet")],
)
def test_every_layout_gives_the_same_passages_and_digest(tmp_path, make, name):
    path = make(tmp_path / name)
    assert list(read_passages(path)) == PASSAGES
    assert survey(path).sha256 == survey(_jsonl(tmp_path / "reference.jsonl")).sha256


def test_a_folder_stands_for_its_one_corpus_file(tmp_path):
    _jsonl(tmp_path / "corpus.jsonl")
    assert list(read_passages(tmp_path)) == PASSAGES
    _gz(tmp_path / "corpus.jsonl.gz")
    with pytest.raises(CorpusError, match="exactly one corpus"):
        read_passages(tmp_path)


def test_contents_layout_splits_off_the_title(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 3, "contents": "\\"Milan\\"\\nA city."}\n')
    assert list(read_passages(path)) == [Passage("3", "Milan", "A city.")]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": "b", "title": "T"}', "line 2: got a passage without text"),
        ('{"id": "b", "text": "  "}', "line 2: got a passage without text"),
        ('{"id": "b", "text": null}', "line 2: got a passage without text"),
        ('{"id": "b", "text": 5}', "line 2: got a passage without text"),
        ('{"text": "no id"}', "line 2: got id None"),
        ('{"id": "b", "text"', "line 2: got no JSON"),
        ('["b", "text"]', "line 2: got list"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=message):
        list(read_passages(path))


def test_broken_files_are_named(tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"id": "a", "text": "fine"}\n' * 5000)[:-20])
    with pytest.raises(CorpusError, match="damaged gzip"):
        list(read_passages(cut))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"id": "a", "text": "fine"}\n{"id": "b", "text": "caf\xe9"}\n')
    with pytest.raises(CorpusError, match="line 2: got no UTF-8"):
        list(read_passages(latin))
    tsv = tmp_path / "c.tsv"
    tsv.write_text("id\ttext\ttitle\n1\tfine\tT\n2\tshort\n")
    with pytest.raises(CorpusError, match="line 3: got 2 fields, expected 3"):
        list(read_passages(tsv))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(CorpusError, match="got no passage"):
        survey(empty)
    with pytest.raises(CorpusError, match="no such corpus file"):
        read_passages(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="expected one of"):
        read_passages(tmp_path / "corpus.txt")


def test_stored_line_round_trips():
    for passage in PASSAGES:
        line = to_line(passage)
        assert line.count(b"\n") == 1
        assert from_line(line) == passage
