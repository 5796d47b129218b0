"""Rules: lock-step equals one by one; prompts only grow; seeds differ; over-long prompts end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moopd.config import WorkflowConfig
from moopd.retrieval.base import RetrievalError
from moopd.types import (
    Completion,
    FormatError,
    FormatErrorKind,
    GenerateRequest,
    Passage,
    Question,
    Role,
    StopReason,
)
from moopd.workflows.rollout import Job, derive_seed, run_workflows
from tests.support import REPORT, SEARCH, OnePassage, Script, answer, play, team, word_tokenizer


def _reply(prompt: str, candidate: int) -> str:
    """A team of one: dispatch once, search once, report, select, answer."""
    if "answerer" in prompt:
        return answer()
    if "searcher" in prompt:
        return REPORT if "passage" in prompt else SEARCH
    return "<select> 1 </select>" if "report" in prompt else "<task> a </task>"


def test_many_in_lock_step_equal_each_alone() -> None:
    tokenizer = word_tokenizer()
    questions = [Question(f"q{n}", "nq", f"who {w}", ("x",)) for n, w in enumerate("abcde")]
    jobs = [Job(q, g, derive_seed(3, n, g)) for n, q in enumerate(questions) for g in range(2)]
    kind = team("hierarchy", tokenizer)
    together = run_workflows(jobs, kind, Script(tokenizer, _reply), OnePassage(), max_live=4)
    alone = [run_workflows([job], kind, Script(tokenizer, _reply), OnePassage())[0] for job in jobs]
    assert together == alone
    assert [t.question.id for t in together] == [job.question.id for job in jobs]


def test_a_conversation_only_appends_and_keeps_sampled_ids() -> None:
    calls = play(
        "hierarchy", ["<task> a </task>", SEARCH, REPORT, "<select> 1 </select>", answer()]
    ).calls
    for role in (Role.LEADER, Role.SEARCHER):
        first, second = [call for call in calls if call.role is role]
        start = (*first.prompt_ids, *first.completions[0].token_ids)
        assert second.prompt_ids[: len(start)] == start


def test_no_two_calls_of_a_batch_share_a_seed() -> None:
    tokenizer = word_tokenizer()
    engine = Script(tokenizer, _reply)
    question = Question("q", "nq", "who a", ("x",))
    jobs = [Job(question, g, derive_seed(0, 1, g)) for g in range(4)]
    run_workflows(jobs, team("hierarchy", tokenizer), engine, OnePassage())
    seeds = [request.seed for request in engine.seen]
    assert len(set(seeds)) == len(seeds) == 4 * 5


def test_an_over_long_prompt_ends_the_workflow_as_context() -> None:
    tokenizer = word_tokenizer()
    config = WorkflowConfig(max_input_tokens=10, max_output_tokens=8)
    kind = team("cascade", tokenizer, config=config)
    question = Question("q", "nq", "who a", ("x",))
    (trajectory,) = run_workflows(
        [Job(question, 0, 1)], kind, Script(tokenizer, lambda *_: SEARCH), OnePassage()
    )
    assert trajectory.stop is StopReason.CONTEXT
    assert trajectory.answers == ()


def test_a_prompt_of_exactly_the_limit_is_asked() -> None:
    tokenizer = word_tokenizer()
    question = Question("q", "nq", "who a", ("x",))
    # [user] searcher question who a subtask who a [assistant]
    for limit, num_calls in ((9, 1), (8, 0)):
        config = WorkflowConfig(max_input_tokens=limit, max_output_tokens=8)
        (trajectory,) = run_workflows(
            [Job(question, 0, 1)], team("cascade", tokenizer, config=config),
            Script(tokenizer, lambda *_: SEARCH), OnePassage(),
        )  # fmt: skip
        assert (len(trajectory.calls), trajectory.stop) == (num_calls, StopReason.CONTEXT)


def test_a_completion_that_the_token_limit_ended_is_a_cut_one() -> None:
    class Cut(Script):
        def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
            found = super().generate(requests)
            return [tuple(replace(c, finish="length") for c in group) for group in found]

    tokenizer = word_tokenizer()
    (trajectory,) = run_workflows(
        [Job(Question("q", "nq", "who a", ("x",)), 0, 1)], team("cascade", tokenizer),
        Cut(tokenizer, lambda *_: "<search> a"), OnePassage(),
    )  # fmt: skip
    assert trajectory.calls[0].actions == (FormatError(FormatErrorKind.CUT),)


def test_live_workflows_are_bounded_and_equal_queries_are_searched_once() -> None:
    searched: list[tuple[list[str], int]] = []
    asked: list[int] = []

    class Spy(OnePassage):
        def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            searched.append((list(queries), top_k))
            return super().search(queries, top_k)

    class Counting(Script):
        def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
            asked.append(len(requests))
            return super().generate(requests)

    tokenizer = word_tokenizer()
    jobs = [Job(Question(f"q{n}", "nq", "who a", ("x",)), 0, n) for n in range(5)]
    kind = replace(team("cascade", tokenizer), top_k=3)
    run_workflows(jobs, kind, Counting(tokenizer, _reply), Spy(), max_live=2)
    # Search, report, answer: 3 calls for each of 5 workflows, two at a time.
    assert (max(asked), sum(asked)) == (2, 15)
    assert searched == [(["a"], 3)] * 3


def test_a_retriever_that_fails_is_recorded_with_its_cause() -> None:
    class Down(OnePassage):
        def search(self, queries: object, top_k: int) -> list[list[object]]:  # type: ignore[override]
            raise RetrievalError("status 500")

    tokenizer = word_tokenizer()
    (trajectory,) = run_workflows(
        [Job(Question("q", "nq", "who a", ("x",)), 0, 1)],
        replace(team("cascade", tokenizer)),
        Script(tokenizer, lambda *_: SEARCH),
        Down(),
    )
    assert {r.error for r in trajectory.retrievals} == {"status 500"}
