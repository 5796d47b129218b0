"""Readers: every layout gives the same rows, and a broken row costs only itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moopd.data.manifest import DATASETS_YAML
from moopd.data.sources import (
    Columns,
    DataError,
    RawRow,
    Removal,
    Source,
    load_sources,
    read_file,
    read_folder,
    read_hub,
)
from moopd.types import DATASETS

ROWS: list[dict[str, Any]] = [
    {"id": "a", "dataset": "nq", "split": "train", "question": "who?", "answers": ["x", "y"],
     "support_ids": ["p1"], "type": None},
    {"id": "b", "dataset": "musique", "split": "test", "question": "when?", "answers": ["1874"],
     "support_ids": [], "type": "3hop1"},
]  # fmt: skip
FLASHRAG: list[dict[str, Any]] = [
    {"id": "train_0", "question": "who", "golden_answers": ["x"], "metadata": {"type": "bridge"}},
    {"id": "train_1", "question": "when", "golden_answers": ["y", "z"], "metadata": {"type": None}},
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(params=["questions.jsonl", "questions.jsonl.gz", "questions.parquet"])
def own_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "with spaces é"
    folder.mkdir()
    path = folder / str(request.param)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(ROWS)))
    else:
        path.write_bytes(lines(ROWS))
    return path


def test_own_layout_in_every_format(own_file: Path) -> None:
    name = own_file.name
    expected = [
        RawRow(name, 1, "a", "nq", "train", "who?", ["x", "y"], ("p1",)),
        RawRow(name, 2, "b", "musique", "test", "when?", ["1874"], (), "3hop1", 3),
    ]
    assert list(read_folder(own_file.parent)) == expected
    assert list(read_folder(own_file)) == expected


def test_a_broken_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(
        b"\n".join(
            [
                b"\xef\xbb\xbf" + good,  # byte order mark
                b'{"id": "cut',
                b"  ",
                b'"a string"',
                b'{"id": "\xff"}',
                b"[" * 100_000,
                b'{"id": 7, "dataset": "nq", "split": "train", "question": 5, "answers": ["x"]}',
                b'{"id": "c", "dataset": "nq", "split": "validation", "question": "who"}',
                b'{"dataset": "nq", "split": "dev", "question": "a\xe2\x80\xa8b", "answers": "x"}',
            ]
        )
    )
    rows = list(read_file(path, Columns()))
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    reasons = [row.reason if isinstance(row, Removal) else "" for row in rows]
    assert reasons == [
        "", "bad_json", "blank_line", "not_an_object", "bad_encoding", "bad_json",
        "question_not_text", "unknown_split", "",
    ]  # fmt: skip
    assert (rows[6].id, rows[6].dataset, rows[6].split) == ("7", "nq", "train")
    assert rows[8].id == "nq-dev-9"  # a row without an id gets its place


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    cut = tmp_path / "questions.jsonl.gz"
    cut.write_bytes(gzip.compress(lines(ROWS * 100))[:-20])
    with pytest.raises(DataError, match=r"questions\.jsonl\.gz is damaged after line \d+"):
        list(read_file(cut, Columns()))
    table = tmp_path / "questions.parquet"
    table.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="no readable parquet"):
        list(read_file(table, Columns()))
    with pytest.raises(DataError, match=r"questions\.jsonl\.gz, questions\.parquet"):
        list(read_folder(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no questions in .*empty: expected questions"):
        list(read_folder(tmp_path / "empty", load_sources(DATASETS_YAML)))


FLASHRAG_ROWS = [
    ("hotpotqa-train_0", "hotpotqa", "test", "who", ["x"], "bridge"),
    ("hotpotqa-train_1", "hotpotqa", "test", "when", ["y", "z"], ""),
]


def shown(rows: list[RawRow | Removal]) -> list[tuple[Any, ...]]:
    assert all(isinstance(row, RawRow) for row in rows), rows
    return [
        (row.id, row.dataset, row.split, row.question, row.answers, row.family)
        for row in rows
        if isinstance(row, RawRow)
    ]


def test_flashrag_folder(tmp_path: Path) -> None:
    (tmp_path / "hotpotqa").mkdir()
    (tmp_path / "hotpotqa" / "dev.jsonl").write_bytes(lines(FLASHRAG) + b"{\n")
    *rows, bad = read_folder(tmp_path, load_sources(DATASETS_YAML))
    assert shown(rows) == FLASHRAG_ROWS  # the published dev split is the test here
    assert bad == Removal(
        "bad_json", "hotpotqa/dev.jsonl", 3, None, "hotpotqa", "test",
        "Expecting property name enclosed in double quotes: line 2 column 1 (char 2)",
    )  # fmt: skip


@pytest.mark.parametrize("builder", ["json", "parquet"])
def test_hub_loader_on_local_files(
    builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"rows.{builder}"
    if builder == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(FLASHRAG), path)
    else:
        path.write_bytes(lines(FLASHRAG))
    columns = Columns(answers="golden_answers", type="metadata.type")
    source = Source(
        dataset="hotpotqa", split="test", hub=builder, hub_split="train",
        data_files=str(path), columns=columns,
    )  # fmt: skip
    assert shown(list(read_hub(source))) == FLASHRAG_ROWS
    gone = source.model_copy(update={"data_files": str(tmp_path / "gone")})
    with pytest.raises(DataError, match=r"did not load: FileNotFoundError.*check the name"):
        list(read_hub(gone))


def test_datasets_yaml_is_the_papers() -> None:
    sources = load_sources(DATASETS_YAML)
    train = {one.dataset: one.rows for one in sources if one.split == "train"}
    assert train == {"nq": 79_168, "hotpotqa": 90_447}
    test = {one.dataset: one.sample or 0 for one in sources if one.split == "test"}
    assert tuple(test) == DATASETS
    assert sum(test.values()) == 5_000  # 125 + 3 * 813 + 3 * 812
    published = {(one.name, one.hub_split): one.split for one in sources}
    assert len(published) == len(sources)  # no published split plays two parts


def test_datasets_yaml_errors_name_the_row(tmp_path: Path) -> None:
    path = tmp_path / "datasets.yaml"
    path.write_text("hub: h\nsources:\n  - {dataset: quizbowl, split: train, hub_split: train}\n")
    with pytest.raises(DataError, match=r"source 1: dataset: .*got 'quizbowl'"):
        load_sources(path)
