"""The noisy oracle of the synthetic world: knows the plan, looks facts up, sometimes errs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moopd.config import TraceNoise
from moopd.data.world import Fact, Plan, World
from moopd.retrieval.base import Retriever
from moopd.trainers.traces import (
    Notes,
    TraceSequence,
    critic_sequence,
    play_trace,
    sequences,
    slipped,
)
from moopd.types import Ask, Question, Role, Trajectory
from moopd.workflows.rollout import Team

_NOTHING = "none"


@dataclass
class WorldPlayer:
    """Plays all roles of one workflow about `question`."""

    question: Question
    plan: Plan
    noise: TraceNoise
    rng: random.Random
    others: Sequence[Fact]
    """Facts to err with."""
    cascade: bool
    notes: dict[int, Notes] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    _waves: list[tuple[Fact, ...]] = field(init=False)
    _targets: dict[int, tuple[Fact, ...]] = field(default_factory=dict)
    _next_wave: int = 0

    def __post_init__(self) -> None:
        whole = self.cascade or self._chance(self.noise.passes_whole_question)
        self._waves = [self.plan.facts] if whole else list(self.plan.waves)
        self._whole = whole
        if self.cascade:
            self._targets[0] = self.plan.facts

    def reply(self, ask: Ask) -> str:
        match ask.role:
            case Role.LEADER:
                text = self._leader()
            case Role.SEARCHER:
                text = self._searcher(ask.subtask or 0)
            case _:
                text = self._answerer(ask.messages[-1].content)
        return slipped(text, self.noise, self.rng)

    def saw(self, subtask: int, passages: Sequence[str]) -> None:
        self.notes[subtask].seen.extend(passages)

    def target(self, subtask: int) -> tuple[Fact, ...]:
        """The facts a subtask is about; empty for one that only wastes a search."""
        return self._targets.get(subtask, ())

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -------------------------------------------------------- Leader

    def _leader(self) -> str:
        first = not self._targets
        if first and self._chance(self.noise.answers_directly):
            return "<select> </select>"
        done = self._next_wave >= len(self._waves)
        blocked = self._next_wave > 0 and not self._know(self._waves[self._next_wave - 1])
        if done or blocked:
            return self._select()
        return self._delegate()

    def _delegate(self) -> str:
        wave = self._waves[self._next_wave]
        self._next_wave += 1
        groups: list[tuple[Fact, ...]] = [wave] if self._whole else [(fact,) for fact in wave]
        texts = [self.question.text] if self._whole else [fact.subtask for fact in wave]
        if self._chance(self.noise.extra_task):
            groups.append(())
            texts.append(self.rng.choice(self.others).subtask)
        for group in groups:
            self._targets[len(self._targets)] = group
        return " ".join(f"<task> {text} </task>" for text in texts)

    def _know(self, facts: Sequence[Fact]) -> bool:
        return all(any(fact.sentence in report for report in self.reports) for fact in facts)

    def _select(self) -> str:
        last = self.plan.waves[-1]
        wanted = [
            number
            for number, report in enumerate(self.reports, start=1)
            if any(fact.sentence in report for fact in last)
        ] or list(range(1, len(self.reports) + 1))
        if wanted and self._chance(self.noise.drops_report):
            wanted.remove(self.rng.choice(wanted))
        return f"<select> {' '.join(map(str, wanted))} </select>"

    # -------------------------------------------------------- Searcher

    def _searcher(self, subtask: int) -> str:
        notes = self.notes.setdefault(subtask, Notes())
        missing = self._missing(subtask)
        if not notes.queries and self._chance(self.noise.no_search):
            return self._report(subtask)
        if notes.queries and self._chance(self.noise.repeated_search):
            return self._query(notes, notes.queries[-1])
        if missing and len(notes.queries) < len(self.target(subtask)) + 1:
            return self._query(notes, self._noisy(missing[0]))
        all_found = not missing and len(notes.queries) == len(self.target(subtask))
        if all_found and self._chance(self.noise.one_more_search):
            return self._query(notes, self._other_query(subtask))
        return self._report(subtask)

    def _missing(self, subtask: int) -> list[Fact]:
        seen = self.notes[subtask].seen
        return [fact for fact in self.target(subtask) if fact.sentence not in seen]

    def _noisy(self, fact: Fact) -> str:
        if self._chance(self.noise.query_noise):
            words = fact.query.split()
            words.pop(self.rng.randrange(len(words)))
            return " ".join(words)
        return fact.query

    def _other_query(self, subtask: int) -> str:
        target = self.target(subtask)
        return target[-1].query if target else self.rng.choice(self.others).query

    @staticmethod
    def _query(notes: Notes, text: str) -> str:
        notes.queries.append(text)
        return f"<search> {text} </search>"

    def _report(self, subtask: int) -> str:
        text = self._findings(subtask)
        self.reports.append(text)
        return f"<report> {text} </report>"

    def _findings(self, subtask: int) -> str:
        seen = self.notes[subtask].seen
        if seen and self._chance(self.noise.summary_noise):
            return self.rng.choice(seen)
        target = self.target(subtask)
        wanted = target if len(self.plan.waves) == 1 else target[-1:]
        found = [fact.sentence for fact in wanted if fact.sentence in seen]
        if not found and target:
            found = [fact.sentence for fact in target if fact.sentence in seen][-1:]
        return " and ".join(found) if found else _NOTHING

    # -------------------------------------------------------- Answerer

    def _answerer(self, shown: str) -> str:
        draw = self.rng.random()
        if draw < self.noise.answer_right and self._answerable(shown):
            answer = self.question.answers[0]
        elif draw < self.noise.answer_right + self.noise.answer_wrong:
            answer = self.rng.choice(self.others).value
        else:
            answer = _NOTHING
        return f"<answer> {answer} </answer>"

    def _answerable(self, shown: str) -> bool:
        return all(fact.sentence in shown for fact in self.plan.waves[-1])


def world_sequences(
    world: World, team: Team, noise: TraceNoise, retriever: Retriever, rng: random.Random
) -> Iterator[TraceSequence]:
    """Traces of one workflow kind for every question of a practice world, critic turns included."""
    others = [fact for plan in world.plans.values() for fact in plan.facts]
    for question in world.questions["train"]:
        player = WorldPlayer(
            question, world.plans[question.id], noise, rng, others, team.workflow == "cascade"
        )
        trajectory = play_trace(team, question, player, retriever)
        yield from sequences(trajectory)
        yield from _critic_turns(team, trajectory, player)


def _critic_turns(
    team: Team, trajectory: Trajectory, player: WorldPlayer
) -> Iterator[TraceSequence]:
    for number, report in enumerate(trajectory.reports):
        adequate = is_adequate(report.text, player.target(report.subtask))
        yield critic_sequence(team.renderer, team.prompts, trajectory, number, adequate)


def is_adequate(report: str, target: Sequence[Fact]) -> bool:
    """The world's truth: the report states the last fact that its subtask asks for."""
    return bool(target) and target[-1].sentence in report
