"""C-MAS (section 3.2): one Searcher on the original question, then the Answerer on its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moopd.types import Ask, Report, StopReason
from moopd.workflows.base import Delivery, Reply, Workflow


@dataclass
class Cascade(Workflow):
    """At most `cascade_steps` environment steps; the sub-question is the question itself."""

    def __post_init__(self) -> None:
        self.kind = "cascade"
        self.max_steps = self.config.cascade_steps
        self._start_searcher(self.question.text, round_number=1)
        self._answerer = self._new_conversation()

    @property
    def _handed_in(self) -> Report | None:
        return self.searchers[0].report

    def pending(self) -> tuple[Ask, ...]:
        if self.done or self._queries:
            return ()
        if self._handed_in is None:
            return self._ask_searchers()
        self.selected = (self._handed_in.id,)
        return self._ask_answerer(self._answerer)

    def deliver(self, replies: Sequence[Sequence[Reply]]) -> Delivery:
        actions = self._parsed(replies)
        if self._handed_in is not None:
            self.stop = StopReason.ANSWERED
            return Delivery(actions, ())
        queries = self._take_searcher_actions(actions)
        # A report goes to the Answerer in the same pass; a malformed turn spends its pass.
        if not queries and self._handed_in is None:
            self._end_pass()
        return Delivery(actions, queries)
