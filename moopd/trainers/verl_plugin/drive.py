"""Drives one workflow with asynchronous calls; what fails in the engine ends as data.

The lock-step driver of the torch trainer and this one share `WorkflowRun`: same machines, same
prompts, same records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from moopd.retrieval.base import RetrievalError, Retriever
from moopd.types import Completion, GenerateRequest, Passage, StopReason, Trajectory
from moopd.workflows.base import RetrievalOutcome
from moopd.workflows.rollout import Job, Team, WorkflowRun

Generate = Callable[[GenerateRequest, int], Awaitable[Completion]]
"""(request, candidate) -> one completion of it."""


@dataclass(frozen=True, slots=True)
class Driven:
    """A finished workflow. `error` is set when the engine, not the policy, ended it."""

    trajectory: Trajectory
    error: str | None = None


async def drive(job: Job, team: Team, generate: Generate, retriever: Retriever) -> Driven:
    """Run one workflow to its end. Never raises for what engine or retriever do."""
    run = team.start(job)
    try:
        while not run.done:
            await _exchange(run, generate, retriever, team.top_k)
    except Exception as error:
        # Whatever the engine raises must reach the trainer as data: an exception here would
        # leave a group without one of its workflows.
        run.abandon(StopReason.CONTEXT)
        return Driven(run.trajectory(), f"{type(error).__name__}: {error}")
    return Driven(run.trajectory())


async def _exchange(run: WorkflowRun, generate: Generate, retriever: Retriever, top_k: int) -> None:
    requests = run.requests()
    if requests:
        completions = await asyncio.gather(*(_candidates(generate, r) for r in requests))
        run.accept(completions)
    if run.queries:
        texts = [query.text for query in run.queries]
        run.accept_passages(await asyncio.to_thread(_retrieve, retriever, texts, top_k))


async def _candidates(generate: Generate, request: GenerateRequest) -> tuple[Completion, ...]:
    """The candidates of a request are concurrent calls: rollout servers take one each."""
    return tuple(
        await asyncio.gather(*(generate(request, n) for n in range(request.num_candidates)))
    )


def _retrieve(retriever: Retriever, texts: Sequence[str], top_k: int) -> list[RetrievalOutcome]:
    try:
        found: list[list[Passage]] = retriever.search(texts, top_k)
    except RetrievalError as error:
        return [RetrievalOutcome(error=str(error)) for _ in texts]
    return [RetrievalOutcome(tuple(passages)) for passages in found]
