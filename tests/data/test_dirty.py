"""Every made-up dirty file gives its expected outcome under `clean: full`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moopd.config import DataConfig
from moopd.data.clean import Candidate
from moopd.data.sources import Columns, Removal, read_file
from moopd.data.splits import Ledger, resolve
from moopd.types import DATASETS

DIRTY = Path(__file__).resolve().parents[3] / "shared" / "data" / "dirty"
CASES = sorted(path.stem for path in DIRTY.glob("*.jsonl"))
ALL = DataConfig(source="files", train_datasets=DATASETS)


def outcome(row: Candidate | Removal) -> dict[str, Any]:
    if isinstance(row, Removal):
        return {"action": "skip" if row.reason == "blank_line" else "drop", "reason": row.reason}
    question = row.question
    return {
        "action": "keep",
        "question": question.text,
        "answers": list(question.answers),
        "merged": list(row.merged),
        "flags": list(row.flags),
        "answer_type": question.answer_type,
    }


def run(path: Path, config: DataConfig = ALL) -> tuple[dict[int, Any], dict[int, str]]:
    """Line -> outcome, line -> id; every line of the file is there."""
    ledger = Ledger()
    splits = resolve(config, read_file(path, Columns()), ledger)
    rows = [*(row for rows in splits.values() for row in rows), *ledger.removals]
    outcomes = {row.line: outcome(row) for row in rows}
    assert len(outcomes) == len(rows) == len(path.read_text(encoding="utf-8").splitlines())
    ids = {row.line: row.question.id if isinstance(row, Candidate) else row.id for row in rows}
    return outcomes, {line: row_id for line, row_id in ids.items() if row_id}


def complete(expected: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {key: value for key, value in expected.items() if key not in ("id", "line")}
    if wanted["action"] == "keep":
        wanted = {"merged": [], "flags": [], "answer_type": "span", **wanted}
    return wanted


@pytest.mark.skipif(not CASES, reason="the dirty files are not on this machine")
@pytest.mark.parametrize("case", CASES)
def test_expected_outcome(case: str) -> None:
    expected = json.loads((DIRTY / f"{case}.expected.json").read_text(encoding="utf-8"))
    outcomes, ids = run(DIRTY / f"{case}.jsonl")
    line_of: dict[str, int] = {}
    for line in sorted(ids):
        line_of.setdefault(ids[line], line)
    lines = [row.get("line") or line_of[row["id"]] for row in expected]
    assert sorted(lines) == sorted(outcomes)
    assert [outcomes[line] for line in lines] == [complete(row) for row in expected]


@pytest.mark.skipif(not CASES, reason="the dirty files are not on this machine")
def test_drop_train_is_the_other_choice() -> None:
    path = DIRTY / "01_overlap_train_test.jsonl"
    outcomes, _ = run(path, ALL.model_copy(update={"overlap": "drop_train"}))
    assert outcomes[1] == {"action": "drop", "reason": "train_test_overlap"}
    assert outcomes[2]["action"] == "keep"
    assert outcomes[3] == {"action": "drop", "reason": "duplicate"}


@pytest.mark.skipif(not CASES, reason="the dirty files are not on this machine")
@pytest.mark.parametrize("case", CASES)
def test_malformed_leaves_what_can_be_read_as_published(case: str) -> None:
    """At paper scale: only rows that are no question with an answer go, and the overlap does."""
    path = DIRTY / f"{case}.jsonl"
    outcomes, _ = run(path, ALL.model_copy(update={"clean": "malformed"}))
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        got = outcomes[line]
        if got["action"] == "keep":
            published = json.loads(text)
            assert got["question"] == published["question"]
            if isinstance(published["answers"], list) and isinstance(published["answers"][0], str):
                assert got["answers"] == published["answers"]
            assert got["merged"] == got["flags"] == []
        else:
            assert got["reason"] in {
                "train_test_overlap", "empty_answers", "empty_question", "bad_json", "blank_line",
                "missing_question", "not_an_object", "duplicate_id", "unknown_dataset",
            }  # fmt: skip
