"""H-MAS (section 3.1): a Leader delegates rounds of subtasks to Searchers, then picks reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from moopd.types import (
    Action,
    Ask,
    Delegate,
    FormatError,
    FormatErrorKind,
    Message,
    Query,
    Role,
    SelectReports,
    StopReason,
)
from moopd.workflows.base import Delivery, Reply, Workflow


class _Turn(Enum):
    LEADER = auto()
    SEARCHERS = auto()
    ANSWERER = auto()


@dataclass
class Hierarchy(Workflow):
    """At most `hierarchy_steps` environment steps and `leader_rounds` delegating rounds.

    A malformed Leader turn and a dispatch beyond the last round send all reports so far to the
    Answerer. Of one dispatch at most `max_subtasks_per_round` subtasks are taken, the first ones.
    """

    def __post_init__(self) -> None:
        self.kind = "hierarchy"
        self.max_steps = self.config.hierarchy_steps
        self._turn = _Turn.LEADER
        self._round = 0
        self._leader = self._new_conversation()
        self._answerer = self._new_conversation()
        self._leader_messages: tuple[Message, ...] = self.prompts.leader(self.question.text)

    @property
    def num_rounds(self) -> int:
        return self._round

    def pending(self) -> tuple[Ask, ...]:
        if self.done or self._queries:
            return ()
        match self._turn:
            case _Turn.LEADER:
                self._asked = (Ask(Role.LEADER, self._leader, self._leader_messages, 1, self.step),)
                return self._asked
            case _Turn.SEARCHERS:
                return self._ask_searchers()
            case _Turn.ANSWERER:
                return self._ask_answerer(self._answerer)

    def deliver(self, replies: Sequence[Sequence[Reply]]) -> Delivery:
        actions = self._parsed(replies)
        queries: tuple[Query, ...] = ()
        match self._turn:
            case _Turn.LEADER:
                actions = ((self._take_leader_action(actions[0][0]),),)
            case _Turn.SEARCHERS:
                queries = self._take_searchers_turn(actions)
            case _Turn.ANSWERER:
                self.stop = StopReason.ANSWERED
        return Delivery(actions, queries)

    def _take_leader_action(self, action: Action) -> Action:
        if isinstance(action, Delegate) and self._round >= self.config.leader_rounds:
            action = FormatError(FormatErrorKind.ROUND_LIMIT)
        match action:
            case Delegate(subtasks):
                self._round += 1
                for text in subtasks[: self.config.max_subtasks_per_round]:
                    self._start_searcher(text, self._round)
                self._turn = _Turn.SEARCHERS
            case SelectReports(ids):
                known = tuple(n for n in ids if 1 <= n <= len(self.reports))
                self.num_unknown_report_ids += len(ids) - len(known)
                self.selected = known
                self._turn = _Turn.ANSWERER
            case _:
                self.selected = tuple(report.id for report in self.reports)
                self._turn = _Turn.ANSWERER
        return action

    def _take_searchers_turn(self, actions: Sequence[tuple[Action, ...]]) -> tuple[Query, ...]:
        queries = self._take_searcher_actions(actions)
        if not any(searcher.live for searcher in self.searchers):
            self._leader_messages = (self._round_reports(),)
            self._turn = _Turn.LEADER
        if not queries:
            self._end_pass()
        return queries

    def _round_reports(self) -> Message:
        outcomes = [
            (searcher.subtask.text, searcher.report)
            for searcher in self.searchers
            if searcher.subtask.round == self._round
        ]
        return self.prompts.reports(outcomes, last_round=self._round >= self.config.leader_rounds)
