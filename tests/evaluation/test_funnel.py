"""Funnel, budgets, workload and diagnostics, on workflows worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moopd.evaluation import budget
from moopd.evaluation.attempts import arrange, question_set
from moopd.evaluation.cases import case_book
from moopd.evaluation.diagnostics import (
    Share,
    agreement_column,
    collapse_shares,
    completed_column,
    correct_histogram,
    format_failures,
)
from moopd.evaluation.funnel import Place, first_broken_link, funnel
from moopd.evaluation.metrics import MACRO, set_means
from moopd.evaluation.records import RecordsError, to_table
from moopd.evaluation.scoring import Scored, load_rules, score
from moopd.evaluation.workload import workload_columns
from moopd.types import EvalRecord, Question
from tests.evaluation import made

SPAN = Question("q", "nq", "where?", ("the River Thames", "Thames"))
YES_NO = Question("y", "nq", "is it?", ("yes",), answer_type="yes_no")


def trace(
    passage: str | None, report: str | None = None, selected: Sequence[int] = (1,)
) -> dict[str, object]:
    retrievals = [{"passages": [{"id": "p", "title": "T", "text": passage}]}]
    return {
        "subtasks": [{"id": 0, "round": 1, "text": "find"}],
        "retrievals": [] if passage is None else retrievals,
        "reports": [] if report is None else [{"id": 1, "subtask": 0, "text": report}],
        "selected": list(selected),
    }


@pytest.mark.parametrize(
    ("made_trace", "failure", "place"),
    [
        (trace(None, "on the Thames"), None, Place.NOT_SEARCHED),
        (trace("no river here", "on the Thames"), None, Place.NOT_RETRIEVED),
        (trace("the Thamesmead estate"), None, Place.NOT_RETRIEVED),  # whole words only
        (trace("It is the River THAMES!", "unclear"), None, Place.NOT_REPORTED),
        (trace("the Thames", None), None, Place.NOT_REPORTED),
        (trace("the Thames", "the Thames", ()), None, Place.NOT_SELECTED),
        (trace("the Thames", "the Thames", (2,)), None, Place.NOT_SELECTED),
        (trace("the Thames", "the Thames"), None, Place.NOT_ANSWERED),
        (trace("the Thames", "the Thames"), "unclosed", Place.FORMAT),
        # The first broken link counts: a malformed answer without evidence is no format failure.
        (trace("no river here"), "unclosed", Place.NOT_RETRIEVED),
    ],
)
def test_first_broken_link(
    made_trace: dict[str, object], failure: str | None, place: Place
) -> None:
    assert first_broken_link(SPAN, made_trace, failure) is place


def test_yes_no_questions_skip_containment() -> None:
    assert first_broken_link(YES_NO, trace("nothing"), None) is Place.NOT_ANSWERED
    assert first_broken_link(YES_NO, trace("nothing"), "unclosed") is Place.FORMAT
    assert first_broken_link(YES_NO, trace(None), None) is Place.NOT_SEARCHED


def test_a_passages_title_is_part_of_what_was_retrieved() -> None:
    titled = trace("a river", "unclear")
    titled["retrievals"] = [{"passages": [{"id": "p", "title": "Thames", "text": "a river"}]}]
    assert first_broken_link(SPAN, titled, None) is Place.NOT_REPORTED


def test_an_answer_that_normalises_to_nothing_is_never_contained() -> None:
    empty = Question("e", "nq", "what?", ("The!",))
    assert first_broken_link(empty, trace("the the"), None) is Place.NOT_RETRIEVED


def scored(records: Sequence[EvalRecord], questions: Sequence[Question]) -> Scored:
    return score(arrange(to_table(records), question_set(questions)), load_rules())


@pytest.mark.parametrize("system", list(made.SKILLS))
def test_every_workflow_has_exactly_one_place(system: str) -> None:
    questions = made.questions(6)
    one = scored(made.records(system, questions), questions)
    counts = funnel(one)
    assert counts is not None
    assert counts.total == 7 * 6 * 4
    assert sum(counts.yes_no.values()) == 6 * 4
    right = counts.span[Place.CORRECT] + counts.yes_no[Place.CORRECT]
    assert right == one.strict.correct.sum()


def test_records_without_traces_have_no_funnel_and_half_of_them_are_refused() -> None:
    questions = made.questions(2, ("nq",))
    records = made.records("cmas_rl", questions)
    bare = [replace(record, trace={}) for record in records]
    assert funnel(scored(bare, questions)) is None
    with pytest.raises(RecordsError, match="without a trace"):
        funnel(scored([bare[0], *records[1:]], questions))


# ---------------------------------------------------------------- by hand

ASKED = [Question("a", "nq", "?", ("x",)), Question("b", "popqa", "?", ("y",))]


def record(question: str, attempt: int, output: str, searches: int, tokens: int) -> EvalRecord:
    dataset = "nq" if question == "a" else "popqa"
    return EvalRecord(
        system="s",
        question_id=question,
        dataset=dataset,
        attempt=attempt,
        output=output,
        stop="answered" if output else "step_budget",
        num_searches=searches,
        num_repeated_queries=max(0, searches - 1),
        num_subtasks=1,
        num_reports=int(searches > 0),
        num_rounds=1,
        num_steps=1,
        num_calls=2,
        input_tokens=tokens - 10,
        output_tokens=10,
        format_failures={"searcher/unclosed": searches},
    )


RECORDS = [
    record("a", 0, "<answer>x</answer>", 1, 100),
    record("a", 1, "<answer>x</answer>", 3, 300),
    record("a", 2, "<answer>z</answer>", 0, 50),
    record("a", 3, "x", 1, 100),
    record("b", 0, "<answer>y</answer>", 2, 200),
    record("b", 1, "", 0, 60),
    record("b", 2, "<answer>q</answer>", 0, 60),
    record("b", 3, "<answer>q</answer>", 0, 60),
]
ONE = scored(RECORDS, ASKED)


def test_budgets_by_hand() -> None:
    # Right: a0 (1 search, 100 tokens), a1 (3, 300), b0 (2, 200); per set of 4 attempts.
    assert budget.budget_grid([ONE.attempts], "searches") == (0, 1, 2, 3)
    columns = budget.budget_columns(ONE, "searches", (0, 1, 2, 3))
    means = [set_means(column, ONE.attempts.questions.sets) for column in columns]
    assert [mean["nq"] for mean in means] == [0, 0.25, 0.25, 0.5]
    assert [mean["popqa"] for mean in means] == [0, 0, 0.25, 0.25]
    assert [mean[MACRO] for mean in means] == [0, 0.125, 0.25, 0.375]
    tokens = budget.budget_grid([ONE.attempts], "tokens")
    assert tokens[0] == 0 and tokens[-1] == 300
    (at_200,) = budget.budget_columns(ONE, "tokens", (200,))
    assert set_means(at_200, ONE.attempts.questions.sets)[MACRO] == 0.25


def test_budget_of_everything_is_the_score() -> None:
    last = budget.budget_columns(ONE, "searches", (3,))[0]
    assert set_means(last, ONE.attempts.questions.sets)[MACRO] == ONE.strict.correct.mean()


def test_workload_by_hand() -> None:
    # Searches: nq (1+3+0+1)/4 = 5/4, popqa 2/4; sets equally 7/8. Tokens in: 510/4 and 340/4.
    columns = workload_columns(ONE.attempts)
    sets = ONE.attempts.questions.sets
    assert set_means(columns["searches"], sets)[MACRO] == 0.875
    assert set_means(columns["input_tokens"], sets)[MACRO] == (510 / 4 + 340 / 4) / 2
    assert set_means(columns["repeated_queries"], sets)[MACRO] == (2 / 4 + 1 / 4) / 2
    bare = to_table(RECORDS).set_column(7, "num_searches", [[None] * 8])
    assert "searches" not in workload_columns(arrange(bare, question_set(ASKED)))


def test_diagnostics_by_hand() -> None:
    shares = collapse_shares(ONE)
    assert shares["no_search"] == (4, 8)
    assert shares["with_subtasks"] == (8, 8)
    assert shares["with_reports"] == (4, 8)
    assert shares["with_answer"] == (6, 8)  # a3 is malformed, b1 made none
    assert shares["stop_step_budget"] == (1, 8)
    assert format_failures(ONE) == {
        "final_answer/missing": 1,
        "final_answer/no_action": 1,
        "searcher/unclosed": 7,
    }
    assert correct_histogram(ONE) == [0, 1, 1, 0, 0]


def test_agreement_and_completion_by_hand() -> None:
    sets = ONE.attempts.questions.sets
    # a: x x z - : one equal pair of six; b: y - q q : one of six.
    assert set_means(agreement_column(ONE), sets)[MACRO] == pytest.approx(1 / 6, abs=1e-15)
    # a: two right + one malformed = 3/4; b: one right + one missing = 2/4.
    assert set_means(completed_column(ONE), sets)[MACRO] == (3 / 4 + 2 / 4) / 2


def test_answers_that_normalise_to_nothing_agree_with_nothing() -> None:
    # The! the a x: no equal pair that says something, of six.
    texts = ("The!", "the", "a", "x")
    records = [record("a", k, f"<answer>{text}</answer>", 0, 50) for k, text in enumerate(texts)]
    assert agreement_column(scored(records, ASKED[:1])).values.tolist() == [0]


def test_shares_count_workflows_that_say_something_and_pool_as_whole_numbers() -> None:
    # Records of others may lack a stop reason: b1 spent its budget, one of the 7 that say so.
    silent = scored([replace(RECORDS[0], stop=""), *RECORDS[1:]], ASKED)
    assert collapse_shares(silent)["stop_step_budget"] == (1, 7)
    # 1 of 4 and 8 of 8: 9 of 12, not the mean of 25 % and 100 %.
    assert Share.pooled([Share(1, 4), Share(8, 8)]) == (9, 12)


# ---------------------------------------------------------------- which cases are shown


def test_cases_are_chosen_by_the_stated_rule() -> None:
    """Right attempts of two systems on six questions; a third of six cases each way, the rest even.

    question  a  b  c  d  e  f
    first     4  3  0  1  2  2
    second    0  0  4  1  2  3
    lead      4  3 -4  0  0 -1   -> ahead a, b; behind c, f; rest d, e
    """
    asked = [Question(name, "nq", "?", ("x",)) for name in "abcdef"]

    def system(name: str, right: str) -> Scored:
        records = [
            replace(record("a", k, "<answer>x</answer>" if k < int(n) else "no", 0, 50),
                    system=name, question_id=asked[q].id)
            for q, n in enumerate(right)
            for k in range(4)
        ]  # fmt: skip
        return scored(records, asked)

    both = {"one": system("one", "430122"), "two": system("two", "004123")}
    titles = {"one": "One", "two": "Two"}
    book = case_book(both, titles, "one", "two", 6)
    assert [case.question_id for case in book.cases] == ["a", "b", "c", "f", "d", "e"]
    assert "One leads Two most" in book.rule
    attempts = book.cases[0].attempts
    assert [a.correct for a in attempts["one"]] == [True] * 4
    assert attempts["two"][0].answer is None and attempts["two"][0].output == "no"
    # Three cases: one ahead, one behind, one of the remaining four (the first by id).
    few = case_book(both, titles, "one", "two", 3)
    assert [case.question_id for case in few.cases] == ["a", "c", "b"]


def test_passages_of_cases_are_kept_once_and_reports_know_whether_they_were_selected() -> None:
    questions = made.questions(3, ("nq",))
    one = scored(made.records("cmas_rl", questions), questions)
    book = case_book({"one": one, "two": one}, {"one": "1", "two": "2"}, "one", "two", 3)
    named = [
        passage
        for case in book.cases
        for attempt in case.attempts["one"]
        for round_ in attempt.rounds
        for subtask in round_.subtasks
        for search in subtask.searches
        for passage in search.passages
    ]
    assert set(named) == set(book.passages)
    assert len(named) > len(book.passages)
