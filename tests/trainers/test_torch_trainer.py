"""Invariants of the update: order, microbatching and merging change nothing; only actions train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from moopd.config import TrainingConfig
from moopd.trainers.torch_trainer import TorchTrainer
from moopd.types import Owner, Role, ScoreRequest, TrainingSample
from tests.support import tiny_policy, word_tokenizer

TOKENIZER = word_tokenizer()
CONFIG = TrainingConfig(lr=1e-3, num_minibatches=2, tokens_per_microbatch=4096)


def make_samples(seed: int = 0) -> list[TrainingSample]:
    """Two turns of a conversation per workflow and twice the same answer; random advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for team in range(6):
        prompt = tuple(rng.integers(20, 40, 5).tolist())
        first = tuple(rng.integers(20, 40, 4).tolist())
        second_prompt = (*prompt, *first, 21, 22)
        second = tuple(rng.integers(20, 40, 3).tolist())
        turns = [(prompt, first), (second_prompt, second), (second_prompt, second)]
        for call, (ids, tokens) in enumerate(turns):
            samples.append(
                TrainingSample(
                    Owner("q", team, call, 0, Role.SEARCHER),
                    ids,
                    tokens,
                    tuple(rng.normal(-3, 0.5, len(tokens)).tolist()),
                    tuple(rng.normal(0, 1, len(tokens)).tolist()),
                )
            )
    return samples


def updated(samples: Sequence[TrainingSample], config: TrainingConfig = CONFIG) -> torch.Tensor:
    """All weights after one update from a fixed start, in one vector."""
    model = tiny_policy(TOKENIZER)
    TorchTrainer(model, TOKENIZER, config).update(samples, seed=1)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_order_microbatch_size_and_merging_do_not_change_the_update() -> None:
    samples = make_samples()
    reference = updated(samples)
    start = torch.cat([p.detach().flatten() for p in tiny_policy(TOKENIZER).parameters()])
    moved = (reference - start).abs().max()
    assert moved > 1e-4
    variants = [
        updated(samples[::-1]),
        updated(samples, CONFIG.model_copy(update={"tokens_per_microbatch": 20})),
        updated(samples, CONFIG.model_copy(update={"merge_samples": False})),
    ]
    for variant in variants:
        # Adam divides by the gradient's size, so rounding shows in weights without any gradient.
        assert ((variant - reference).abs() > 1e-5).float().mean() < 1e-3


def test_recomputing_layers_gives_the_same_update_from_twice_the_forward_passes() -> None:
    weights, passes = [], []
    for recompute in (False, True):
        model, calls = tiny_policy(TOKENIZER), []
        model.model.layers[0].self_attn.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        config = CONFIG.model_copy(update={"gradient_checkpointing": recompute})
        TorchTrainer(model, TOKENIZER, config).update(make_samples(), seed=1)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        passes.append(len(calls))
    assert passes[1] == 2 * passes[0]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-7)


def test_gradient_is_exact_under_merging() -> None:
    gradients = []
    for merge in (True, False):
        model = tiny_policy(TOKENIZER)
        config = CONFIG.model_copy(
            update={"merge_samples": merge, "num_minibatches": 1, "lr": 0.0, "grad_clip": 1e9}
        )
        trainer = TorchTrainer(model, TOKENIZER, config)
        trainer.update(make_samples(), seed=1)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_prompt_tokens_are_not_trained() -> None:
    """With zero advantage and no entropy nothing moves, however the prompt looks."""
    config = CONFIG.model_copy(update={"entropy_coef": 0.0})
    still = [replace(s, advantages=(0.0,) * len(s.advantages)) for s in make_samples()]
    start = torch.cat([p.detach().flatten() for p in tiny_policy(TOKENIZER).parameters()])
    torch.testing.assert_close(updated(still, config), start, rtol=0, atol=0)


def test_a_liked_token_becomes_more_likely_and_a_disliked_one_less() -> None:
    request = ScoreRequest((25, 26, 27), (30,))
    for advantage in (1.0, -1.0):
        model = tiny_policy(TOKENIZER)
        config = CONFIG.model_copy(update={"num_minibatches": 1, "entropy_coef": 0.0})
        trainer = TorchTrainer(model, TOKENIZER, config)
        ((before,),) = trainer.score([request])
        sample = TrainingSample(
            Owner("q", 0, 0, 0, Role.SEARCHER), request.prompt_ids, request.token_ids,
            (before,), (advantage,),
        )  # fmt: skip
        trainer.update([sample], seed=0)
        ((after,),) = trainer.score([request])
        assert (after - before) * advantage > 1e-4


def test_scores_equal_a_full_forward_and_one_token_keeps_its_place() -> None:
    model = tiny_policy(TOKENIZER)
    trainer = TorchTrainer(model, TOKENIZER, CONFIG)
    requests = [ScoreRequest((25, 26), (27, 28, 29)), ScoreRequest((30,) * 9, (31,))]
    for request, got in zip(requests, trainer.score(requests), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *request.token_ids]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids).logits[0].float(), -1)
        start = len(request.prompt_ids)
        expected = [log_p[start - 1 + k, t].item() for k, t in enumerate(request.token_ids)]
        assert got == pytest.approx(expected, abs=1e-5)


def test_weights_of_the_rollout_correction_scale_the_policy_term() -> None:
    samples = make_samples()
    doubled = [replace(s, rollout_weights=(2.0,) * len(s.token_ids)) for s in samples]
    gradients = []
    for given in (samples, doubled):
        model = tiny_policy(TOKENIZER)
        config = CONFIG.model_copy(
            update={"num_minibatches": 1, "lr": 0.0, "grad_clip": 1e9, "entropy_coef": 0.0}
        )
        TorchTrainer(model, TOKENIZER, config).update(given, seed=1)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    torch.testing.assert_close(2 * gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    model = tiny_policy(TOKENIZER)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="finite"):
        TorchTrainer(model, TOKENIZER, CONFIG).update(make_samples(), seed=0)
