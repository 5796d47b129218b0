"""Duplicates inside a split are united; a question that two splits share leaves one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from moopd.data.clean import Candidate, is_yes_no
from moopd.data.normalize import normalize_answer
from moopd.data.sources import Removal

Overlap = Literal["drop_test", "drop_train"]
CONFLICTING = "conflicting_answers"


def remove(row: Candidate, reason: str, detail: str = "") -> Removal:
    """The removal of a candidate."""
    question = row.question
    return Removal(reason, row.source, row.line, question.id, question.dataset, row.split, detail)


def merge_duplicates(rows: Iterable[Candidate]) -> tuple[list[Candidate], list[Removal]]:
    """The first row of each question with all answers in order; the others, each removed as
    `duplicate`. Rows must be of one split; data sets do not matter.

    A question whose rows have no answer in common is flagged `conflicting_answers`.
    """
    first: dict[str, Candidate] = {}
    removals = []
    for row in rows:
        kept = first.get(row.key)
        if kept is None:
            first[row.key] = row
        else:
            first[row.key] = _united(kept, row)
            removals.append(remove(row, "duplicate", kept.question.id))
    return list(first.values()), removals


def _united(kept: Candidate, other: Candidate) -> Candidate:
    normals = {normalize_answer(answer) for answer in kept.question.answers}
    agree = any(normalize_answer(answer) in normals for answer in other.question.answers)
    flags = (*kept.flags, *other.flags, *(() if agree else (CONFLICTING,)))
    answers = tuple(dict.fromkeys(kept.question.answers + other.question.answers))
    question = replace(
        kept.question,
        answers=answers,
        answer_type="yes_no" if is_yes_no(answers) else "span",
        support_ids=tuple(dict.fromkeys(kept.question.support_ids + other.question.support_ids)),
    )
    merged = (*kept.merged, other.question.id)
    return replace(kept, question=question, flags=tuple(dict.fromkeys(flags)), merged=merged)


def drop_overlap(
    splits: Mapping[str, Sequence[Candidate]], overlap: Overlap
) -> tuple[dict[str, list[Candidate]], list[Removal]]:
    """Splits without a shared question, across data sets too.

    `drop_test` (section 4): the development or test row of a training question goes; `drop_train`:
    the training row does. A development row that equals a test row goes in both.
    """
    removals: list[Removal] = []
    train, dev, test = (list(splits.get(name, ())) for name in ("train", "dev", "test"))
    if overlap == "drop_test":
        dev = _without(dev, train, "train_dev_overlap", removals)
        test = _without(test, train, "train_test_overlap", removals)
    else:
        train = _without(train, test, "train_test_overlap", removals)
        train = _without(train, dev, "train_dev_overlap", removals)
    dev = _without(dev, test, "dev_test_overlap", removals)
    return {"train": train, "dev": dev, "test": test}, removals


def _without(
    rows: list[Candidate], others: Sequence[Candidate], reason: str, removals: list[Removal]
) -> list[Candidate]:
    ids = {other.key: other.question.id for other in others}
    kept = []
    for row in rows:
        if row.key in ids:
            removals.append(remove(row, reason, ids[row.key]))
        else:
            kept.append(row)
    return kept


def leaks(splits: Mapping[str, Iterable[Candidate]]) -> list[tuple[str, str]]:
    """Pairs of ids of one normalised question in two splits (says nothing on paraphrases)."""
    seen: dict[str, tuple[str, str]] = {}
    found = []
    for split, rows in splits.items():
        for row in rows:
            where, other = seen.setdefault(row.key, (split, row.question.id))
            if where != split:
                found.append((other, row.question.id))
    return found
