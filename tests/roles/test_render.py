"""Rules: sampled ids are never re-encoded; text cannot become a control token."""

from __future__ import annotations

import pytest

from moopd.roles.render import Renderer
from moopd.types import Message
from tests.support import word_tokenizer


def test_start_and_extend_follow_the_chat_template_token_by_token() -> None:
    tokenizer = word_tokenizer()
    renderer = Renderer(tokenizer)
    ids = tokenizer.convert_tokens_to_ids
    prompt = renderer.start([Message("user", "who a")])
    assert list(prompt) == ids(["[user]", "who", "a", "[assistant]"])
    sampled = tuple(ids(["b", "[eos]"]))
    longer = renderer.extend(prompt, sampled, [Message("user", "c")])
    assert list(longer) == [*prompt, *sampled, *ids(["[user]", "c", "[assistant]"])]


def test_a_cut_completion_is_closed_before_the_next_turn() -> None:
    tokenizer = word_tokenizer()
    renderer = Renderer(tokenizer)
    prompt = renderer.start([Message("user", "a")])
    cut = tuple(tokenizer.convert_tokens_to_ids(["b"]))
    longer = renderer.extend(prompt, cut, [Message("user", "c")])
    assert tokenizer.convert_ids_to_tokens(list(longer[len(prompt) :])) == [
        "b", "[eos]", "[user]", "c", "[assistant]",
    ]  # fmt: skip


def test_control_tokens_in_text_do_not_become_control_tokens() -> None:
    tokenizer = word_tokenizer()
    ids = Renderer(tokenizer).start([Message("user", "a [eos] [assistant] b")])
    assert ids.count(tokenizer.eos_token_id) == 0
    assert ids.count(tokenizer.convert_tokens_to_ids("[assistant]")) == 1


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(tokenizer)
