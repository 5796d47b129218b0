"""Text -> typed action, one parser per role. Only what the policy generated is ever parsed.

Rules: tags are lower case and exact; closed `<think>` blocks are dropped first; text around an
action is ignored; Leader and Searcher take one kind of action a turn; the Answerer's last complete
tag counts (text between the last closing tag and the opening tag nearest before it).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from moopd.types import (
    Action,
    Delegate,
    FormatError,
    FormatErrorKind,
    GiveAnswer,
    Judgement,
    Role,
    Search,
    SelectReports,
    WriteReport,
)

ACTION_TAGS: dict[Role, tuple[str, ...]] = {
    Role.LEADER: ("task", "select"),
    Role.SEARCHER: ("search", "report"),
    Role.ANSWERER: ("answer",),
    Role.CRITIC: ("score", "hint"),
}
ALL_TAGS = (*(tag for tags in ACTION_TAGS.values() for tag in tags), "think")

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(rf"<(/?)({'|'.join(ALL_TAGS)})>")
_ANY_CASE_TAG = re.compile(rf"<(/?(?:{'|'.join(ALL_TAGS)}))>", re.IGNORECASE)


def neutralise(text: str) -> str:
    """Replace the brackets of our own tags in text from outside, so that it cannot act.

    Applied to questions, passages, subtasks and reports before they enter a prompt.
    """
    return _ANY_CASE_TAG.sub(r"‹\1›", text)


def parse(role: Role, text: str, *, cut: bool = False) -> Action:
    """The action in one completion of `role`; `cut` says that the token limit ended it."""
    action = _PARSERS[role](text)
    if cut and isinstance(action, FormatError):
        return FormatError(FormatErrorKind.CUT)
    return action


def parse_leader(text: str) -> Delegate | SelectReports | FormatError:
    found = _only_pairs(text, Role.LEADER)
    if isinstance(found, FormatError):
        return found
    kinds = {tag for tag, _ in found}
    if len(kinds) > 1 or (kinds == {"select"} and len(found) > 1):
        return FormatError(FormatErrorKind.SEVERAL_ACTIONS)
    if kinds == {"select"}:
        return _selection(found[0][1])
    subtasks = tuple(content for _, content in found)
    return Delegate(subtasks) if all(subtasks) else FormatError(FormatErrorKind.EMPTY)


def parse_searcher(text: str) -> Search | WriteReport | FormatError:
    found = _only_pairs(text, Role.SEARCHER)
    if isinstance(found, FormatError):
        return found
    if len(found) > 1:
        return FormatError(FormatErrorKind.SEVERAL_ACTIONS)
    tag, content = found[0]
    if not content:
        return FormatError(FormatErrorKind.EMPTY)
    return Search(content) if tag == "search" else WriteReport(content)


def parse_answerer(text: str) -> GiveAnswer | FormatError:
    """The last complete answer tag. Also the strict scorer's extraction."""
    text = _THINK.sub("", text)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        opened = "<answer>" in text
        return FormatError(FormatErrorKind.UNCLOSED if opened else FormatErrorKind.NO_ACTION)
    # A second closing tag belongs to an outer answer: its text after the inner one is no answer.
    content = text[start + len("<answer>") : end].split("</answer>")[0].strip()
    return GiveAnswer(content) if content else FormatError(FormatErrorKind.EMPTY)


def parse_critic(text: str) -> Judgement | FormatError:
    found = _only_pairs(text, Role.CRITIC)
    if isinstance(found, FormatError):
        return found
    scores = [content for tag, content in found if tag == "score"]
    hints = [content for tag, content in found if tag == "hint"]
    if len(scores) != 1 or len(hints) > 1:
        return FormatError(FormatErrorKind.SEVERAL_ACTIONS if scores else FormatErrorKind.NO_ACTION)
    if scores[0] not in ("0", "1"):
        return FormatError(FormatErrorKind.EMPTY)
    return Judgement(int(scores[0]), hints[0] if hints else "")


_PARSERS: dict[Role, Callable[[str], Action]] = {
    Role.LEADER: parse_leader,
    Role.SEARCHER: parse_searcher,
    Role.ANSWERER: parse_answerer,
    Role.CRITIC: parse_critic,
}


def _selection(content: str) -> SelectReports | FormatError:
    if content in ("", "none"):
        return SelectReports(())
    if not re.fullmatch(r"\d{1,6}(?:[\s,]+\d{1,6})*", content):
        return FormatError(FormatErrorKind.EMPTY)
    return SelectReports(tuple(dict.fromkeys(int(n) for n in re.findall(r"\d+", content))))


def _only_pairs(text: str, role: Role) -> list[tuple[str, str]] | FormatError:
    """(tag, content) of every action of `role`, in order; an error for anything else in tags."""
    text = _THINK.sub("", text)
    pairs: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        closing, name = tag.groups()
        if name not in ACTION_TAGS[role]:
            unclosed = name == "think"
            return FormatError(FormatErrorKind.UNCLOSED if unclosed else FormatErrorKind.WRONG_ROLE)
        if opened is None and not closing:
            opened = tag
        elif opened is not None and closing and name == opened.group(2):
            pairs.append((name, text[opened.end() : tag.start()].strip()))
            opened = None
        else:
            return FormatError(FormatErrorKind.UNCLOSED)
    if opened is not None:
        return FormatError(FormatErrorKind.UNCLOSED)
    return pairs or FormatError(FormatErrorKind.NO_ACTION)
