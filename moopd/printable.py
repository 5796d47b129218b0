"""Text from outside on its way to a terminal: it may not move the cursor or hide what it says."""

from __future__ import annotations

import unicodedata

_DIRECTION = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SHOWN = "\ufffd"


def printable(text: str) -> str:
    """The text with control characters, half surrogate pairs and direction marks replaced."""
    if text.isprintable():
        return text
    return "".join(
        _SHOWN
        if (unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t") or char in _DIRECTION
        else char
        for char in text
    )
