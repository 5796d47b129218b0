"""The update's mathematics on flat token vectors: PPO clip with dual clip, entropy, token mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """Sums over tokens (divide by the number of trained tokens) and detached diagnostics."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    """Sum of log pi_old - log pi, the usual one-sample estimate."""


def ppo_token_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float, dual_clip: float
) -> Tensor:
    """Clipped surrogate loss per token, all (N,).

    -min(r A, clip(r, 1-c, 1+c) A); where A < 0 never above -dual_clip * A.
    """
    ratio = torch.exp(torch.clamp(logprobs - old_logprobs, -20.0, 20.0))
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip, 1.0 + clip)
    pessimistic = torch.maximum(unclipped, clipped)
    bounded = torch.minimum(pessimistic, -advantages * dual_clip)
    return torch.where(advantages < 0, bounded, pessimistic)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats per row of `logits` (N, V) -> (N,)."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def sum_losses(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip: float,
    dual_clip: float,
    entropy_coef: float,
) -> TokenLoss:
    """Sum of weighted policy losses minus entropy bonus over N tokens; all inputs (N,)."""
    policy = ppo_token_losses(logprobs, old_logprobs, advantages, clip, dual_clip)
    with torch.no_grad():
        ratio = torch.exp(logprobs - old_logprobs)
        outside = (ratio - 1.0).abs() > clip
    return TokenLoss(
        loss=(weights * policy).sum() - entropy_coef * entropy.sum(),
        clipped=outside.float().sum(),
        kl=(old_logprobs - logprobs.detach()).sum(),
    )


def clip_gradient(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Clip in place to a global norm of `max_norm`; the norm before.

    Raises FloatingPointError where it is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if not torch.isfinite(norm):
        raise FloatingPointError(
            f"gradient norm is {norm.item()}, expected a finite number; the last checkpoint is "
            "intact, lower training.lr"
        )
    return norm.item()
