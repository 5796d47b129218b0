"""Scripted traces on real questions: search for the question, report the supporting sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moopd.data.normalize import normalize_answer
from moopd.retrieval.base import Retriever
from moopd.trainers.traces import TraceSequence, play_trace, sequences
from moopd.types import Ask, Passage, Question, Role
from moopd.workflows.rollout import Team

_MAX_SENTENCE = 240


@dataclass
class SupportPlayer:
    """Plays all roles of one workflow from the question's supporting passages."""

    question: Question
    support: Sequence[Passage]
    searched: set[int] = field(default_factory=set)

    def reply(self, ask: Ask) -> str:
        match ask.role:
            case Role.LEADER:
                return "<select>1</select>" if self.searched else self._task()
            case Role.SEARCHER:
                return self._searcher(ask.subtask or 0)
            case _:
                return f"<answer>{self.question.answers[0]}</answer>"

    def saw(self, subtask: int, passages: Sequence[str]) -> None:
        """The script knows its evidence; what came back does not change it."""

    def _task(self) -> str:
        return f"<task>{self.question.text}</task>"

    def _searcher(self, subtask: int) -> str:
        if subtask not in self.searched:
            self.searched.add(subtask)
            return f"<search>{self.question.text.rstrip('?')}</search>"
        return (
            f"<report>Key Findings: {evidence(self.question, self.support)} "
            "Relevance Assessment: answers the sub-question.</report>"
        )


def evidence(question: Question, support: Sequence[Passage]) -> str:
    """The first supporting sentence that holds an answer, else the first sentence there is."""
    sentences = [
        sentence
        for passage in support
        for sentence in re.split(r"(?<=[.!?])\s+", passage.text)
        if sentence
    ]
    golds = [normalize_answer(answer) for answer in question.answers]
    for sentence in sentences:
        if any(gold and gold in normalize_answer(sentence) for gold in golds):
            return sentence[:_MAX_SENTENCE]
    return sentences[0][:_MAX_SENTENCE] if sentences else "nothing found."


def support_sequences(
    questions: Sequence[Question],
    passages: Mapping[str, Passage],
    team: Team,
    retriever: Retriever,
) -> Iterator[TraceSequence]:
    """Traces of one workflow kind for questions with known support."""
    for question in questions:
        support = [passages[i] for i in question.support_ids if i in passages]
        player = SupportPlayer(question, support)
        yield from sequences(play_trace(team, question, player, retriever))
