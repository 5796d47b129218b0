"""Messages -> token ids: the only tokenizer border. Prompts are rendered once and only extended.

Text of messages is encoded apart from the chat template's own tokens, with special tokens split:
a question or passage that spells a control token stays plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from moopd.types import Message

_SLOT = re.compile(r"QSLOT(\d+)Q")


class Renderer:
    """Renders conversations for one tokenizer (any transformers tokenizer with a chat template)."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; expected an instruct model's tokenizer, "
                "so choose an instruct model or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._control_ids = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        self._literal = lru_cache(maxsize=4096)(self._encode_literal)
        self._content = lru_cache(maxsize=65536)(self._encode_content)
        self._shape = lru_cache(maxsize=256)(self._render_shape)

    @property
    def eos_token_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt ids of a new conversation, generation prompt included."""
        pieces = self._shape(tuple(message.speaker for message in messages))
        return self._join(pieces, messages)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        messages: Sequence[Message],
    ) -> tuple[int, ...]:
        """Prompt ids of the next turn: previous prompt + sampled ids + the new messages.

        The sampled ids stand as they are; a completion cut before its end token is closed first.
        """
        speakers = ("user", "assistant", *(message.speaker for message in messages))
        pieces = self._shape(speakers)
        after_assistant = next(
            k for k, piece in enumerate(pieces) if piece == 1
        )  # slot 1 is the assistant's text
        delta = self._join(
            tuple(
                piece - 2 if isinstance(piece, int) else piece
                for piece in pieces[after_assistant + 1 :]
            ),
            messages,
        )
        ended = bool(completion_ids) and completion_ids[-1] == self.eos_token_id
        if ended and delta and delta[0] == self.eos_token_id:
            delta = delta[1:]
        return (*prompt_ids, *completion_ids, *delta)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a completion written by a script, control tokens split; no end token."""
        return self._content(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its control tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()

    def _join(self, pieces: Sequence[str | int], messages: Sequence[Message]) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.extend(self._content(messages[piece].content))
            else:
                ids.extend(self._literal(piece))
        return tuple(ids)

    def _render_shape(self, speakers: tuple[str, ...]) -> tuple[str | int, ...]:
        """The chat template around numbered slots: literal text and slot numbers in turn."""
        messages = [
            {"role": speaker, "content": f"QSLOT{number}Q"}
            for number, speaker in enumerate(speakers)
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        parts = _SLOT.split(text)
        found = [int(part) for part in parts[1::2]]
        if found != list(range(len(speakers))):
            raise ValueError(
                f"the chat template shows message slots {found}, expected each of "
                f"{list(range(len(speakers)))} once and in order; use another chat template"
            )
        pieces = [int(p) if k % 2 else p for k, p in enumerate(parts)]
        return tuple(piece for piece in pieces if piece != "")

    def _encode_literal(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_content(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        # A word-level vocabulary can hold a control token as a plain word: it must not pass.
        return tuple(token for token in ids if token not in self._control_ids)
