"""Made-up questions and records: every system has a skill, every workflow a plausible trace."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moopd.types import DATASETS, EvalRecord, Question

SKILLS = {
    "cmas_base": (0.20, 1.2),
    "cmas_rl": (0.38, 2.3),
    "hmas_base": (0.26, 1.8),
    "prompted_critic": (0.40, 3.1),
    "multiagent_opd": (0.46, 3.4),
    "multiagent_opd_last": (0.45, 3.4),
    "opd_outcome_searcher": (0.22, 0.05),
    "opd_base_teacher": (0.30, 2.2),
    "opd_no_searcher_loss": (0.31, 2.0),
}
"""System -> (share of right answers, mean searches)."""

_PLACES = ("Arvel", "Brisk Hollow", "Coren", "Dalmouth", "Esk", "Fenwick", "Garlow", "Hatherby")
_FAMILIES = ("director", "birthplace", "capital", "date", "bridge", "comparison", "yes_no")


def questions(per_set: int = 12, datasets: Sequence[str] = DATASETS) -> list[Question]:
    made = []
    for number, dataset in enumerate(datasets):
        family = _FAMILIES[number % len(_FAMILIES)]
        for k in range(per_set):
            gold = "yes" if family == "yes_no" else f"{_PLACES[k % len(_PLACES)]} {k}"
            made.append(
                Question(
                    id=f"{dataset}-test-{k:04d}",
                    dataset=dataset,
                    text=f"Which place belongs to item {k} of {dataset}?",
                    answers=(gold, f"{gold} town"),
                    answer_type="yes_no" if family == "yes_no" else "span",
                    family=family,
                    num_hops=1 + number % 3,
                )
            )
    return made


def records(
    system: str, asked: Sequence[Question], run: int = 0, attempts: int = 4
) -> list[EvalRecord]:
    skill, searches = SKILLS[system]
    rng = random.Random(f"{system}/{run}")
    return [
        _record(system, run, question, attempt, skill, searches, rng)
        for question in asked
        for attempt in range(attempts)
    ]


def _record(
    system: str,
    run: int,
    question: Question,
    attempt: int,
    skill: float,
    searches: float,
    rng: random.Random,
) -> EvalRecord:
    num = max(0, round(rng.gauss(searches, 0.9)))
    right = rng.random() < skill
    malformed = not right and rng.random() < 0.1
    gold = question.answers[0]
    found = right or rng.random() < 0.4
    reported = right or (found and rng.random() < 0.6)
    answer = gold if right else rng.choice(("Nowhere", "Elsewhere", "no"))
    output = answer if malformed else f"<answer>{answer}</answer>"
    retrievals = [
        {
            "step": 1 + k,
            "subtask": k % 2,
            "query": f"item place {rng.randrange(3)}",
            "passages": [
                {
                    "id": f"p{question.id}{j}",
                    "title": f"Item {j}",
                    "text": f"The item stands in {gold if found and not j else 'a field'}.",
                }
                for j in range(3)
            ],
            "error": None,
        }
        for k in range(num)
    ]
    facts = gold if reported else "an unnamed place"
    reports = [
        {"id": k + 1, "subtask": k, "text": f"Key findings: it is {facts}."} for k in range(2)
    ]
    return EvalRecord(
        system=system,
        run=run,
        question_id=question.id,
        dataset=question.dataset,
        attempt=attempt,
        output=output,
        stop="answered",
        num_searches=num,
        num_repeated_queries=num - len({r["query"] for r in retrievals}),
        num_subtasks=2,
        num_reports=2,
        num_rounds=1,
        num_steps=2 + num,
        num_calls=4 + num,
        input_tokens=400 + 300 * num + rng.randrange(200),
        output_tokens=40 + 15 * num,
        format_failures={"answerer/no_action": 1} if malformed else {},
        seed=rng.getrandbits(62) + 1,
        protocol=f"{system}-{run}",
        trace={
            "subtasks": [
                {"id": k, "round": 1, "text": f"find the place of part {k}"} for k in range(2)
            ],
            "retrievals": retrievals,
            "reports": reports,
            "selected": [1, 2] if right or rng.random() < 0.8 else [],
        },
    )
