"""The one normaliser: exact match for rewards and scoring, and the key under which questions
count as the same."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
INVISIBLE = dict.fromkeys(
    [0x00AD, 0x061C, 0x180E, 0xFEFF]
    + [
        code
        for first, last in ((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F))
        for code in range(first, last + 1)
    ]
)
"""Zero-width characters and direction marks, as a `str.translate` table that deletes them."""


def normalize_answer(text: str) -> str:
    """The SQuAD rule: lower case, ASCII punctuation out, articles out, white space joined.

    It stays the standard rule: "C++" equals "C#", "-5" equals "5", and curly quotes, dashes and
    decomposed accents miss.
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


@lru_cache(maxsize=1 << 17)
def _normalized_gold(text: str) -> str:
    return normalize_answer(text)


def exact_match(prediction: str | None, answers: Sequence[str]) -> bool:
    """True if the prediction equals any accepted answer after normalisation.

    A missing prediction and one that normalises to nothing never match, whatever the golds are.
    """
    if prediction is None:
        return False
    normal = normalize_answer(prediction)
    return bool(normal) and any(normal == _normalized_gold(answer) for answer in answers)


def normalize_question(text: str) -> str:
    """The key under which two questions are the same (overlap check, section 4).

    Composed Unicode and no invisible characters before the SQuAD rule; a question that the rule
    empties ("The A?") keeps its lower-cased text, so that it does not equal every other such one.
    """
    visible = unicodedata.normalize("NFC", text).translate(INVISIBLE)
    return normalize_answer(visible) or " ".join(visible.lower().split())
