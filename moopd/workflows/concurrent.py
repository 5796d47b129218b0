"""Drives many workflows against an engine that serves single requests: no step has a slowest.

The trajectories are those of the lock-step driver: a request's tokens depend on its prompt and
seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from moopd.engines.base import ConcurrentEngine
from moopd.retrieval.base import Retriever
from moopd.types import Query, Trajectory
from moopd.workflows.base import RetrievalOutcome
from moopd.workflows.rollout import Job, Team, WorkflowRun, retrieve

OnDone = Callable[[Job, Trajectory], None]


def run_concurrently(
    jobs: Iterable[Job],
    team: Team,
    engine: ConcurrentEngine,
    retriever: Retriever,
    max_live: int,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Run all jobs, at most `max_live` at once; trajectories in the jobs' order."""
    trajectories = engine.run(_run_all(jobs, team, engine, retriever, max_live, on_done))
    engine.end_conversations()
    return trajectories


async def _run_all(
    jobs: Iterable[Job],
    team: Team,
    engine: ConcurrentEngine,
    retriever: Retriever,
    max_live: int,
    on_done: OnDone | None,
) -> list[Trajectory]:
    waiting = enumerate(jobs)
    finished: dict[int, Trajectory] = {}
    searches = SearchQueue(retriever, team.top_k)

    async def work(waiting: Iterator[tuple[int, Job]]) -> None:
        for number, job in waiting:
            finished[number] = await drive(team.start(job, number), engine, searches)
            if on_done is not None:
                on_done(job, finished[number])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_live):
                group.create_task(work(waiting))
    except BaseExceptionGroup as group_of_errors:
        # The rest was cancelled because of the first: that is the cause to name.
        raise group_of_errors.exceptions[0] from group_of_errors
    return [finished[number] for number in sorted(finished)]


async def drive(run: WorkflowRun, engine: ConcurrentEngine, searches: SearchQueue) -> Trajectory:
    """One workflow to its end."""
    while not run.done:
        requests = run.requests()
        if requests:
            replies = await asyncio.gather(*(engine.complete(request) for request in requests))
            run.accept(replies)
        if run.queries:
            run.accept_passages(await searches.search(run.queries))
    return run.trajectory()


class SearchQueue:
    """Gathers the queries that wait while the retriever is busy into its next batch."""

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self._retriever = retriever
        self._top_k = top_k
        self._waiting: list[tuple[Sequence[Query], asyncio.Future[list[RetrievalOutcome]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def search(self, queries: Sequence[Query]) -> list[RetrievalOutcome]:
        answer: asyncio.Future[list[RetrievalOutcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            queries = [query for wanted, _ in batch for query in wanted]
            try:
                # In a thread of its own, so that generation goes on meanwhile.
                found = await asyncio.to_thread(retrieve, self._retriever, queries, self._top_k)
            except Exception as error:
                for _, answer in batch:
                    answer.set_exception(error)
                continue
            outcomes = iter(found)
            for wanted, answer in batch:
                if not answer.cancelled():
                    answer.set_result([next(outcomes) for _ in wanted])
