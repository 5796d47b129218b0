"""The words that the hashing encoder and the lexical retriever see of a text."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_WORD = re.compile(r"\w+")
_UNASKED = """
a an and are as at be been by did do does for from had has have how in into is it its of on or
that the their there these they this to was were what when where which who whom whose why will with
"""
STOP_WORDS = frozenset(_UNASKED.split())
_SHORTEST_STEM = 4


def split_words(text: str) -> list[str]:
    """Lower-case words without accents; a query typed without them finds the accented name."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in decomposed if not unicodedata.combining(c))
    return _WORD.findall(text.casefold())


def index_words(text: str) -> list[str]:
    """Stems of the words that count: without stop words, unless nothing else is left."""
    words = split_words(text)
    return [stem(word) for word in words if word not in STOP_WORDS] or words


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """A word without its plural, -ed, -ing or final e: released, releases, release are one."""
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = _cut(word, "s")
    for ending in ("ing", "ed", "e"):
        if word.endswith(ending):
            return _cut(word, ending)
    return word


def _cut(word: str, ending: str) -> str:
    rest = word.removesuffix(ending)
    return rest if len(rest) >= _SHORTEST_STEM else word
