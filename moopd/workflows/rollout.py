"""Drives workflows: renders their Asks, runs the engine and the retriever, keeps every call.

`WorkflowRun` is one workflow with its tokens and no I/O, so that a lock-step driver over many
(`run_workflows`), and an agent loop of a distributed trainer over one, share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moopd.config import SamplingConfig, WorkflowConfig
from moopd.engines.base import ConcurrentEngine, Engine
from moopd.retrieval.base import RetrievalError, Retriever
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import (
    Ask,
    Call,
    Completion,
    GenerateRequest,
    Query,
    Question,
    StopReason,
    Trajectory,
)
from moopd.workflows.base import Reply, RetrievalOutcome, Workflow
from moopd.workflows.cascade import Cascade
from moopd.workflows.hierarchy import Hierarchy

WORKFLOWS: dict[str, type[Workflow]] = {"cascade": Cascade, "hierarchy": Hierarchy}

_MASK64 = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from a path of integers (splitmix64 over the parts); order matters."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK64)) * 0xBF58476D1CE4E5B9 & _MASK64
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True, slots=True)
class Job:
    """One workflow to run. `seed` must differ between the trajectories of a question."""

    question: Question
    group_index: int
    seed: int


@dataclass(frozen=True, slots=True)
class Team:
    """How workflows run: which machine, with which wording, limits and sampling."""

    workflow: Literal["cascade", "hierarchy"]
    config: WorkflowConfig
    prompts: Prompts
    renderer: Renderer
    sampling: SamplingConfig
    num_candidates: int
    top_k: int

    def start(self, job: Job, key: int = 0) -> WorkflowRun:
        machine = WORKFLOWS[self.workflow](
            job.question, self.config, self.prompts, self.num_candidates
        )
        return WorkflowRun(self, job, machine, key)


class _Turn(NamedTuple):
    ask: Ask
    request: GenerateRequest


class WorkflowRun:
    """One workflow and its calls: `requests()` -> `accept()` -> `accept_passages()`."""

    def __init__(self, team: Team, job: Job, machine: Workflow, key: int) -> None:
        self._team = team
        self._job = job
        self._machine = machine
        self._key = key
        self._calls: list[Call] = []
        self._last: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """conversation -> prompt ids and sampled ids of its last turn."""
        self._turns: tuple[_Turn, ...] = ()
        self._queries: tuple[Query, ...] = ()

    @property
    def done(self) -> bool:
        return self._machine.done

    @property
    def queries(self) -> tuple[Query, ...]:
        return self._queries

    @property
    def asks(self) -> tuple[Ask, ...]:
        """The Asks behind the last `requests()`."""
        return tuple(turn.ask for turn in self._turns)

    def requests(self) -> tuple[GenerateRequest, ...]:
        """Engine requests of the current exchange; empty when done, also by a too long prompt."""
        turns = tuple(
            self._turn(ask, len(self._calls) + offset)
            for offset, ask in enumerate(self._machine.pending())
        )
        limit = self._team.config.max_input_tokens
        if any(len(turn.request.prompt_ids) > limit for turn in turns):
            self._machine.abandon(StopReason.CONTEXT)
            return ()
        self._turns = turns
        return tuple(turn.request for turn in turns)

    def accept(self, completions: Sequence[tuple[Completion, ...]]) -> None:
        """Take the completions of `requests()`, in order."""
        replies = [
            [Reply(c.text, cut=c.finish == "length") for c in candidates]
            for candidates in completions
        ]
        delivery = self._machine.deliver(replies)
        for turn, candidates, actions in zip(
            self._turns, completions, delivery.actions, strict=True
        ):
            ask, request = turn
            self._calls.append(
                Call(
                    index=len(self._calls),
                    role=ask.role,
                    conversation=ask.conversation,
                    step=ask.step,
                    subtask=ask.subtask,
                    prompt_ids=request.prompt_ids,
                    completions=candidates,
                    actions=actions,
                    seed=request.seed,
                )
            )
            self._last[ask.conversation] = (request.prompt_ids, candidates[0].token_ids)
        self._queries = delivery.queries

    def accept_passages(self, outcomes: Sequence[RetrievalOutcome]) -> None:
        self._queries = ()
        self._machine.deliver_passages(outcomes)

    def abandon(self, reason: StopReason) -> None:
        """End the workflow from outside, for example when the engine is gone."""
        self._machine.abandon(reason)

    def trajectory(self) -> Trajectory:
        return self._machine.trajectory(self._job.group_index, self._calls)

    def _turn(self, ask: Ask, call_index: int) -> _Turn:
        renderer = self._team.renderer
        if ask.conversation in self._last:
            prompt_ids = renderer.extend(*self._last[ask.conversation], ask.messages)
        else:
            prompt_ids = renderer.start(ask.messages)
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            num_candidates=ask.num_candidates,
            max_tokens=self._team.config.max_output_tokens,
            temperature=self._team.sampling.temperature,
            top_p=self._team.sampling.top_p,
            seed=derive_seed(self._job.seed, call_index),
            conversation_key=(self._key, ask.conversation),
        )
        return _Turn(ask, request)


def run_workflows(
    jobs: Iterable[Job],
    team: Team,
    engine: Engine,
    retriever: Retriever,
    max_live: int = 256,
    on_done: Callable[[Job, Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Run all jobs in lock-step, at most `max_live` at once; trajectories in the jobs' order.

    An engine that serves single requests is driven without the steps. `on_done` sees each
    workflow as it ends (order of ending). Engine errors propagate.
    """
    if isinstance(engine, ConcurrentEngine):
        from moopd.workflows.concurrent import run_concurrently

        return run_concurrently(jobs, team, engine, retriever, max_live, on_done)
    waiting = enumerate(jobs)
    finished: dict[int, Trajectory] = {}
    live: dict[int, tuple[Job, WorkflowRun]] = {}
    exhausted = False
    while True:
        while not exhausted and len(live) < max_live:
            number, job = next(waiting, (-1, None))
            if job is None:
                exhausted = True
            else:
                live[number] = (job, team.start(job, number))
        if not live:
            break
        _exchange([run for _, run in live.values()], engine, retriever, team.top_k)
        for number in [n for n, (_, run) in live.items() if run.done]:
            job, run = live.pop(number)
            finished[number] = run.trajectory()
            if on_done is not None:
                on_done(job, finished[number])
    engine.end_conversations()
    return [finished[number] for number in sorted(finished)]


def _exchange(
    runs: Sequence[WorkflowRun], engine: Engine, retriever: Retriever, top_k: int
) -> None:
    """One turn of every live workflow: one engine call, then one retrieval."""
    requests = [run.requests() for run in runs]
    flat = [request for of_run in requests for request in of_run]
    if flat:
        completions = iter(engine.generate(flat))
        for run, of_run in zip(runs, requests, strict=True):
            if of_run:
                run.accept([next(completions) for _ in of_run])
    searching = [run for run in runs if run.queries]
    outcomes = iter(retrieve(retriever, [q for run in searching for q in run.queries], top_k))
    for run in searching:
        run.accept_passages([next(outcomes) for _ in run.queries])


def retrieve(retriever: Retriever, queries: Sequence[Query], top_k: int) -> list[RetrievalOutcome]:
    """One retrieval for all queries, equal ones once; a failure is an outcome of each."""
    if not queries:
        return []
    texts = list(dict.fromkeys(query.text for query in queries))
    try:
        found = dict(zip(texts, retriever.search(texts, top_k), strict=True))
    except RetrievalError as error:
        return [RetrievalOutcome(error=str(error)) for _ in queries]
    return [RetrievalOutcome(tuple(found[query.text])) for query in queries]
