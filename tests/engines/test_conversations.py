"""Rules: a prefix is used only where its ids agree; bytes stay within the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from moopd.engines.conversations import Conversations


def planes(length: int) -> Tensor:
    """Two planes, one head of 4 float32 numbers: 2 * 1 * 4 * 4 = 32 bytes a token."""
    return (
        torch.arange(length * 8, dtype=torch.float32).reshape(length, 2, 1, 4).permute(1, 2, 0, 3)
    )


def test_a_prefix_is_used_as_far_as_the_prompt_but_for_its_last_token() -> None:
    kept = Conversations(10_000)
    kept.keep((0, 0), (1, 2, 3), planes(3))
    longer = kept.past((0, 0), (1, 2, 3, 4))
    assert longer is not None and torch.equal(longer, planes(3))
    same = kept.past((0, 0), (1, 2, 3))
    assert same is not None and torch.equal(same, planes(2))


def test_other_ids_another_key_or_none_use_nothing() -> None:
    kept = Conversations(10_000)
    kept.keep((0, 0), (1, 2, 3), planes(3))
    assert kept.past((0, 0), (1, 9, 3, 4)) is None
    assert kept.past((0, 1), (1, 2, 3, 4)) is None
    assert kept.past(None, (1, 2, 3, 4)) is None
    kept.clear()
    assert kept.past((0, 0), (1, 2, 3, 4)) is None
    assert kept.num_bytes == 0


def test_a_conversation_that_grew_is_counted_once() -> None:
    kept = Conversations(10_000)
    kept.keep((0, 0), (1, 2), planes(2))
    kept.keep((0, 0), (1, 2, 3), planes(3))
    assert kept.num_bytes == 3 * 32


def test_what_was_not_used_for_longest_goes_first() -> None:
    kept = Conversations(6 * 32)  # room for three conversations of two tokens
    for number in range(3):
        kept.begin_call()
        kept.keep((number, 0), (1, 2), planes(2))
    kept.begin_call()
    assert kept.past((0, 0), (1, 2, 3)) is not None  # used again: now the youngest
    kept.keep((3, 0), (1, 2), planes(2))
    assert kept.num_bytes == 6 * 32
    found = [kept.past((n, 0), (1, 2, 3)) is not None for n in range(4)]
    assert found == [True, False, True, True]


def test_what_belongs_to_the_same_call_is_not_thrown_out() -> None:
    kept = Conversations(4 * 32)
    kept.begin_call()
    for number in range(3):
        kept.keep((number, 0), (1, 2), planes(2))
    found = [kept.past((n, 0), (1, 2, 3)) is not None for n in range(3)]
    assert found == [True, True, False]


def test_one_larger_than_the_budget_is_let_go() -> None:
    kept = Conversations(32)
    kept.keep((0, 0), (1, 2), planes(2))
    assert kept.num_bytes == 0
