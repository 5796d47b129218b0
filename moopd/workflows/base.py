"""What every workflow machine does. Machines hold strings only: no tokens, no I/O, no clock.

An environment step is one pass over the team: Leader (if it is its turn), then the live Searchers,
then the Answerer (if it is called), then one retrieval for all queries of the pass. Within a pass
each role takes its turn in one exchange: `pending()` -> `deliver()`; a pass with queries ends with
`deliver_passages()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moopd.config import WorkflowConfig
from moopd.roles.parsing import parse
from moopd.roles.prompts import Prompts
from moopd.types import (
    Action,
    Ask,
    Call,
    FormatError,
    Message,
    Passage,
    Query,
    Question,
    Report,
    Retrieval,
    Role,
    Search,
    StopReason,
    Subtask,
    Trajectory,
    WriteReport,
)


class Reply(NamedTuple):
    """Text of one completion; `cut` when the token limit ended it."""

    text: str
    cut: bool = False


class RetrievalOutcome(NamedTuple):
    """Passages of one query, or the reason why the retriever failed."""

    passages: tuple[Passage, ...] = ()
    error: str | None = None


class Delivery(NamedTuple):
    """Actions per Ask and candidate, as the machine took them, and the queries to run now."""

    actions: tuple[tuple[Action, ...], ...]
    queries: tuple[Query, ...]


@dataclass(slots=True)
class SearcherState:
    """One live or finished Searcher: the conversation of one subtask."""

    conversation: int
    subtask: Subtask
    messages: tuple[Message, ...]
    report: Report | None = None

    @property
    def live(self) -> bool:
        return self.report is None


@dataclass
class Workflow:
    """State shared by all workflows; subclasses say whose turn it is.

    `num_candidates` is asked of the Answerer (5 in training, 1 in evaluation); others get 1.
    """

    question: Question
    config: WorkflowConfig
    prompts: Prompts
    num_candidates: int = 1
    kind: Literal["cascade", "hierarchy"] = field(init=False)
    max_steps: int = field(init=False)
    step: int = field(init=False, default=1)
    num_tool_steps: int = field(init=False, default=0)
    num_cut_passages: int = field(init=False, default=0)
    num_unknown_report_ids: int = field(init=False, default=0)
    stop: StopReason | None = field(init=False, default=None)
    subtasks: list[Subtask] = field(init=False, default_factory=list)
    searchers: list[SearcherState] = field(init=False, default_factory=list)
    retrievals: list[Retrieval] = field(init=False, default_factory=list)
    reports: list[Report] = field(init=False, default_factory=list)
    selected: tuple[int, ...] = field(init=False, default=())
    _asked: tuple[Ask, ...] = field(init=False, default=())
    _queries: tuple[Query, ...] = field(init=False, default=())
    _num_conversations: int = field(init=False, default=0)

    @property
    def done(self) -> bool:
        return self.stop is not None

    @property
    def num_rounds(self) -> int:
        return 0

    def pending(self) -> tuple[Ask, ...]:
        """The Asks of the current exchange; empty when done or waiting for passages."""
        raise NotImplementedError

    def deliver(self, replies: Sequence[Sequence[Reply]]) -> Delivery:
        """Take one reply per candidate of every pending Ask, in their order."""
        raise NotImplementedError

    def deliver_passages(self, outcomes: Sequence[RetrievalOutcome]) -> None:
        """Take what the retriever gave for the queries of the last delivery; ends the pass."""
        shown: dict[int, list[Message]] = {}
        for query, outcome in zip(self._queries, outcomes, strict=True):
            self.retrievals.append(
                Retrieval(self.step, query.subtask, query.text, outcome.passages, outcome.error)
            )
            self.num_cut_passages += self.prompts.num_cut(outcome.passages)
            message = (
                self.prompts.passages(outcome.passages)
                if outcome.error is None
                else self.prompts.retrieval_failed()
            )
            shown.setdefault(query.conversation, []).append(message)
        for searcher in self.searchers:
            if searcher.conversation in shown:
                searcher.messages = tuple(shown[searcher.conversation])
        self._queries = ()
        self._end_pass()

    def abandon(self, reason: StopReason) -> None:
        """End the workflow from outside (a prompt over the input limit)."""
        self.stop = reason

    def trajectory(self, group_index: int, calls: Sequence[Call]) -> Trajectory:
        if self.stop is None:
            raise ValueError(f"workflow of question {self.question.id} is still running")
        return Trajectory(
            question=self.question,
            group_index=group_index,
            workflow=self.kind,
            calls=tuple(calls),
            subtasks=tuple(self.subtasks),
            retrievals=tuple(self.retrievals),
            reports=tuple(self.reports),
            selected=self.selected,
            stop=self.stop,
            num_steps=self.step,
            num_tool_steps=self.num_tool_steps,
            num_rounds=self.num_rounds,
            num_unknown_report_ids=self.num_unknown_report_ids,
            num_cut_passages=self.num_cut_passages,
        )

    def _new_conversation(self) -> int:
        self._num_conversations += 1
        return self._num_conversations - 1

    def _start_searcher(self, text: str, round_number: int) -> None:
        subtask = Subtask(len(self.subtasks), round_number, text)
        self.subtasks.append(subtask)
        messages = self.prompts.searcher(self.question.text, text)
        self.searchers.append(SearcherState(self._new_conversation(), subtask, messages))

    def _ask_searchers(self) -> tuple[Ask, ...]:
        self._asked = tuple(
            Ask(Role.SEARCHER, s.conversation, s.messages, 1, self.step, s.subtask.id)
            for s in self.searchers
            if s.live
        )
        return self._asked

    def _ask_answerer(self, conversation: int) -> tuple[Ask, ...]:
        reports = [self._report(number) for number in self.selected]
        messages = self.prompts.answerer(
            self.question.text, reports, [self.subtasks[r.subtask].text for r in reports]
        )
        self._asked = (Ask(Role.ANSWERER, conversation, messages, self.num_candidates, self.step),)
        return self._asked

    def _report(self, number: int) -> Report:
        return self.reports[number - 1]

    def _parsed(self, replies: Sequence[Sequence[Reply]]) -> tuple[tuple[Action, ...], ...]:
        if len(replies) != len(self._asked):
            raise ValueError(f"got {len(replies)} replies for {len(self._asked)} asks")
        return tuple(
            tuple(parse(ask.role, reply.text, cut=reply.cut) for reply in candidates)
            for ask, candidates in zip(self._asked, replies, strict=True)
        )

    def _take_searcher_actions(self, actions: Sequence[tuple[Action, ...]]) -> tuple[Query, ...]:
        """Apply the live Searchers' turns; returns their queries (may be empty)."""
        queries = []
        for ask, (action,) in zip(self._asked, actions, strict=True):
            searcher = next(s for s in self.searchers if s.conversation == ask.conversation)
            match action:
                case Search(text):
                    queries.append(Query(searcher.conversation, searcher.subtask.id, text))
                case WriteReport(text):
                    report = Report(len(self.reports) + 1, searcher.subtask.id, text)
                    self.reports.append(report)
                    searcher.report = report
                case FormatError():
                    searcher.messages = (self.prompts.searcher_malformed(),)
        self._queries = tuple(queries)
        self.num_tool_steps += bool(queries)
        return self._queries

    def _end_pass(self) -> None:
        if self.step >= self.max_steps:
            self.stop = StopReason.STEP_BUDGET
        else:
            self.step += 1
