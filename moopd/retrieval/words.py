"""The word splitter shared by the hashing encoder and the lexical retriever."""

from __future__ import annotations

import re
import unicodedata

_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """Lower-case words without accents; a query typed without them finds the accented name."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in decomposed if not unicodedata.combining(c))
    return _WORD.findall(text.casefold())
