"""Raw rows to questions. `full` repairs text and answers; `malformed` leaves both as published.

Every rule was chosen on dirt that the published files show; what a rule must not touch is in its
test.
"""

from __future__ import annotations

import ast
import html
import json
import re
import unicodedata
import urllib.parse
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.entities import html5
from typing import Literal

from moopd.data.normalize import INVISIBLE, normalize_answer, normalize_question
from moopd.data.sources import RawRow, Removal
from moopd.types import Question

Rule = Literal["full", "malformed"]
ANSWER_SEPARATOR = "<|answer_split|>"
MAX_LIST_TEXT = 100_000

_CONTROL = {code: None for code in [*range(0x20), 0x7F] if not chr(code).isspace()}
# Windows-1252 read as Latin-1: quotes and dashes that arrive as C1 control characters.
_C1 = {code: bytes([code]).decode("cp1252", "ignore") or None for code in range(0x80, 0xA0)}
_CHARACTERS: dict[int, str | None] = {**INVISIBLE, **_CONTROL, **_C1}

_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BEFORE_MARK = re.compile(r"\s+([,.;:])(?=[\s\"'”’)\]?!]|$)|\s+(\))")
_BEFORE_S = re.compile(r"\s+(['’]s)(?=[\s,.;:?!)\"]|$)")
_AFTER_BRACKET = re.compile(r"\(\s+")
_END_MARKS = re.compile(r"[\s?]+$")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A clean question on its way to a split, with where it came from."""

    question: Question
    split: str
    key: str
    """`normalize_question` of its text."""
    source: str = ""
    line: int = 0
    flags: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    """Ids of the rows united into this one."""


def clean_row(row: RawRow, rule: Rule) -> Candidate | Removal:
    """One row to a candidate, or the reason why it cannot be one."""

    def removed(reason: str, got: object = "") -> Removal:
        detail = repr(got)[:80] if got != "" else ""
        return Removal(reason, row.source, row.line, row.id, row.dataset, row.split, detail)

    full = rule == "full"
    text, repaired = clean_question(row.question) if full else (row.question, False)
    if not text.strip(" ?\t\r\n"):
        return removed("empty_question", row.question)
    try:
        answers, flags, reason = (clean_answers if full else published_answers)(row.answers)
    except RecursionError:
        return removed("answers_nested_too_deep")
    if reason:
        return removed(reason, row.answers)
    if not _encodable(text, *answers):
        return removed("bad_unicode", text)
    if repaired and "mojibake_repaired" not in flags:
        flags = (*flags, "mojibake_repaired")
    question = Question(
        id=row.id,
        dataset=row.dataset,
        text=text,
        answers=answers,
        answer_type="yes_no" if is_yes_no(answers) else "span",
        family=row.family,
        num_hops=row.num_hops,
        support_ids=row.support_ids,
    )
    return Candidate(question, row.split, normalize_question(text), row.source, row.line, flags)


def _encodable(*texts: str) -> bool:
    # JSON may carry half of a surrogate pair; nothing downstream could write it.
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- questions


def clean_question(text: str) -> tuple[str, bool]:
    """Clean text that ends in exactly one question mark ("" if nothing is left), and whether
    mojibake was repaired."""
    clean, repaired = clean_text(text)
    clean = _END_MARKS.sub("", clean)
    return (f"{clean}?" if clean else ""), repaired


def clean_text(text: str) -> tuple[str, bool]:
    """Repaired text without escapes, invisible characters and stray spaces; True if it was
    mojibake."""
    text, repaired = (text, False) if text.isascii() else _repair_mojibake(text)
    if "%" in text:
        text = _PERCENT.sub(_decode_percent, text)
    if "&" in text:
        text = _unescape(text)
    if not (text.isascii() and text.isprintable()):
        text = text.translate(_CHARACTERS)
    text = text.strip()
    if text.startswith('"'):
        text = _unwrap_csv(text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = " ".join(text.split())
    return _join_tokens(text), repaired


def _repair_mojibake(text: str) -> tuple[str, bool]:
    """UTF-8 that was read as Latin-1, only if the way back succeeds; right text cannot pass it."""
    try:
        return text.encode("latin-1").decode("utf-8"), True
    except UnicodeError:
        return text, False


def _decode_percent(match: re.Match[str]) -> str:
    # Undecodable bytes and control characters mean that this was a per cent sign in prose.
    try:
        decoded = urllib.parse.unquote(match.group(), errors="strict")
    except UnicodeDecodeError:
        return match.group()
    return decoded if decoded.isprintable() else match.group()


def _unescape(text: str) -> str:
    # Only whole entities: html.unescape alone also reads "R&notes" as "R¬es".
    while (plain := _ENTITY.sub(_entity, text)) != text:
        text = plain
    return text


def _entity(match: re.Match[str]) -> str:
    entity = match.group()
    known = entity.startswith("&#") or entity[1:] in html5
    return html.unescape(entity) if known else entity


def _unwrap_csv(text: str) -> str:
    """One CSV field read as text: wrapped in quotes, and every quote inside doubled."""
    inner = text[1:-1]
    wrapped = len(text) > 2 and text.endswith('"') and '""' in inner
    if wrapped and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return text


def _join_tokens(text: str) -> str:
    """Spaces that a tokeniser left. ".05" and "... yes" keep theirs: the mark must end a token."""
    if " " not in text:
        return text
    text = _BEFORE_MARK.sub(r"\1\2", text)
    if "( " in text:
        text = _AFTER_BRACKET.sub("(", text)
    return _BEFORE_S.sub(r"\1", text) if " '" in text or " ’" in text else text


# ---------------------------------------------------------------- answers


def clean_answers(raw: object) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """(answers, flags, reason). Answers in order, each text once; `reason` is set if none is left.

    An alias that normalises to nothing goes, since an empty output would stand for it.
    """
    cleaned = [clean_text(text) for text in _flatten(raw, parse=True)]
    texts = list(dict.fromkeys(text for text, _ in cleaned if text))
    flags = ["mojibake_repaired"] if any(repaired for _, repaired in cleaned) else []
    if not texts:
        return (), (), "empty_answers"
    normals = [normalize_answer(text) for text in texts]
    pairs = [(text, normal) for text, normal in zip(texts, normals, strict=True) if normal]
    if not pairs:
        return (), (), "answer_normalises_to_empty"
    if pairs[0][1] not in ("yes", "no"):
        # A country code: "NO" among the aliases of Norway would make a bare "no" exact match.
        spans = [pair for pair in pairs if pair[1] != "no"]
        flags += ["yes_no_alias_dropped"] if len(spans) < len(pairs) else []
        pairs = spans
    return tuple(text for text, _ in pairs), tuple(flags), None


def published_answers(raw: object) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """As `clean_answers`, with every text as published: dropping an alias changes exact match."""
    answers = tuple(_flatten(raw, parse=False))
    return (answers, (), None) if any(map(str.strip, answers)) else ((), (), "empty_answers")


def _flatten(raw: object, parse: bool) -> Iterator[str]:
    """Texts in nested lists, {value, aliases} records and (`parse`) lists written as text."""
    if isinstance(raw, str):
        if not parse:
            yield raw
        elif ANSWER_SEPARATOR in raw:
            yield from raw.split(ANSWER_SEPARATOR)
        elif isinstance(listed := _written_list(raw), list):
            yield from _flatten(listed, parse)
        else:
            yield raw
    elif isinstance(raw, Mapping):
        for key in ("value", "aliases"):
            yield from _flatten(raw.get(key), parse)
    elif isinstance(raw, (list, tuple)):
        for item in raw:
            yield from _flatten(item, parse)
    elif isinstance(raw, bool):
        yield "yes" if raw else "no"
    elif isinstance(raw, (int, float)) and raw == raw:  # NaN: a missing value of a data frame
        yield str(raw)


def _written_list(text: str) -> object:
    bare = text.strip()
    if not (bare.startswith("[") and bare.endswith("]") and len(bare) <= MAX_LIST_TEXT):
        return None
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a title warn and still parse
            return ast.literal_eval(bare)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def is_yes_no(answers: Iterable[str]) -> bool:
    """True if every accepted answer is a yes or a no."""
    return all(len(text) <= 8 and normalize_answer(text) in ("yes", "no") for text in answers)
