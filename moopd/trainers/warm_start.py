"""Warm start: supervised training of a base policy on scripted traces (small scales).

Not part of the paper, whose base is an instruct model that follows the format already.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moopd.config import WarmStartConfig
from moopd.engines.models import recompute_layers
from moopd.trainers.traces import TraceSequence

_WARMUP_SHARE = 0.05
_LOG_EVERY = 20
_NUM_DRILLS = 6000
_DRILL_LENGTHS = (6, 24)


def warm_start(
    model: Any,
    pad_id: int,
    sequences: Sequence[TraceSequence],
    config: WarmStartConfig,
    seed: int,
    log: Callable[[int, dict[str, float]], None],
) -> None:
    """Train `model` in place: AdamW, cosine; tokens not generated weigh `context_weight`.

    Raises ValueError when there is nothing to train on.
    """
    if not sequences:
        raise ValueError("no warm-start traces; check the questions and their supporting passages")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _rate(s, config.steps))
    batches = _schedule(sequences, config, int(model.config.vocab_size), seed)
    if config.gradient_checkpointing:
        recompute_layers(model)
    log_every = max(1, min(_LOG_EVERY, config.steps // 4))
    model.train()
    for step in range(1, config.steps + 1):
        loss = _loss(model, next(batches), pad_id, config.context_weight)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % log_every == 0 or step == config.steps:
            log(step, {"warm_start/loss": loss.item()})
    model.eval()


def _rate(step: int, total: int) -> float:
    warmup = max(1, round(total * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _schedule(
    sequences: Sequence[TraceSequence], config: WarmStartConfig, vocab_size: int, seed: int
) -> Iterator[list[TraceSequence]]:
    """Drills first, then traces with a share of drills among them."""
    rng = random.Random(seed)
    traces = _batches(sequences, config.tokens_per_batch, seed)
    drills = _batches(_drills(vocab_size, rng), config.tokens_per_batch, seed)
    for _ in range(config.drill_steps):
        yield next(drills)
    while True:
        yield next(drills if rng.random() < config.drill_share else traces)


def _drills(vocab_size: int, rng: random.Random) -> list[TraceSequence]:
    """Random words said three times: the second and third time they can be copied."""
    drills = []
    for _ in range(_NUM_DRILLS):
        length = rng.randrange(*_DRILL_LENGTHS)
        words = tuple(rng.randrange(vocab_size) for _ in range(length))
        drills.append(TraceSequence(words * 3, (False,) * length + (True,) * (2 * length)))
    return drills


def _batches(
    sequences: Sequence[TraceSequence], max_tokens: int, seed: int
) -> Iterator[list[TraceSequence]]:
    """Batches of like lengths, in an order shuffled anew each epoch; never ends."""
    rng = random.Random(seed)
    while True:
        order = sorted(sequences, key=lambda s: (len(s.ids), rng.random()))
        batches: list[list[TraceSequence]] = [[]]
        for sequence in order:
            if len(sequence.ids) * (len(batches[-1]) + 1) > max_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(sequence)
        rng.shuffle(batches)
        yield from batches


def _loss(
    model: Any, batch: Sequence[TraceSequence], pad_id: int, context_weight: float
) -> torch.Tensor:
    """Weighted mean of the next-token loss; padding weighs nothing."""
    device = next(model.parameters()).device
    width = max(len(sequence.ids) for sequence in batch)
    ids = torch.full((len(batch), width), pad_id)
    weights = torch.zeros(len(batch), width)
    for row, sequence in enumerate(batch):
        ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
        weights[row, : len(sequence.ids)] = torch.where(
            torch.tensor(sequence.generated), 1.0, context_weight
        )
    ids, weights = ids.to(device), weights.to(device)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = weights[:, 1:] > 0
    logits = model.lm_head(hidden[:, :-1][chosen])
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    kept = weights[:, 1:][chosen]
    return (losses * kept).sum() / kept.sum()
