"""Where failed workflows break: the first broken link from search to answer.

Containment is decided on normalised text at word borders. For yes/no questions containment says
nothing, so they stand apart and skip those links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from moopd.data.normalize import normalize_answer
from moopd.evaluation.scoring import Scored
from moopd.types import Question


class Place(StrEnum):
    """Every workflow has exactly one; of the broken links the first one counts."""

    CORRECT = "correct"
    NOT_SEARCHED = "not_searched"
    NOT_RETRIEVED = "not_retrieved"
    NOT_REPORTED = "not_reported"
    NOT_SELECTED = "not_selected"
    NOT_ANSWERED = "not_answered"
    FORMAT = "format"


@dataclass(frozen=True)
class Funnel:
    """Workflows by place, yes/no questions apart; both together hold every workflow."""

    span: dict[Place, int]
    yes_no: dict[Place, int]

    @property
    def total(self) -> int:
        return sum(self.span.values()) + sum(self.yes_no.values())


def funnel(scored: Scored) -> Funnel | None:
    """Counts of one system and run; None where the records hold no traces."""
    if scored.attempts.traces is None:
        return None
    places = places_of(scored)
    questions = scored.attempts.questions.questions
    size = scored.attempts.num_attempts
    counts: dict[bool, Counter[Place]] = {True: Counter(), False: Counter()}
    for number, place in enumerate(places):
        counts[_is_yes_no(questions[number // size])][place] += 1
    made = Funnel(*({place: counts[yes_no][place] for place in Place} for yes_no in (False, True)))
    correct = int(scored.strict.correct.sum())
    in_place = made.span[Place.CORRECT] + made.yes_no[Place.CORRECT]
    if made.total != scored.attempts.num_records or in_place != correct:
        raise RuntimeError(
            f"funnel of {scored.attempts.system} holds {made.total} workflows, {in_place} right; "
            f"the records hold {scored.attempts.num_records}, {correct} right"
        )
    return made


def places_of(scored: Scored) -> tuple[Place, ...]:
    """The place of every workflow, in the order of the records."""
    size = scored.attempts.num_attempts
    questions = scored.attempts.questions.questions
    right = scored.strict.correct.ravel().tolist()
    return tuple(
        Place.CORRECT
        if right[number]
        else first_broken_link(questions[number // size], trace, scored.failures[number])
        for number, trace in enumerate(scored.attempts.iter_traces())
    )


def first_broken_link(question: Question, trace: Mapping[str, Any], failure: str | None) -> Place:
    """Place of a workflow that failed; `failure` is why its final answer could not be read."""
    retrievals = trace.get("retrievals", ())
    if not retrievals:
        return Place.NOT_SEARCHED
    if not _is_yes_no(question):
        golds = _golds(question.answers)
        if not _holds(golds, _passages(retrievals)):
            return Place.NOT_RETRIEVED
        reports = trace.get("reports", ())
        if not _holds(golds, (report["text"] for report in reports)):
            return Place.NOT_REPORTED
        selected = set(trace.get("selected", ()))
        if not _holds(golds, (r["text"] for r in reports if r["id"] in selected)):
            return Place.NOT_SELECTED
    return Place.FORMAT if failure is not None else Place.NOT_ANSWERED


def _is_yes_no(question: Question) -> bool:
    return question.answer_type == "yes_no"


def _passages(retrievals: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for retrieval in retrievals:
        for passage in retrieval.get("passages", ()):
            yield f"{passage.get('title', '')} {passage['text']}"


@lru_cache(maxsize=1 << 14)
def _golds(answers: tuple[str, ...]) -> tuple[str, ...]:
    normal = (normalize_answer(answer) for answer in answers)
    return tuple(f" {gold} " for gold in normal if gold)


@lru_cache(maxsize=1 << 15)
def _normalized(text: str) -> str:
    return f" {normalize_answer(text)} "


def _holds(golds: Sequence[str], texts: Iterable[str]) -> bool:
    return any(gold in _normalized(text) for text in texts for gold in golds)
