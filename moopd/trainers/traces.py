"""Scripted traces for the warm start: a noisy oracle plays the real workflows with real retrieval.

Because the real machines ask and the real renderer encodes, traces have the right format by
construction. Noise (config.TraceNoise) keeps the base mediocre, so that there is much to learn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moopd.config import TraceNoise
from moopd.retrieval.base import Retriever
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import Ask, Completion, Question, Trajectory
from moopd.workflows.base import RetrievalOutcome
from moopd.workflows.rollout import Job, Team, WorkflowRun


@dataclass(frozen=True, slots=True)
class TraceSequence:
    """One conversation: `ids` (T,), and which of them the policy generates."""

    ids: tuple[int, ...]
    generated: tuple[bool, ...]


class Player(Protocol):
    """Says what each role writes in one workflow."""

    def reply(self, ask: Ask) -> str: ...

    def saw(self, subtask: int, passages: Sequence[str]) -> None:
        """The passages that a search of this subtask brought."""
        ...


def play_trace(team: Team, question: Question, player: Player, retriever: Retriever) -> Trajectory:
    """Run one workflow whose every turn `player` writes."""
    run = team.start(Job(question, 0, 0))
    while not run.done:
        if run.requests():
            run.accept([(_completion(team.renderer, player.reply(ask)),) for ask in run.asks])
        if run.queries:
            _search(run, team, player, retriever)
    return run.trajectory()


def sequences(trajectory: Trajectory) -> Iterator[TraceSequence]:
    """One sequence per conversation, every generated turn of it marked."""
    turns: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for call in trajectory.calls:
        turn = (call.prompt_ids, call.completions[0].token_ids)
        turns.setdefault(call.conversation, []).append(turn)
    for of_conversation in turns.values():
        last_prompt, last_tokens = of_conversation[-1]
        ids = (*last_prompt, *last_tokens)
        generated = [False] * len(ids)
        for prompt, tokens in of_conversation:
            generated[len(prompt) : len(prompt) + len(tokens)] = [True] * len(tokens)
        yield TraceSequence(ids, tuple(generated))


def critic_sequence(
    renderer: Renderer, prompts: Prompts, trajectory: Trajectory, report: int, adequate: bool
) -> TraceSequence:
    """The judge's view of one report (by index) with the true verdict."""
    written = trajectory.reports[report]
    passages = [
        passage
        for retrieval in trajectory.retrievals
        if retrieval.subtask == written.subtask
        for passage in retrieval.passages
    ]
    prompt = renderer.start(
        prompts.critic(
            trajectory.question.text,
            trajectory.subtasks[written.subtask].text,
            written.text,
            passages,
        )
    )
    verdict = "<score> 1 </score>" if adequate else "<score> 0 </score>"
    tokens = _completion(renderer, verdict).token_ids
    return TraceSequence((*prompt, *tokens), (False,) * len(prompt) + (True,) * len(tokens))


def _search(run: WorkflowRun, team: Team, player: Player, retriever: Retriever) -> None:
    queries = run.queries
    found = retriever.search([query.text for query in queries], team.top_k)
    for query, passages in zip(queries, found, strict=True):
        player.saw(query.subtask, [passage.text for passage in passages])
    run.accept_passages([RetrievalOutcome(tuple(passages)) for passages in found])


def _completion(renderer: Renderer, text: str) -> Completion:
    ids = (*renderer.encode(text), renderer.eos_token_id)
    return Completion(ids, (0.0,) * len(ids), text, "stop")


def slipped(text: str, noise: TraceNoise, rng: random.Random) -> str:
    """Now and then the closing tag is lost."""
    return text.rsplit("<", 1)[0].strip() if rng.random() < noise.format_slip else text


@dataclass
class Notes:
    """What a player knows of one subtask: passages seen, searches made."""

    seen: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
