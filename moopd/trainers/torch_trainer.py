"""The trainer for one device: AdamW on a transformers causal LM, padded microbatches.

Logits are computed at trained positions only, so a large vocabulary costs no more than it must.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moopd.config import TrainingConfig
from moopd.engines.base import Engine
from moopd.engines.models import recompute_layers
from moopd.rl.batch import Microbatch, microbatches, split_minibatches, uncredited
from moopd.rl.losses import clip_gradient, sum_losses, token_entropy
from moopd.trainers import checkpoints
from moopd.trainers.checkpoints import TrainingState
from moopd.types import Owner, ScoreRequest, TrainingSample


class TorchTrainer:
    """PPO updates in place on `model`; `score` uses the same forward pass."""

    def __init__(self, model: Any, tokenizer: Any, config: TrainingConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._config = config
        self._device = next(model.parameters()).device
        self._pad = int(tokenizer.pad_token_id)
        if config.gradient_checkpointing:
            recompute_layers(model)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=(0.9, 0.999), weight_decay=0.0, foreach=True
        )

    def update(self, samples: Sequence[TrainingSample], seed: int) -> dict[str, float]:
        """`num_minibatches` optimizer steps over whole workflows; token-weighted mean metrics."""
        totals: dict[str, float] = defaultdict(float)
        self.model.train()
        for minibatch in split_minibatches(samples, self._config.num_minibatches, seed):
            num_tokens = sum(len(sample.token_ids) for sample in minibatch)
            self._optimizer.zero_grad(set_to_none=True)
            for batch in microbatches(
                minibatch,
                self._config.tokens_per_microbatch,
                self._pad,
                merge=self._config.merge_samples,
            ):
                self._accumulate(batch, num_tokens, totals)
            totals["grad_norm"] += clip_gradient(self.model.parameters(), self._config.grad_clip)
            self._optimizer.step()
        self.model.eval()
        return self._means(totals)

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return sequence_logprobs(
            self.model, uncredited(requests), self._config.tokens_per_microbatch, self._pad
        )

    def publish(self, engine: Engine) -> None:
        """The local engine samples from this very module: nothing to copy."""
        engine.end_conversations()

    def save(self, folder: Path, state: TrainingState) -> None:
        checkpoints.save_step(folder, self.model, self.tokenizer, self._optimizer, state)

    def restore(self, folder: Path) -> TrainingState:
        weights = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
        self.model.load_state_dict(weights.state_dict())
        checkpoints.load_optimizer(folder, self._optimizer)
        return checkpoints.load_state(folder)

    def _accumulate(self, batch: Microbatch, num_tokens: int, totals: dict[str, float]) -> None:
        logits = trained_logits(self.model, batch, self._device)
        logprobs = _gather(logits, batch.target.to(self._device))
        entropy = token_entropy(logits)
        losses = sum_losses(
            logprobs,
            entropy,
            batch.old_logprobs.to(self._device),
            batch.advantages.to(self._device),
            batch.weights.to(self._device),
            clip=self._config.clip_ratio,
            dual_clip=self._config.dual_clip,
            entropy_coef=self._config.entropy_coef,
        )
        torch.autograd.backward(losses.loss / num_tokens)
        totals["tokens"] += batch.num_tokens
        totals["loss"] += losses.loss.item()
        totals["clip_share"] += losses.clipped.item()
        totals["approx_kl"] += losses.kl.item()
        totals["entropy"] += entropy.detach().sum().item()

    def _means(self, totals: dict[str, float]) -> dict[str, float]:
        tokens = totals.pop("tokens")
        norm = totals.pop("grad_norm") / self._config.num_minibatches
        means = {name: value / tokens for name, value in totals.items()}
        return {**means, "grad_norm": norm, "trained_tokens": tokens}


def trained_logits(model: Any, batch: Microbatch, device: torch.device) -> Tensor:
    """Logits (N, V) that predict each trained token; right padding is never attended to."""
    hidden = model.model(input_ids=batch.input_ids.to(device), use_cache=False).last_hidden_state
    chosen = hidden[batch.row.to(device), batch.position.to(device)]
    logits: Tensor = model.lm_head(chosen)
    return logits


def sequence_logprobs(
    model: Any, samples: Sequence[TrainingSample], max_tokens: int, pad_id: int
) -> list[tuple[float, ...]]:
    """Log-probabilities of every sample's tokens, in their order; owners must differ."""
    device = next(model.parameters()).device
    found: dict[Owner, tuple[float, ...]] = {}
    with torch.no_grad():
        for batch in microbatches(samples, max_tokens, pad_id):
            logits = trained_logits(model, batch, device)
            logprobs = _gather(logits, batch.target.to(device)).tolist()
            start = 0
            for sample in batch.samples:
                end = start + len(sample.token_ids)
                found[sample.owner] = tuple(logprobs[start:end])
                start = end
    return [found[sample.owner] for sample in samples]


def _gather(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).gather(1, target.unsqueeze(1)).squeeze(1)
