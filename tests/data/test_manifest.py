"""Preparation as a whole: samples, counts, the manifest, files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from moopd.config import DataConfig
from moopd.data import manifest as module
from moopd.data.manifest import (
    Count,
    Prepared,
    prepare,
    prepare_files,
    read_manifest,
    read_questions,
    with_published_sizes,
    write_prepared,
    write_questions,
)
from moopd.data.normalize import normalize_question
from moopd.data.sources import Columns, DataError, RawRow, Removal, load_sources, read_file
from moopd.types import DATASETS, Question

MINI = Path(__file__).resolve().parents[3] / "shared" / "data" / "real" / "mini"
BASE = DataConfig(source="files", dev_size=4)


def row(dataset: str, split: str, number: int, **other: Any) -> RawRow:
    name = f"{dataset}-{split}-{number}"
    fields: dict[str, Any] = {"question": f"who is {name}", "answers": [f"x{number}"], **other}
    return RawRow("f.jsonl", 0, name, dataset, split, **fields)


def block(dataset: str, split: str, size: int) -> list[RawRow]:
    return [row(dataset, split, number) for number in range(size)]


def numbered(rows: Sequence[RawRow | Removal]) -> list[RawRow | Removal]:
    return [replace(one, line=line) for line, one in enumerate(rows, start=1)]


ROWS = numbered(
    [
        *block("nq", "train", 30), *block("hotpotqa", "train", 20), *block("triviaqa", "train", 5),
        *block("nq", "dev", 10), *block("popqa", "dev", 1),
        *block("nq", "test", 12), *block("musique", "test", 6),
    ]
)  # fmt: skip


def prepared(rows: Sequence[RawRow | Removal] = ROWS, **changes: Any) -> Prepared:
    return prepare(BASE.model_copy(update=changes), rows)


def datasets(questions: Sequence[Question]) -> dict[str, int]:
    return dict(Counter(question.dataset for question in questions))


def test_samples_are_per_dataset_and_every_row_is_accounted_for() -> None:
    result = prepared(test_sizes={"nq": 5, "musique": 3}, train_size=40)
    assert datasets(result.splits["test"]) == {"nq": 5, "musique": 3}
    # Equal shares of 4: popqa has 1 row, so nq gives the other 3.
    assert datasets(result.splits["dev"]) == {"nq": 3, "popqa": 1}
    assert sum(datasets(result.splits["train"]).values()) == 40
    manifest = result.manifest
    assert manifest.kept["nq/test"] == 5
    assert manifest.rows["nq/test"] == Count(read=12, kept=5, removed=0, unused=7)
    assert manifest.unused["triviaqa/train"] == {"not_trained": 5}
    assert manifest.unused["nq/dev"] == {"not_sampled": 7}
    assert sum(count.read for count in manifest.rows.values()) == len(ROWS)
    assert manifest.questions["test"] == tuple(q.id for q in result.splits["test"])


def test_a_seed_gives_the_same_questions_in_any_order_of_rows() -> None:
    sizes = {"test_sizes": {"nq": 5}, "train_size": 10}
    shuffled = list(ROWS)
    random.Random(3).shuffle(shuffled)
    one, other = prepared(**sizes), prepared(shuffled, **sizes)
    assert prepared(**sizes).manifest == one.manifest
    for split, questions in one.splits.items():
        assert set(questions) == set(other.splits[split])
    reseeded = prepared(sample_seed=1, **sizes)
    assert set(reseeded.splits["test"]) != set(one.splits["test"])
    salted = prepare(BASE.model_copy(update=sizes), ROWS, {"nq": 1})
    assert set(salted.splits["test"]) != set(one.splits["test"])


def test_the_train_sample_does_not_change_dev_or_test() -> None:
    one, other = prepared(train_size=10), prepared(train_size=30)
    assert one.splits["test"] == other.splits["test"]
    assert one.splits["dev"] == other.splits["dev"]
    assert set(one.splits["train"]) < set(other.splits["train"])


def test_development_rows_are_carved_from_train_never_from_test() -> None:
    rows = [one for one in ROWS if one.split != "dev"]
    result = prepared(rows)
    assert datasets(result.splits["dev"]) == {"nq": 2, "hotpotqa": 2}
    assert all("-train-" in question.id for question in result.splits["dev"])
    assert not set(result.splits["dev"]) & set(result.splits["train"])
    assert len(result.splits["train"]) == 30 + 20 - 4
    assert result.manifest.rows["nq/train"] == Count(read=30, kept=30, removed=0, unused=0)
    # Public rows first: 11 of them, and 4 from train.
    mixed = Counter(q.id.split("-")[1] for q in prepared(dev_size=15).splits["dev"])
    assert mixed == {"dev": 11, "train": 4}


def test_a_question_that_train_repeats_is_never_carved() -> None:
    """`clean: malformed` keeps both rows; one of them in dev would leak."""
    twin = [row("nq", "train", 100 + n, question="who is nq-train-0") for n in range(3)]
    rows = numbered([*block("nq", "train", 3), *twin, *block("nq", "test", 1)])
    result = prepared(rows, clean="malformed", dev_size=2)
    assert {q.id for q in result.splits["dev"]} == {"nq-train-1", "nq-train-2"}
    assert result.manifest.flags == {"duplicate_kept": 3}
    with pytest.raises(DataError, match="2 dev and 1 test questions are left"):
        prepared(rows, clean="malformed", dev_size=3)


def test_rows_read_are_asserted_with_both_numbers() -> None:
    bad = Removal("bad_json", "f.jsonl", 99, None, "nq", "train")
    rows = [*ROWS, bad]
    result = prepared(rows, expected_rows={"nq/train": 31, "hotpotqa/train": 20})
    assert result.manifest.rows["nq/train"].removed == 1  # counted on rows read
    with pytest.raises(DataError, match="nq/train: read 31 rows, expected 79168"):
        prepared(rows, expected_rows={"nq/train": 79_168})
    with pytest.raises(DataError, match="2wiki/train: read 0 rows, expected 7"):
        prepared(rows, expected_rows={"2wiki/train": 7})


def test_every_removal_is_listed_with_its_place() -> None:
    rows = numbered(
        [
            *block("nq", "train", 9),
            row("nq", "train", 0, question="another one"),  # id again
            row("nq", "train", 50, answers=[]),
            row("nq", "test", 1, question="Who is the nq-train-1?"),
            Removal("blank_line", "f.jsonl", 0),
            Removal("not_an_object", "f.jsonl", 0, detail="list"),
            row("nq", "test", 2),
        ]
    )
    manifest = prepared(rows).manifest
    assert {(one.reason, one.line, one.id) for one in manifest.removals} == {
        ("duplicate_id", 10, "nq-train-0"),
        ("empty_answers", 11, "nq-train-50"),
        ("train_test_overlap", 12, "nq-test-1"),
        ("blank_line", 13, None),
        ("not_an_object", 14, None),
    }
    assert manifest.reasons["duplicate_id"] == 1
    assert manifest.rows["nq/train"] == Count(read=11, kept=9, removed=2, unused=0)
    assert manifest.rows["?/?"] == Count(read=1, kept=0, removed=1, unused=0)
    assert manifest.num_leaks == 0


def test_rows_that_are_not_trained_on_remove_no_test_row() -> None:
    rows = numbered(
        [
            *block("nq", "train", 9),
            row("triviaqa", "train", 0, question="who?"),
            row("nq", "test", 0, question="who"),
        ]
    )
    assert len(prepared(rows).splits["test"]) == 1
    with pytest.raises(DataError, match="0 test questions are left"):
        prepared(rows, train_datasets=("nq", "triviaqa"))


def test_require_support() -> None:
    known = [replace(one, support_ids=("p",)) for one in ROWS if isinstance(one, RawRow)]
    rows = [*known[:40], *ROWS[40:60], *known[60:]]
    result = prepared(rows, require_support=True)
    assert all(q.support_ids for questions in result.splits.values() for q in questions)
    assert result.manifest.unused["hotpotqa/train"] == {"no_support": 10}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_sizes": {"nq": 13}}, "nq: 13 asked, 12 left after removal"),
        ({"test_sizes": {"bamboogle": 1}}, "bamboogle: 1 asked, 0 left"),
        ({"test_sizes": {"quiz": 1}}, r"data.test_sizes: unknown \['quiz'\]; known: nq"),
        ({"train_datasets": ("quiz",)}, r"data.train_datasets: unknown \['quiz'\]"),
        ({"train_datasets": ("2wiki",)}, "0 train, 4 dev and 18 test"),
        ({"train_size": 51}, "data.train_size: 51 asked, 50 left"),
        ({"dev_size": 61}, "0 train, 61 dev and 18 test"),
    ],
)
def test_more_than_there_is_stops_with_both_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(**changes)


def test_a_leak_is_never_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def blind(splits: Any, _: Any) -> Any:
        return {name: list(rows) for name, rows in splits.items()}, []

    monkeypatch.setattr(module, "drop_overlap", blind)
    same = {
        "train": [Question("a", "nq", "Who is it", ("x",))],
        "dev": [],
        "test": [Question("b", "nq", "who is it?", ("x",))],
    }
    with pytest.raises(DataError, match=r"1 questions are in two splits \(a = b\)"):
        write_prepared(same, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- files


QUESTIONS = [
    Question("a", "nq", "who is “Renée”\u2028?", ("x", "y"), "span", "bridge", 2, ("p1", "p2")),
    Question("b", "musique", "is it?", ("yes",), "yes_no"),
]


def test_questions_survive_the_way_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    write_questions(QUESTIONS, path)
    assert read_questions(path) == QUESTIONS
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]
    with path.open("a", encoding="utf-8") as file:
        file.write('{"id": "c"}\n')
    with pytest.raises(DataError, match=r"line 3: KeyError: 'dataset'; expected a question"):
        read_questions(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    write_questions(QUESTIONS, path)
    with pytest.raises(TypeError):
        write_questions([QUESTIONS[0], replace(QUESTIONS[1], text=object())], path)  # type: ignore[arg-type]
    assert read_questions(path) == QUESTIONS
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]


def test_built_questions_get_the_same_rules(tmp_path: Path) -> None:
    splits = {
        "train": [QUESTIONS[0], Question("a2", "nq", "who is the “Renée”", ("z",))],
        "dev": [Question("d", "nq", "dev", ("x",))],
        "test": [QUESTIONS[1], Question("t", "popqa", "Who is “Renée”?", ("x",))],
    }
    manifest = write_prepared(splits, tmp_path)
    assert manifest.reasons == {"duplicate": 1, "train_test_overlap": 1}
    assert read_questions(tmp_path / "questions_train.jsonl") == [
        replace(QUESTIONS[0], answers=("x", "y", "z"))
    ]
    assert read_questions(tmp_path / "questions_test.jsonl") == [QUESTIONS[1]]
    assert read_manifest(tmp_path / "manifest.json") == manifest
    for name in ("train", "dev", "test"):
        written = (tmp_path / f"questions_{name}.jsonl").read_bytes()
        assert manifest.sha256[name] == sha256(written).hexdigest()


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [], "test": []}, r"splits \['test', 'train'\]; expected train, dev, test"),
        ({"train": QUESTIONS, "dev": [], "test": QUESTIONS}, "'a' is there twice"),
        ({"train": [], "dev": [], "test": [Question("e", "nq", "who", ())]}, "'e' lacks"),
        ({"train": [], "dev": [], "test": [Question("e", "nq", " ", ("x",))]}, "'e' lacks"),
    ],
)
def test_broken_built_questions_are_errors(splits: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_prepared(splits, tmp_path)


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"rows": {}}')
    with pytest.raises(DataError, match="is no manifest"):
        read_manifest(path)


def test_hub_preparation_on_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets as library

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = ["hub: json", "columns: {answers: golden_answers}", "sources:"]
    for dataset, split, size, extra in (
        ("nq", "train", 20, "rows: 20"),
        ("musique", "test", 9, "rows: 9, sample: 5"),
    ):
        path = tmp_path / f"{dataset}.jsonl"
        rows = [
            {"id": f"{split}_{n}", "question": f"who is {dataset} {n}", "golden_answers": ["x"]}
            for n in range(size)
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        table.append(
            f"  - {{dataset: {dataset}, split: {split}, hub_split: train, data_files: {path}, "
            f"{extra}}}"
        )
    sources = tmp_path / "datasets.yaml"
    sources.write_text("\n".join(table))
    config = DataConfig(source="hub", dev_size=2, clean="malformed")
    manifest = prepare_files(config, tmp_path, tmp_path / "out", sources)
    assert manifest.kept == {"nq/train": 18, "nq/dev": 2, "musique/test": 5}
    assert read_questions(tmp_path / "out" / "questions_test.jsonl")[0].id.startswith("musique-")
    sources.write_text("\n".join(table).replace("rows: 20", "rows: 21"))
    with pytest.raises(DataError, match="nq/train: read 20 rows, expected 21"):
        prepare_files(config, tmp_path, tmp_path / "out", sources)


def test_hub_sizes_are_the_papers_unless_the_config_has_its_own() -> None:
    sources = load_sources(module.DATASETS_YAML)
    config = with_published_sizes(DataConfig(source="hub"), sources)
    assert config.expected_rows["nq/train"] + config.expected_rows["hotpotqa/train"] == 169_615
    assert set(config.test_sizes) == set(DATASETS)
    own = DataConfig(source="hub", test_sizes={"nq": 3}, expected_rows={"nq/train": 1})
    assert with_published_sizes(own, sources) == own


@pytest.mark.skipif(not MINI.is_dir(), reason="the real questions are not on this machine")
def test_real_questions(tmp_path: Path) -> None:
    sizes = dict.fromkeys(DATASETS, 10)
    config = DataConfig(source="files", dev_size=20, test_sizes=sizes, require_support=True)
    manifest = prepare_files(config, MINI, tmp_path)
    assert manifest.kept["bamboogle/test"] == 10
    keys = [
        {normalize_question(q.text) for q in read_questions(tmp_path / f"questions_{name}.jsonl")}
        for name in ("train", "dev", "test")
    ]
    assert [len(one) for one in keys] == [280, 20, 70]
    assert len(set.union(*keys)) == 370
    rows = list(read_file(tmp_path / "questions_train.jsonl", Columns(), split="train"))
    assert not any(isinstance(one, Removal) for one in rows)  # written questions are a source too


def test_world_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="source is world"):
        prepare_files(DataConfig(), tmp_path, tmp_path)


def test_imports_without_torch_and_datasets() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import moopd.data.manifest; "
        "assert not {'datasets', 'transformers', 'pyarrow', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
