"""One workflow through asynchronous calls: the same record as the lock-step driver's."""

from __future__ import annotations

import asyncio

from moopd.retrieval.base import RetrievalError
from moopd.trainers.verl_plugin.drive import Driven, drive
from moopd.types import Completion, GenerateRequest, Passage
from moopd.workflows.rollout import Job, run_workflows
from tests.support import QUESTION, REPORT, SEARCH, OnePassage, Script, answer, team, word_tokenizer

TOKENIZER = word_tokenizer()


def reply(prompt: str, candidate: int) -> str:
    """Acts by what the prompt shows last: search, then report, then select, then answer."""
    if "answerer" in prompt:
        return answer("x" if candidate % 2 else "y")
    return REPORT if "red harbor" in prompt else SEARCH


def run_async(engine: Script, retriever: object = None) -> Driven:
    async def generate(request: GenerateRequest, candidate: int) -> Completion:
        await asyncio.sleep(0)
        return engine.generate([request])[0][candidate]

    job = Job(QUESTION, 0, seed=5)
    return asyncio.run(
        drive(job, team("cascade", TOKENIZER, 3), generate, retriever or OnePassage())  # type: ignore[arg-type]
    )


def test_the_record_is_that_of_the_lock_step_driver() -> None:
    driven = run_async(Script(TOKENIZER, reply))
    (expected,) = run_workflows(
        [Job(QUESTION, 0, seed=5)],
        team("cascade", TOKENIZER, 3),
        Script(TOKENIZER, reply),
        OnePassage(),
    )
    assert driven.error is None
    assert driven.trajectory == expected
    assert len(expected.calls[-1].completions) == 3


def test_an_engine_that_fails_ends_as_data_with_the_calls_so_far() -> None:
    calls = 0

    def failing(prompt: str, candidate: int) -> str:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConnectionError("server gone")
        return SEARCH

    driven = run_async(Script(TOKENIZER, failing))
    assert driven.error == "ConnectionError: server gone"
    assert len(driven.trajectory.calls) == 1


def test_a_retriever_that_fails_is_recorded_as_such() -> None:
    class Broken:
        def search(self, queries: object, top_k: int) -> list[list[Passage]]:
            raise RetrievalError("index gone")

    driven = run_async(Script(TOKENIZER, lambda *_: SEARCH), Broken())
    assert driven.error is None
    assert {r.error for r in driven.trajectory.retrievals} == {"index gone"}
