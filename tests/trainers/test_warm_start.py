"""Rules: the loss weighs generated tokens and context, not padding; batches, rate and drills."""

from __future__ import annotations

import math
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moopd.config import ModelConfig, WarmStartConfig
from moopd.engines.tiny_model import build_tiny
from moopd.trainers.traces import TraceSequence
from moopd.trainers.warm_start import _batches, _loss, _rate, _schedule, warm_start

PAD = 3


class Bigram(torch.nn.Module):
    """A stand-in for a causal LM over 4 tokens: the next token's odds depend on this one alone."""

    def __init__(self) -> None:
        super().__init__()
        odds = torch.tensor([[1.0, 3, 3, 1], [2, 1, 4, 1], [5, 1, 1, 1], [1, 1, 1, 1]])
        self.table = torch.nn.Parameter((odds / odds.sum(1, keepdim=True)).log())
        self.lm_head = torch.nn.Identity()

    def model(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


def sequence(ids: str, generated: str) -> TraceSequence:
    return TraceSequence(tuple(map(int, ids)), tuple(mark == "g" for mark in generated))


def test_loss_is_the_weighted_mean_over_both_rows_and_padding_weighs_nothing() -> None:
    batch = [sequence("0120", "--gg"), sequence("10", "-g")]
    # Losses: 0->1 -ln 3/8 (context, 0.1), 1->2 -ln 4/8, 2->0 -ln 5/8, and 1->0 -ln 2/8.
    weighted = 0.1 * math.log(8 / 3) + math.log(2) + math.log(8 / 5) + math.log(4)
    loss = _loss(Bigram(), batch, PAD, 0.1).item()
    assert loss == pytest.approx(weighted / 3.1, abs=1e-6)
    without = (math.log(2) + math.log(8 / 5) + math.log(4)) / 3
    assert _loss(Bigram(), batch, PAD, 0.0).item() == pytest.approx(without, abs=1e-6)
    assert _loss(Bigram(), batch[::-1], 0, 0.1).item() == pytest.approx(loss, abs=1e-6)


def test_the_rate_rises_for_five_percent_and_falls_to_zero() -> None:
    # 100 steps: 5 of warm-up (1/5, 2/5, ...), then half a cosine over 95.
    assert [_rate(step, 100) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert _rate(5, 100) == 1.0
    assert _rate(100, 100) == pytest.approx(0.0, abs=1e-12)
    # Halfway down: step 5 + 95/2 has cos(pi/2) = 0.
    assert (_rate(52, 100) + _rate(53, 100)) / 2 == pytest.approx(0.5, abs=1e-3)


def test_batches_keep_the_token_limit_hold_like_lengths_and_use_each_trace_once_an_epoch() -> None:
    traces = [TraceSequence((n,) * length, (True,) * length)
              for n, length in enumerate([4, 9, 5, 9, 4, 5, 8, 4])]  # fmt: skip
    # In order of length and at most 18 tokens with padding: 4x3 (5x4 > 18), 5x2 (8x3 > 18),
    # 9x2 (9x3 > 18), 9.
    epoch = list(islice(_batches(traces, 18, 0), 4))
    assert sorted(sorted(len(t.ids) for t in batch) for batch in epoch) == [
        [4, 4, 4], [5, 5], [8, 9], [9],
    ]  # fmt: skip
    assert sorted(t.ids[0] for batch in epoch for t in batch) == list(range(8))
    first, second = (list(islice(_batches(traces, 18, seed), 12)) for seed in (1, 1))
    assert first == second != list(islice(_batches(traces, 18, 2), 12))
    with_long = [TraceSequence((1,) * 50, (True,) * 50), *traces]
    assert [50] in [[len(t.ids) for t in b] for b in islice(_batches(with_long, 18, 0), 5)]


def is_drill(batch: list[TraceSequence]) -> bool:
    third = len(batch[0].ids) // 3
    return batch[0].ids[:third] * 3 == batch[0].ids and not any(batch[0].generated[:third])


def test_drills_come_first_and_then_at_their_share() -> None:
    traces = [TraceSequence(tuple(range(12)), (True,) * 12)]
    config = WarmStartConfig(steps=200, tokens_per_batch=400, drill_steps=7, drill_share=0.25)
    drawn = [is_drill(batch) for batch in islice(_schedule(traces, config, 50, 0), 407)]
    assert all(drawn[:7])
    # 400 draws at 0.25: standard deviation 0.022.
    assert abs(sum(drawn[7:]) / 400 - 0.25) < 0.07
    none = WarmStartConfig(steps=200, tokens_per_batch=400, drill_steps=0, drill_share=0.0)
    assert not any(is_drill(batch) for batch in islice(_schedule(traces, none, 50, 0), 50))


def test_context_is_learned_only_where_it_weighs_something() -> None:
    traces = [TraceSequence((5, 6, 7, 8, 9, 10), (False,) * 5 + (True,))]
    losses = {}
    for weight in (0.0, 1.0):
        model, _ = build_tiny(ModelConfig(hidden_size=32), 0)
        config = WarmStartConfig(steps=20, lr=3e-2, context_weight=weight)
        warm_start(model, PAD, traces, config, 0, lambda *_: None)
        assert not model.training
        context = [TraceSequence((5, 6, 7, 8, 9), (True,) * 5)]
        with torch.no_grad():
            losses[weight] = _loss(model, context, PAD, 1.0).item()
    assert losses[1.0] < 0.5 < 3.0 < losses[0.0]


def test_recomputing_layers_changes_memory_and_no_weight() -> None:
    traces = [TraceSequence((5, 6, 7, 8, 9, 10), (False,) * 3 + (True,) * 3)]
    weights, passes = [], []
    for recompute in (False, True):
        model, _ = build_tiny(ModelConfig(hidden_size=32), 0)
        calls: list[int] = []
        model.model.layers[0].self_attn.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        config = WarmStartConfig(steps=3, gradient_checkpointing=recompute)
        warm_start(model, PAD, traces, config, 0, lambda *_: None)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        passes.append(len(calls))
    assert passes == [3, 6]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-7)


def test_a_short_warm_start_says_where_it_is() -> None:
    traces = [TraceSequence((5, 6, 7, 8, 9, 10), (True,) * 6)]
    for steps, said in ((2, [1, 2]), (8, [2, 4, 6, 8]), (90, [20, 40, 60, 80, 90])):
        model, _ = build_tiny(ModelConfig(hidden_size=32), 0)
        seen: list[int] = []
        config = WarmStartConfig(steps=steps)
        warm_start(model, PAD, traces, config, 0, lambda step, _, seen=seen: seen.append(step))
        assert seen == said
