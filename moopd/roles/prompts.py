"""The wording of every role, in two styles: `chat` for instruct models, `compact` for the tiny one.

Written for this project after the description in appendix C of arXiv 2610.23234; the paper's own
templates are not used. Text from outside is neutralised here, on its way into a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Literal

from moopd.roles.parsing import neutralise
from moopd.types import Message, Passage, Report, Role


@dataclass(frozen=True, slots=True)
class Wording:
    """Templates of one style. Fields in braces are filled with neutralised text."""

    system: dict[Role, str]
    leader: str
    searcher: str
    answerer: str
    critic: str
    passage: str
    no_passages: str
    retrieval_failed: str
    report: str
    no_report: str
    no_reports_at_all: str
    last_round: str
    searcher_malformed: str
    joiner: str


_CHAT = Wording(
    system={
        Role.LEADER: (
            "You lead a team that answers a question with the help of search agents. Work out which "
            "facts are missing and hand each one out as a short, self-contained sub-question; do not "
            "ask for anything twice. Put every sub-question in its own tag; several at once run in "
            "parallel:\n<task>sub-question</task>\n"
            "The agents' reports come back with numbers. When they hold the facts needed, or no more "
            "can be found, pass the numbers of the useful reports to the answerer:\n"
            "<select>1, 2</select>\nAnswer each turn with tasks or with one selection, nothing else."
        ),
        Role.SEARCHER: (
            "You are a search agent with one sub-question. Take exactly one action per turn. Either "
            "send one specific query that closes a gap in what you know:\n<search>query</search>\n"
            "or, once the passages suffice, hand in a report:\n"
            "<report>Key Findings: the facts found. Relevance Assessment: how well they settle the "
            "sub-question.</report>\nWrite nothing outside the tag."
        ),
        Role.ANSWERER: (
            "You answer the question from the reports below and from what you know yourself. Give "
            "the shortest exact answer, a bare name, date, number or phrase, inside the tag:\n"
            "<answer>answer</answer>"
        ),
        Role.CRITIC: (
            "You review one search report. Weigh whether it is relevant to the sub-question, "
            "complete, accurate with respect to the passages, and useful for the question. Reply "
            "with 1 if it is adequate and 0 if it is not, and a short hint how to improve it:\n"
            "<score>1</score><hint>hint</hint>"
        ),
    },
    leader="Question: {question}",
    searcher="Question: {question}\nSub-question: {subtask}",
    answerer="Question: {question}\nReports:\n{reports}",
    critic="Question: {question}\nSub-question: {subtask}\nPassages:\n{passages}\nReport: {report}",
    passage="[{number}] {title}: {text}",
    no_passages="The search found no passages.",
    retrieval_failed="The search engine failed; no result for this query.",
    report="Report {number} on {subtask}: {text}",
    no_report="No report on {subtask}.",
    no_reports_at_all="(none)",
    last_round="All rounds are used: select reports now.",
    searcher_malformed="That was not exactly one <search> or <report> action. Take one now.",
    joiner="\n",
)

_COMPACT = Wording(
    system={},
    leader="leader question {question}",
    searcher="searcher question {question} subtask {subtask}",
    answerer="answerer question {question} {reports}",
    critic="critic question {question} subtask {subtask} {passages} report {report}",
    passage="passage {text}",
    no_passages="nothing found",
    retrieval_failed="search failed",
    report="report {number} {text}",
    no_report="no report",
    no_reports_at_all="no report",
    last_round="last round",
    searcher_malformed="malformed",
    joiner=" ",
)

WORDINGS: dict[str, Wording] = {"chat": _CHAT, "compact": _COMPACT}


def compact_words() -> tuple[str, ...]:
    """Every word the compact style adds to a prompt: part of the tiny vocabulary."""
    texts = [
        value for name in Wording.__slots__ if isinstance(value := getattr(_COMPACT, name), str)
    ]
    literals = [literal for text in texts for literal, *_ in Formatter().parse(text)]
    return tuple(sorted({word for literal in literals for word in literal.split()}))


class Prompts:
    """Messages of each role in one style."""

    def __init__(
        self, style: Literal["chat", "compact"] = "chat", max_passage_words: int = 200
    ) -> None:
        self._wording = WORDINGS[style]
        self._max_passage_words = max_passage_words

    def leader(self, question: str) -> tuple[Message, ...]:
        return self._open(Role.LEADER, self._wording.leader, question=question)

    def searcher(self, question: str, subtask: str) -> tuple[Message, ...]:
        return self._open(Role.SEARCHER, self._wording.searcher, question=question, subtask=subtask)

    def answerer(
        self, question: str, reports: Sequence[Report], subtasks: Sequence[str]
    ) -> tuple[Message, ...]:
        """`subtasks[k]` is the sub-question of `reports[k]`."""
        listed = self._wording.joiner.join(
            self._report(report, subtask) for report, subtask in zip(reports, subtasks, strict=True)
        )
        blocks = {"reports": listed or self._wording.no_reports_at_all}
        return self._with_system(
            Role.ANSWERER, self._fill(self._wording.answerer, blocks, question=question)
        )

    def critic(
        self, question: str, subtask: str, report: str, passages: Sequence[Passage]
    ) -> tuple[Message, ...]:
        blocks = {"passages": self._passages(passages)}
        text = self._fill(
            self._wording.critic, blocks, question=question, subtask=subtask, report=report
        )
        return self._with_system(Role.CRITIC, text)

    def passages(self, passages: Sequence[Passage]) -> Message:
        """What the Searcher sees of one retrieval."""
        return Message("user", self._passages(passages))

    def retrieval_failed(self) -> Message:
        return Message("user", self._wording.retrieval_failed)

    def searcher_malformed(self) -> Message:
        return Message("user", self._wording.searcher_malformed)

    def reports(self, outcomes: Sequence[tuple[str, Report | None]], last_round: bool) -> Message:
        """What the Leader sees of a round: (sub-question, its report or None)."""
        lines = [
            self._report(report, subtask)
            if report is not None
            else self._fill(self._wording.no_report, subtask=subtask)
            for subtask, report in outcomes
        ]
        if last_round:
            lines.append(self._wording.last_round)
        return Message("user", self._wording.joiner.join(lines))

    def num_cut(self, passages: Sequence[Passage]) -> int:
        """How many of `passages` are shown shortened."""
        return sum(len(p.text.split()) > self._max_passage_words for p in passages)

    def _report(self, report: Report, subtask: str) -> str:
        return self._fill(
            self._wording.report, number=str(report.id), text=report.text, subtask=subtask
        )

    def _passages(self, passages: Sequence[Passage]) -> str:
        shown = [
            self._fill(
                self._wording.passage,
                number=str(number),
                title=passage.title,
                text=self._shortened(passage.text),
            )
            for number, passage in enumerate(passages, start=1)
        ]
        return self._wording.joiner.join(shown) if shown else self._wording.no_passages

    def _shortened(self, text: str) -> str:
        words = text.split()
        if len(words) <= self._max_passage_words:
            return text
        return " ".join(words[: self._max_passage_words]) + " ..."

    def _open(self, role: Role, template: str, **fields: str) -> tuple[Message, ...]:
        return self._with_system(role, self._fill(template, None, **fields))

    def _with_system(self, role: Role, text: str) -> tuple[Message, ...]:
        system = self._wording.system.get(role)
        opening = (Message("system", system),) if system else ()
        return (*opening, Message("user", text))

    @staticmethod
    def _fill(template: str, blocks: Mapping[str, str] | None = None, **fields: str) -> str:
        """Fill every brace once: `fields` are text from outside, `blocks` were built here."""
        values = {name: neutralise(text) for name, text in fields.items()} | dict(blocks or {})
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], template)
