"""Duplicates, overlap and the leak check on hand-made splits."""

from __future__ import annotations

from moopd.data.clean import Candidate
from moopd.data.dedup import drop_overlap, leaks, merge_duplicates
from moopd.data.normalize import normalize_question
from moopd.types import Question


def row(name: str, text: str, split: str, *answers: str, dataset: str = "nq") -> Candidate:
    question = Question(name, dataset, text, answers or ("x",), support_ids=(f"p-{name}",))
    return Candidate(question, split, normalize_question(text), "f.jsonl", 1)


def ids(rows: list[Candidate]) -> list[str]:
    return [one.question.id for one in rows]


def test_first_row_stays_with_all_answers_in_order() -> None:
    rows = [
        row("a", "who sang it?", "train", "Pia", "P."),
        row("b", "when?", "train", "1874"),
        row("c", "Who sang the it", "train", "P.", "Norden", dataset="hotpotqa"),
        row("d", "who sang it", "train", "Someone"),
    ]
    kept, removals = merge_duplicates(rows)
    assert ids(kept) == ["a", "b"]
    assert kept[0].question.answers == ("Pia", "P.", "Norden", "Someone")
    assert kept[0].question.support_ids == ("p-a", "p-c", "p-d")
    assert kept[0].merged == ("c", "d")
    assert kept[0].flags == ("conflicting_answers",)  # d shares no answer with what is united
    assert [(r.id, r.reason, r.dataset, r.detail) for r in removals] == [
        ("c", "duplicate", "hotpotqa", "a"),
        ("d", "duplicate", "nq", "a"),
    ]


def test_answers_equal_after_normalisation_do_not_conflict() -> None:
    kept, _ = merge_duplicates([row("a", "who", "dev", "The Who"), row("b", "who?", "dev", "who!")])
    assert kept[0].flags == ()
    assert kept[0].question.answers == ("The Who", "who!")


def test_one_shared_answer_is_agreement() -> None:
    kept, _ = merge_duplicates([row("a", "who", "dev", "x"), row("b", "who?", "dev", "y", "x")])
    assert kept[0].flags == ()
    assert kept[0].question.answers == ("x", "y")


def test_a_union_with_a_span_is_no_yes_no_question() -> None:
    yes = row("a", "is it", "train", "yes")
    kept, _ = merge_duplicates([yes, row("b", "is it?", "train", "yes", "it is")])
    assert kept[0].question.answer_type == "span"
    kept, _ = merge_duplicates([yes, row("b", "is it?", "train", "Yes")])
    assert kept[0].question.answer_type == "yes_no"


SPLITS = {
    "train": [row("t1", "one", "train"), row("t2", "two", "train"), row("t3", "three", "train")],
    "dev": [row("d1", "One?", "dev"), row("d4", "four", "dev"), row("d5", "five", "dev")],
    "test": [
        row("e2", "the two?", "test", dataset="bamboogle"),
        row("e4", "four?", "test"),
        row("e6", "six", "test"),
    ],
}


def test_by_default_the_evaluation_row_goes() -> None:
    splits, removals = drop_overlap(SPLITS, "drop_test")
    assert {name: ids(rows) for name, rows in splits.items()} == {
        "train": ["t1", "t2", "t3"],
        "dev": ["d5"],
        "test": ["e4", "e6"],
    }
    assert [(r.id, r.reason, r.detail) for r in removals] == [
        ("d1", "train_dev_overlap", "t1"),
        ("e2", "train_test_overlap", "t2"),
        ("d4", "dev_test_overlap", "e4"),
    ]
    assert leaks(splits) == []


def test_drop_train_keeps_every_test_row() -> None:
    splits, removals = drop_overlap(SPLITS, "drop_train")
    assert {name: ids(rows) for name, rows in splits.items()} == {
        "train": ["t3"],
        "dev": ["d1", "d5"],
        "test": ["e2", "e4", "e6"],
    }
    assert {r.id: r.reason for r in removals} == {
        "t1": "train_dev_overlap",
        "t2": "train_test_overlap",
        "d4": "dev_test_overlap",
    }
    assert leaks(splits) == []


def test_leaks_name_both_rows() -> None:
    assert leaks(SPLITS) == [("t1", "d1"), ("t2", "e2"), ("d4", "e4")]
