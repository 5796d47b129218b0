"""The concurrent driver makes the trajectories of the lock-step driver, in the jobs' order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from moopd.engines.base import EngineError
from moopd.retrieval.base import RetrievalError
from moopd.types import Completion, GenerateRequest, Passage
from moopd.workflows.rollout import Job, run_workflows
from tests.support import QUESTION, REPORT, SEARCH, OnePassage, Script, answer, team, word_tokenizer

TOKENIZER = word_tokenizer()


def reply(prompt: str, candidate: int) -> str:
    """A team that delegates twice at once, searches, reports, selects and answers."""
    if "answerer" in prompt:
        return answer("x" if candidate == 0 else "y")
    if "searcher" in prompt:
        return REPORT if "passage" in prompt else SEARCH
    return "<select> 1 2 </select>" if "report" in prompt else "<task> a </task> <task> b </task>"


class Single(Script):
    """Serves single requests, each after a random pause; counts those open at once."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, reply)
        self.open = self.peak = 0
        self.random = random.Random(0)

    async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.open += 1
        self.peak = max(self.peak, self.open)
        await asyncio.sleep(self.random.random() * 0.002)
        self.open -= 1
        [completions] = self.generate([request])
        return completions

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


class Broken:
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise RetrievalError("index gone")


@pytest.mark.parametrize("workflow", ["cascade", "hierarchy"])
def test_trajectories_equal_those_of_the_lock_step_driver(workflow: str) -> None:
    jobs = [Job(QUESTION, number, seed=number) for number in range(12)]
    setting = team(workflow, TOKENIZER, num_candidates=3)
    single = Single(TOKENIZER)
    ours = run_workflows(jobs, setting, single, OnePassage(), max_live=5)
    lock_step = run_workflows(jobs, setting, Script(TOKENIZER, reply), OnePassage(), max_live=5)
    assert ours == lock_step
    assert [t.group_index for t in ours] == list(range(12))
    assert all(t.retrievals for t in ours)
    assert 2 <= single.peak <= 10  # five live workflows, up to two Searchers each


def test_on_done_sees_every_workflow_once() -> None:
    jobs = [Job(QUESTION, number, seed=number) for number in range(7)]
    seen: list[int] = []
    run_workflows(
        jobs,
        team("cascade", TOKENIZER),
        Single(TOKENIZER),
        OnePassage(),
        max_live=3,
        on_done=lambda job, trajectory: seen.append(job.group_index),
    )
    assert sorted(seen) == list(range(7))


def test_a_failed_retrieval_is_data() -> None:
    [trajectory] = run_workflows(
        [Job(QUESTION, 0, 0)], team("cascade", TOKENIZER), Single(TOKENIZER), Broken()
    )
    assert {retrieval.error for retrieval in trajectory.retrievals} == {"index gone"}


def test_a_fault_of_the_engine_ends_the_batch() -> None:
    class Failing(Single):
        async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]:
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        run_workflows(
            [Job(QUESTION, n, n) for n in range(3)],
            team("cascade", TOKENIZER),
            Failing(TOKENIZER),
            OnePassage(),
        )
