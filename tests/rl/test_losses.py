"""Golden token losses by hand: -min(rA, clip(r)A); for A < 0 at most -3A (dual clip)."""

from __future__ import annotations

import math

import pytest
import torch

from moopd.rl.losses import ppo_token_losses, sum_losses, token_entropy


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # min(3.0, 1.2 * 2 = 2.4)
        (0.5, 2.0, -1.0),  # min(1.0, 0.8 * 2 = 1.6)
        (0.5, -2.0, 1.6),  # min(-1.0, -1.6)
        (1.5, -2.0, 3.0),  # min(-3.0, -2.4)
        (9.0, -2.0, 6.0),  # dual clip: not 18 but 3 * 2
        (9.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, expected: float) -> None:
    loss = ppo_token_losses(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), 0.2, 3.0
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("advantage", "expected"), [(-1.0, 3.0), (0.0, 0.0), (1.0, -1.2)])
def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite(
    advantage: float, expected: float
) -> None:
    # exp(100) is inf in float32; in the bounded branch its gradient would be 0 * inf.
    logprobs = torch.tensor([100.0], requires_grad=True)
    loss = ppo_token_losses(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 3.0)
    torch.autograd.backward(loss.sum())
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert logprobs.grad is not None and logprobs.grad.item() == 0.0


def test_entropy_of_two_equal_choices_is_log_two() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    assert token_entropy(logits).item() == pytest.approx(math.log(2), abs=1e-6)


def test_sum_weights_the_policy_term_and_subtracts_entropy() -> None:
    # tokens: ratio 1, A = 1 and -1, weights 2 and 1, entropies 0.5 each, coefficient 0.1
    losses = sum_losses(
        torch.zeros(2),
        torch.full((2,), 0.5),
        torch.zeros(2),
        torch.tensor([1.0, -1.0]),
        torch.tensor([2.0, 1.0]),
        clip=0.2,
        dual_clip=3.0,
        entropy_coef=0.1,
    )
    # 2 * -1 + 1 * 1 - 0.1 * 1.0
    assert losses.loss.item() == pytest.approx(-1.1, abs=1e-6)


def test_diagnostics_count_both_sides_of_the_clip_and_keep_the_sign_of_kl() -> None:
    ratios = (1.5, 0.5, 1.1)
    losses = sum_losses(
        torch.tensor([math.log(ratio) for ratio in ratios]),
        torch.zeros(3),
        torch.zeros(3),
        torch.ones(3),
        torch.ones(3),
        clip=0.2,
        dual_clip=3.0,
        entropy_coef=0.0,
    )
    assert losses.clipped.item() == 2  # 1.5 above 1.2, 0.5 below 0.8
    # sum of log pi_old - log pi = -(ln 1.5 + ln 0.5 + ln 1.1) = -ln 0.825
    assert losses.kl.item() == pytest.approx(-math.log(0.825), abs=1e-6)
