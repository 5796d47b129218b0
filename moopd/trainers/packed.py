"""The trainer for one GPU: packed sequences, bfloat16 compute, float32 master weights.

The same mathematics as `TorchTrainer`: the losses are `rl.losses`, sequences are merged by
`rl.batch`, gradients are summed over packs and divided by the minibatch's trained tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moopd.config import TrainingConfig
from moopd.engines.base import Engine, WeightReceiver
from moopd.rl.batch import split_minibatches, uncredited
from moopd.rl.losses import TokenLoss, clip_gradient, sum_losses
from moopd.trainers import checkpoints
from moopd.trainers.checkpoints import TrainingState
from moopd.trainers.packed_model import Pack, logprobs_and_entropy, make_packs, packed_hidden
from moopd.types import (
    CheckpointRef,
    Completion,
    GenerateRequest,
    Owner,
    ScoreRequest,
    TrainingSample,
)

HEAD_CHUNK = 2048
"""Trained tokens whose logits exist at the same time: 1.2 GB of float32 at 152k words."""
_MASTER = "master"


class PackedTrainer:
    """PPO updates on `model`, whose dtype is the compute dtype; `sampler` rests meanwhile."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: TrainingConfig,
        sampler: WeightReceiver | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._config = config
        self._sampler = sampler
        self._device = next(model.parameters()).device
        self._pad = int(tokenizer.pad_token_id)
        self._masters = MasterWeights(model, config)
        self._layers = _compiled(model) if config.compile_layers else None
        # Fused: single operations would write several tensors as large as the logits.
        compiled = config.compile_layers
        self._head = torch.compile(logprobs_and_entropy) if compiled else logprobs_and_entropy

    def update(self, samples: Sequence[TrainingSample], seed: int) -> dict[str, float]:
        """`num_minibatches` optimizer steps over whole workflows; token-weighted mean metrics."""
        self._rest_sampler()
        totals: dict[str, Tensor | float] = defaultdict(float)
        self.model.train()
        for minibatch in split_minibatches(samples, self._config.num_minibatches, seed):
            num_tokens = sum(len(sample.token_ids) for sample in minibatch)
            self._masters.zero_grad()
            packs = make_packs(
                minibatch,
                self._config.tokens_per_microbatch,
                self._pad,
                merge=self._config.merge_samples,
            )
            # All on their way before the first runs: a copy in between would wait for the GPU.
            for pack in [pack.to(self._device) for pack in packs]:
                self._accumulate(pack, num_tokens, totals)
            totals["grad_norm"] += self._masters.step(self._config.grad_clip)
        self.model.eval()
        return self._means(totals)

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        self._rest_sampler()
        return packed_scores(
            self.model, requests, self._config.tokens_per_microbatch, self._pad, self._layers
        )

    def publish(self, engine: Engine) -> None:
        """Send the weights to an engine that keeps its own; the local engine shares ours."""
        if isinstance(engine, WeightReceiver):
            # Gradients, and what the allocator keeps for itself, are what the engine wants back.
            self._masters.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            engine.update_weights(self.model.named_parameters())
        engine.end_conversations()

    def save(self, folder: Path, state: TrainingState) -> None:
        with self._masters.as_state():
            checkpoints.save_step(
                folder, self.model, self.tokenizer, self._masters.optimizer, state
            )

    def restore(self, folder: Path) -> TrainingState:
        weights = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
        self.model.load_state_dict(weights.state_dict())
        checkpoints.load_optimizer(folder, self._masters.optimizer)
        self._masters.from_state()
        return checkpoints.load_state(folder)

    def _accumulate(self, pack: Pack, num_tokens: int, totals: dict[str, Tensor | float]) -> None:
        hidden = packed_hidden(
            self.model,
            pack,
            layers=self._layers,
            recompute=self._config.gradient_checkpointing,
        ).index_select(0, pack.index)
        # The head's gradient is taken chunk by chunk: the logits of a pack never exist at once.
        grad = torch.empty_like(hidden)
        for first in range(0, hidden.shape[0], HEAD_CHUNK):
            part = slice(first, first + HEAD_CHUNK)
            leaf = hidden[part].detach().requires_grad_()
            logprobs, entropy = self._head(self.model.lm_head(leaf), pack.target[part])
            losses = self._losses(logprobs, entropy, pack, part)
            torch.autograd.backward(losses.loss / num_tokens)
            assert leaf.grad is not None
            grad[part] = leaf.grad
            totals["loss"] += losses.loss.detach()
            totals["clip_share"] += losses.clipped
            totals["approx_kl"] += losses.kl
            totals["entropy"] += entropy.detach().sum()
        torch.autograd.backward(hidden, grad)
        totals["tokens"] += hidden.shape[0]
        totals["packed_tokens"] += pack.num_real

    def _losses(self, logprobs: Tensor, entropy: Tensor, pack: Pack, part: slice) -> TokenLoss:
        return sum_losses(
            logprobs,
            entropy,
            pack.old_logprobs[part],
            pack.advantages[part],
            pack.weights[part],
            clip=self._config.clip_ratio,
            dual_clip=self._config.dual_clip,
            entropy_coef=self._config.entropy_coef,
        )

    def _means(self, totals: dict[str, Tensor | float]) -> dict[str, float]:
        values = {name: float(value) for name, value in totals.items()}
        tokens, packed = values.pop("tokens"), values.pop("packed_tokens")
        norm = values.pop("grad_norm") / self._config.num_minibatches
        means = {name: value / tokens for name, value in values.items()}
        metrics = {
            **means,
            "grad_norm": norm,
            "trained_tokens": tokens,
            "packed_tokens": packed,
        }
        if self._device.type == "cuda":
            metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return metrics

    def _rest_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.sleep()


class MasterWeights:
    """AdamW on float32 copies of the parameters; gradients are summed in float32.

    Where the model itself is float32, it is its own master.
    """

    def __init__(self, model: Any, config: TrainingConfig) -> None:
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._own = any(p.dtype != torch.float32 for p in self._params)
        self._masters = (
            [p.detach().float().clone().requires_grad_() for p in self._params]
            if self._own
            else self._params
        )
        self.optimizer = torch.optim.AdamW(
            self._masters,
            lr=config.lr,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            **({"fused": True} if self._params[0].is_cuda else {"foreach": True}),
        )
        if self._own:
            for parameter, master in zip(self._params, self._masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_adder(master))

    def zero_grad(self) -> None:
        """Drop the gradients: 4 bytes a parameter that exist from a backward pass to here."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, max_norm: float) -> float:
        """Clip, step, copy back. Raises FloatingPointError for a gradient that is not finite."""
        norm = clip_gradient(self._masters, max_norm)
        self.optimizer.step()
        self._copy_back()
        return norm

    def as_state(self) -> _MasterState:
        return _MasterState(self.optimizer, self._masters if self._own else [])

    def from_state(self) -> None:
        """Take masters and moments from a loaded optimizer state, on their devices."""
        for master in self._masters:
            state = self.optimizer.state[master]
            saved = state.pop(_MASTER, None)
            for name, value in state.items():
                state[name] = value.to(master.device)
            if saved is not None:
                master.data.copy_(saved)
        self._copy_back()

    def _copy_back(self) -> None:
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self._masters)


class _MasterState:
    """Inside the block the optimizer's state holds the master weights too."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._masters = masters

    def __enter__(self) -> None:
        for master in self._masters:
            self._optimizer.state[master][_MASTER] = master.detach()

    def __exit__(self, *_: object) -> None:
        for master in self._masters:
            del self._optimizer.state[master][_MASTER]


class FrozenScorer:
    """A teacher that only scores: an `Engine` without sampling, by packed forward passes."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, compiled: bool = False) -> None:
        self._model = model.eval().requires_grad_(False)
        self._pad = int(tokenizer.pad_token_id)
        self._max_tokens = max_tokens
        self._layers = _compiled(model) if compiled else None

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return packed_scores(self._model, requests, self._max_tokens, self._pad, self._layers)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        raise NotImplementedError("a frozen scorer does not sample; use a sampling engine")

    def load_weights(self, checkpoint: CheckpointRef) -> None:
        raise NotImplementedError("a frozen scorer keeps its weights; make another one")

    def end_conversations(self) -> None: ...


def packed_scores(
    model: Any,
    requests: Sequence[ScoreRequest],
    max_tokens: int,
    pad_id: int,
    layers: Sequence[Any] | None = None,
) -> list[tuple[float, ...]]:
    """Log-probabilities (temperature 1) in the requests' order; equal sequences run once."""
    device = next(model.parameters()).device
    samples = uncredited(requests)
    packs = list(make_packs(samples, max_tokens, pad_id))
    parts = []
    with torch.no_grad():
        for pack in [pack.to(device) for pack in packs]:
            hidden = packed_hidden(model, pack, layers=layers).index_select(0, pack.index)
            for first in range(0, hidden.shape[0], HEAD_CHUNK):
                part = slice(first, first + HEAD_CHUNK)
                logits = model.lm_head(hidden[part]).float()
                chosen = logits.gather(1, pack.target[part].unsqueeze(1)).squeeze(1)
                parts.append(chosen - torch.logsumexp(logits, dim=-1))
        values = torch.cat(parts).tolist() if parts else []
    found: dict[Owner, tuple[float, ...]] = {}
    start = 0
    for sample in (sample for pack in packs for sample in pack.samples):
        end = start + len(sample.token_ids)
        found[sample.owner] = tuple(values[start:end])
        start = end
    return [found[sample.owner] for sample in samples]


def _compiled(model: Any) -> list[Any]:
    return [torch.compile(layer, dynamic=True) for layer in model.model.layers]


def _adder(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add
