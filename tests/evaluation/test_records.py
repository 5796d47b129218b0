"""Records files: what is written is read back, what cannot be scored is refused with its ids."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moopd.evaluation.attempts import arrange, question_set, split_systems
from moopd.evaluation.diagnostics import _failure_counts
from moopd.evaluation.journal import Journal
from moopd.evaluation.records import (
    SCHEMA,
    RecordsError,
    from_table,
    read_table,
    record_to_row,
    to_table,
    write_records,
)
from moopd.types import EvalRecord
from tests.evaluation import made

QUESTIONS = made.questions(2, ("nq", "bamboogle"))
RECORDS = made.records("cmas_rl", QUESTIONS)


def jsonl(path: Path, records: list[EvalRecord]) -> Path:
    path.write_text("".join(json.dumps(record_to_row(r)) + "\n" for r in records))
    return path


def test_round_trip_and_same_bytes_for_any_row_order(tmp_path: Path) -> None:
    write_records(tmp_path / "a.parquet", RECORDS)
    write_records(tmp_path / "b.parquet", RECORDS[::-1])
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    again = from_table(read_table(tmp_path / "a.parquet"))
    assert sorted(again, key=str) == sorted(RECORDS, key=str)


def test_json_lines_read_as_parquet_does(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl", RECORDS)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert from_table(read_table(plain)) == RECORDS
    assert from_table(read_table(packed)) == RECORDS


def test_four_columns_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"system":"s","question_id":"q","attempt":0,"output":"x","x_mine":1}\n')
    table = read_table(path)
    assert table.schema.names == SCHEMA.names
    assert table["num_searches"].to_pylist() == [None]
    with pytest.raises(RecordsError, match="lacks dataset, stop") as error:
        from_table(table)
    assert error.value.ids == ("q",)


def test_half_written_files_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 40])
    with pytest.raises(RecordsError, match="ends in the middle") as error:
        read_table(path)
    before_last = RECORDS[-2]
    assert error.value.ids == (f"{before_last.question_id} attempt {before_last.attempt}",)

    write_records(tmp_path / "a.parquet", RECORDS)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordsError, match="half written"):
        read_table(tmp_path / "a.parquet")

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data)[:-20])
    with pytest.raises(RecordsError, match="half-written gzip"):
        read_table(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"system": "s", "question_id": "q", "attempt": 0}, "lacks output"),
        ({"system": "s", "question_id": "q", "attempt": 0, "output": "x", "ouput": 1}, "unknown"),
        ({"system": "s", "question_id": "q", "attempt": 0, "output": None}, "'output' is empty"),
        ({"system": "s", "question_id": "q", "attempt": "zero", "output": "x"}, "'attempt'"),
        ({"system": "s", "question_id": "q", "attempt": 0.5, "output": "x"}, "'attempt'"),
        ([1], "expected an object"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, row: object, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RecordsError, match=message):
        read_table(path)


def test_json_that_cannot_be_text_is_refused_with_its_line_and_file_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    row = {"system": "a", "question_id": "q", "attempt": 0}
    for text, message in (
        ("[" * 100_000, "line 1: no JSON"),
        (json.dumps({**row, "output": "half \ud800"}), "column 'output': expected string"),
        (json.dumps({**row, "output": None}), "column 'output' is empty"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(RecordsError, match=message) as refused:
            read_table(path)
        assert str(refused.value).count(str(path)) == 1


@pytest.mark.parametrize("text", ['"x"', "[1]", '{"a": -1}', '{"a": true}', "{", "5"])
def test_format_failures_that_are_no_counts_are_refused(text: str) -> None:
    with pytest.raises(RecordsError, match="expected an object of counts"):
        _failure_counts("cmas_rl", text)
    assert _failure_counts("cmas_rl", '{"searcher/unclosed": 2}') == {"searcher/unclosed": 2}


def test_wrong_parquet_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"system": ["s"], "question_id": ["q"]}), tmp_path / "a.parquet")
    with pytest.raises(RecordsError, match="lacks attempt, output"):
        read_table(tmp_path / "a.parquet")
    columns = {"system": ["s"], "question_id": ["q"], "attempt": ["one"], "output": ["x"]}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    with pytest.raises(RecordsError, match="'attempt' is string, expected int64"):
        read_table(tmp_path / "b.parquet")


# ---------------------------------------------------------------- against the questions


def refuse(records: list[EvalRecord], message: str) -> tuple[str, ...]:
    with pytest.raises(RecordsError, match=message) as error:
        arrange(to_table(records), question_set(QUESTIONS))
    return error.value.ids


def test_missing_extra_and_duplicated_attempts_are_refused_with_ids() -> None:
    first, last = RECORDS[0], RECORDS[-1]
    assert refuse(RECORDS[1:], "missing attempts") == (f"{first.question_id} attempt 0",)
    extra = replace(last, attempt=4, seed=99)
    assert refuse([*RECORDS, extra], "extra attempts") == (f"{last.question_id} attempt 4",)
    twice = [*RECORDS, replace(last, seed=99)]
    assert refuse(twice, "duplicated records") == (f"{last.question_id} attempt 3 x2",)


def test_unknown_questions_and_sets_are_refused_with_ids() -> None:
    assert refuse([*RECORDS, replace(RECORDS[0], question_id="new")], "unknown") == ("new",)
    wrong = [replace(RECORDS[0], dataset="popqa"), *RECORDS[1:]]
    assert refuse(wrong, "set differs") == (f"{RECORDS[0].question_id} (popqa, expected nq)",)


def test_two_protocols_and_shared_seeds_are_refused_with_ids() -> None:
    mixed = [replace(RECORDS[0], protocol="other"), *RECORDS[1:]]
    assert refuse(mixed, "two protocols") == (f"{RECORDS[0].question_id} (other)",)
    shared = [replace(record, seed=7) for record in RECORDS]
    assert len(refuse(shared, "share a seed")) == len(QUESTIONS)


def test_all_faults_are_named_at_once() -> None:
    message = "unknown questions: new.*missing attempts"
    refuse([replace(RECORDS[0], question_id="new"), *RECORDS[1:]], message)


def test_order_of_rows_does_not_matter() -> None:
    questions = question_set(QUESTIONS[::-1])
    forward = arrange(to_table(RECORDS), questions)
    backward = arrange(to_table(RECORDS[::-1]), questions)
    assert forward.outputs == backward.outputs
    assert questions.ids == question_set(QUESTIONS).ids
    assert list(questions.sets) == ["nq", "bamboogle"]  # the paper's order, not the alphabet's
    assert (forward.counts["num_searches"] == backward.counts["num_searches"]).all()


def test_systems_and_runs_of_one_file_are_told_apart() -> None:
    other = made.records("cmas_rl", QUESTIONS, run=1)
    parts = split_systems(to_table([*RECORDS, *other]))
    assert {key: part.num_rows for key, part in parts.items()} == {
        ("cmas_rl", 0): 16,
        ("cmas_rl", 1): 16,
    }


def test_counts_that_some_rows_lack_are_refused() -> None:
    table = to_table(RECORDS)
    column = pa.array([None, *(r.num_searches for r in RECORDS[1:])], pa.int64())
    table = table.set_column(table.schema.get_field_index("num_searches"), "num_searches", column)
    with pytest.raises(RecordsError, match="num_searches is empty in 1 of 16"):
        arrange(table, question_set(QUESTIONS))


# ---------------------------------------------------------------- journal


def test_journal_keeps_finished_records_and_drops_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, RECORDS[0].protocol) as journal:
        for record in RECORDS[:3]:
            journal.append(record)
    path.write_bytes(path.read_bytes()[:-10])
    with Journal(path, RECORDS[0].protocol) as journal:
        assert list(journal.finished.values()) == RECORDS[:2]
        journal.append(RECORDS[2])
        journal.forget([(RECORDS[0].question_id, RECORDS[0].attempt)])
        journal.append(RECORDS[3])
    with Journal(path, RECORDS[0].protocol) as journal:
        assert list(journal.finished.values()) == RECORDS[1:4]


def test_journal_of_another_protocol_or_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, RECORDS[0].protocol) as journal:
        journal.append(RECORDS[0])
    with pytest.raises(RecordsError, match="written under protocol"):
        Journal(path, "other")
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(RecordsError, match="line 1: no record"):
        Journal(path, RECORDS[0].protocol)
