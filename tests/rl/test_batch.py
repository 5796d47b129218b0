"""Rules: prefix-sharing samples share a row, every token keeps its own place and advantage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moopd.rl.batch import microbatches, split_minibatches
from moopd.types import Owner, Role, TrainingSample


def sample(prompt: str, tokens: str, advantage: float = 1.0, team: int = 0, call: int = 0,
           question: str = "q") -> TrainingSample:  # fmt: skip
    ids = tuple(int(c) for c in tokens)
    return TrainingSample(
        Owner(question, team, call, 0, Role.SEARCHER),
        tuple(int(c) for c in prompt),
        ids,
        (-0.5,) * len(ids),
        (advantage,) * len(ids),
    )


def test_a_later_turn_carries_the_earlier_one() -> None:
    # row 1234567: turn one generates 34 after 12, turn two generates 67 after 12345.
    first, second = sample("12", "34", 1.0), sample("12345", "67", 2.0, call=1)
    (batch,) = microbatches([first, second], 100, pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    places = sorted(
        zip(batch.position.tolist(), batch.target.tolist(), batch.advantages.tolist(), strict=True)
    )
    # Each token is predicted at its predecessor's position; 5 (observation) is no target.
    assert places == [(1, 3, 1.0), (2, 4, 1.0), (4, 6, 2.0), (5, 7, 2.0)]


def test_identical_completions_share_a_row_and_keep_their_own_advantages() -> None:
    same = [sample("12", "3", 1.0, team=0), sample("12", "3", -2.0, team=1)]
    (batch,) = microbatches(same, 100, pad_id=0)
    assert batch.input_ids.shape == (1, 3)
    assert sorted(batch.advantages.tolist()) == [-2.0, 1.0]
    assert [s.owner.group_index for s in batch.samples] in ([0, 1], [1, 0])


def test_other_samples_are_not_merged() -> None:
    (batch,) = microbatches([sample("12", "34"), sample("13", "45", call=1)], 100, pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 3, 4, 5]]


def test_microbatches_respect_tokens_and_length_spread() -> None:
    short = [sample("1", "2" * n, call=n) for n in (1, 2)]
    long = [sample("3", "4" * 60, call=9)]
    blocks = list(microbatches([*short, *long], 10, pad_id=0))
    assert [block.input_ids.shape for block in blocks] == [(1, 3), (1, 61)]
    assert sum(block.num_tokens for block in blocks) == 63


def test_a_microbatch_is_filled_up_to_its_bound() -> None:
    # Four rows of 3 tokens, at most 6: two and two.
    samples = [sample(str(n), "22", team=n) for n in range(1, 5)]
    assert [b.input_ids.shape for b in microbatches(samples, 6, pad_id=0)] == [(2, 3), (2, 3)]
    assert [b.input_ids.shape for b in microbatches(samples, 5, pad_id=0)] == [(1, 3)] * 4


def test_rows_of_unlike_lengths_stay_apart_even_where_they_would_fit() -> None:
    # Longest allowed beside a row of 10: 1.2 * 10 + 4 = 16.
    rows = [sample(str(n), "2" * (length - 1)) for n, length in enumerate((10, 16, 17), start=1)]
    shapes = [b.input_ids.shape for b in microbatches(rows, 1000, pad_id=0)]
    assert shapes == [(2, 16), (1, 17)]


def test_importance_weights_go_with_their_tokens() -> None:
    weighted = replace(sample("12", "34"), rollout_weights=(0.5, 2.0))
    (batch,) = microbatches([weighted, sample("12", "5", call=1)], 100, pad_id=0)
    assert dict(zip(batch.target.tolist(), batch.weights.tolist(), strict=True)) == {
        3: 0.5, 4: 2.0, 5: 1.0,
    }  # fmt: skip


def test_minibatches_hold_whole_workflows_whatever_the_order() -> None:
    samples = [sample("1", "2", team=t, call=c, question=f"q{q}")
               for q in range(3) for t in range(5) for c in range(2)]  # fmt: skip
    parts = split_minibatches(samples, 5, seed=4)
    again = split_minibatches(samples[::-1], 5, seed=4)
    workflows = [{(s.owner.question_id, s.owner.group_index) for s in part} for part in parts]
    assert workflows == [{(s.owner.question_id, s.owner.group_index) for s in p} for p in again]
    assert [len(w) for w in workflows] == [3] * 5
    assert sum(len(part) for part in parts) == 30
    assert workflows != [
        {(s.owner.question_id, s.owner.group_index) for s in p}
        for p in split_minibatches(samples, 5, seed=5)
    ]


def test_too_few_workflows_for_five_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="1 workflows cannot fill 5 minibatches"):
        split_minibatches([sample("1", "2")], 5, seed=0)
