"""The case viewer's material: which questions, and what each system did on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moopd.evaluation.funnel import Place, first_broken_link
from moopd.evaluation.results import (
    Case,
    CaseAttempt,
    CaseBook,
    CasePassage,
    CaseReport,
    CaseRound,
    CaseSearch,
    CaseSubtask,
)
from moopd.evaluation.scoring import Scored

_MAX_OUTPUT = 600
_MAX_PASSAGE = 900
_THIRDS = 3


def case_book(
    scored: Mapping[str, Scored],
    titles: Mapping[str, str],
    first: str,
    second: str,
    num_cases: int,
) -> CaseBook:
    """`num_cases` questions of one run of every system, chosen by a rule that nobody steers.

    Systems without traces show their answers alone; those on other questions are left out.
    """
    questions = scored[first].attempts.questions
    systems = {
        name: one for name, one in scored.items() if one.attempts.questions.ids == questions.ids
    }
    rule = (
        f"a third where {titles[first]} leads {titles[second]} most, a third where it trails most, "
        "the rest evenly over the remaining questions; equal leads in the order of question ids"
    )
    places = _chosen(systems[first], systems[second], num_cases)
    passages: dict[str, CasePassage] = {}
    cases = tuple(_case(systems, place, passages) for place in places)
    return CaseBook(rule=rule, cases=cases, passages=passages)


def _chosen(first: Scored, second: Scored, num_cases: int) -> list[int]:
    lead = first.strict.correct.sum(axis=1) - second.strict.correct.sum(axis=1)
    ids = first.attempts.questions.ids
    by_lead = sorted(range(len(ids)), key=lambda k: (-int(lead[k]), ids[k]))
    share = num_cases // _THIRDS
    ahead = [k for k in by_lead if lead[k] > 0][:share]
    behind = [k for k in sorted(by_lead, key=lambda k: (int(lead[k]), ids[k])) if lead[k] < 0]
    picked = [*ahead, *behind[:share]]
    taken = set(picked)
    rest = [k for k in range(len(ids)) if k not in taken]
    wanted = min(len(rest), num_cases - len(picked))
    return [*picked, *(rest[n * len(rest) // wanted] for n in range(wanted))]


def _case(systems: Mapping[str, Scored], place: int, passages: dict[str, CasePassage]) -> Case:
    question = next(iter(systems.values())).attempts.questions.questions[place]
    return Case(
        question_id=question.id,
        dataset=question.dataset,
        question=question.text,
        answers=question.answers,
        attempts={
            name: tuple(
                _attempt(scored, place, attempt, passages)
                for attempt in range(scored.attempts.num_attempts)
            )
            for name, scored in systems.items()
        },
    )


def _attempt(
    scored: Scored, place: int, attempt: int, passages: dict[str, CasePassage]
) -> CaseAttempt:
    attempts = scored.attempts
    number = place * attempts.num_attempts + attempt
    correct = bool(scored.strict.correct[place, attempt])
    text = attempts.traces[number] if attempts.traces else None
    trace: dict[str, Any] = json.loads(text) if text else {}
    kind = ""
    if correct:
        kind = Place.CORRECT.value
    elif trace:
        question = attempts.questions.questions[place]
        kind = first_broken_link(question, trace, scored.failures[number]).value
    return CaseAttempt(
        answer=scored.strict.answers[number],
        output=_cut(attempts.outputs[number], _MAX_OUTPUT),
        correct=correct,
        stop=attempts.stops[number] or "",
        place=kind,
        rounds=_rounds(trace, passages),
    )


def _rounds(trace: Mapping[str, Any], passages: dict[str, CasePassage]) -> tuple[CaseRound, ...]:
    rounds: dict[int, list[CaseSubtask]] = {}
    selected = set(trace.get("selected", ()))
    for subtask in trace.get("subtasks", ()):
        mine = [r for r in trace.get("retrievals", ()) if r["subtask"] == subtask["id"]]
        reports = [r for r in trace.get("reports", ()) if r["subtask"] == subtask["id"]]
        rounds.setdefault(subtask.get("round", 1), []).append(
            CaseSubtask(
                text=subtask["text"],
                searches=tuple(_search(one, passages) for one in mine),
                reports=tuple(
                    CaseReport(id=r["id"], text=r["text"], selected=r["id"] in selected)
                    for r in reports
                ),
            )
        )
    return tuple(
        CaseRound(number=number, subtasks=tuple(rounds[number])) for number in sorted(rounds)
    )


def _search(retrieval: Mapping[str, Any], passages: dict[str, CasePassage]) -> CaseSearch:
    found: Sequence[Mapping[str, Any]] = retrieval.get("passages", ())
    for passage in found:
        passages.setdefault(
            passage["id"],
            CasePassage(title=passage.get("title", ""), text=_cut(passage["text"], _MAX_PASSAGE)),
        )
    return CaseSearch(
        query=retrieval["query"],
        passages=tuple(passage["id"] for passage in found),
        error=retrieval.get("error"),
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
