"""Packed sequences through a transformers decoder: no padding, no mask, logits in chunks.

Sequences stand one after the other on one axis; attention sees where each begins. On a GPU that
is torch's own variable-length flash attention, elsewhere scaled dot products sequence by sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moopd.rl.batch import Row, merge_rows
from moopd.types import TrainingSample

ATTENTION = "moopd_packed"
_ALIGN = 64
"""Packs are filled up to this multiple with one sequence of pad tokens: matrix units want it."""
_LENGTH_STEP = 256
"""`max_seqlen` is rounded up to it, so that compiled layers see few values."""


@dataclass(frozen=True)
class Pack:
    """`input_ids`, `positions` (N,); `starts` (B+1,) int32; the rest (M,), one per trained token.

    `index`: where on the packed axis the logits stand that predict the token.
    """

    input_ids: Tensor
    positions: Tensor
    starts: Tensor
    max_seqlen: int
    num_real: int
    index: Tensor
    target: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    samples: tuple[TrainingSample, ...]

    def to(self, device: torch.device) -> Pack:
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Pack(**{**vars(self), **moved})


def make_packs(
    samples: Sequence[TrainingSample], max_tokens: int, pad_id: int, *, merge: bool = True
) -> Iterator[Pack]:
    """Packs of about equal size, at most `max_tokens` long (one longer sequence stands alone)."""
    rows = sorted(merge_rows(samples, merge), key=lambda row: (-len(row.ids), row.ids))
    bins: list[list[Row]] = []
    free: list[int] = []
    for row in rows:
        place = next((k for k, room in enumerate(free) if room >= len(row.ids)), None)
        if place is None:
            bins.append([])
            free.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(row)
        free[place] -= len(row.ids)
    for rows_of_pack in bins:
        yield _pack(rows_of_pack, pad_id)


def packed_hidden(
    model: Any, pack: Pack, *, layers: Sequence[Any] | None = None, recompute: bool = False
) -> Tensor:
    """Last hidden states (N, H) of a pack that lies on the model's device."""
    body = model.model
    hidden = body.embed_tokens(pack.input_ids.unsqueeze(0))
    positions = pack.positions.unsqueeze(0)
    arguments = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": body.rotary_emb(hidden, position_ids=positions),
        "packed_starts": pack.starts,
        "packed_max": pack.max_seqlen,
    }
    for layer in layers or body.layers:
        if recompute:
            # The second forward runs during backward: the block must open around it as well.
            hidden = checkpoint(_run_layer, model, layer, hidden, arguments, use_reentrant=False)
        else:
            hidden = _run_layer(model, layer, hidden, arguments)
    normed: Tensor = body.norm(hidden)[0]
    return normed


def _run_layer(model: Any, layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> Any:
    with packed_attention(model):
        return layer(hidden, **arguments)


def logprobs_and_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of `target` (M,) under `logits` (M, V), and the entropy in nats; one log-softmax for both."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    chosen = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """The model's attention is ours inside the block; outside it samples as before."""
    _register()
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"model has attention layers {sorted(kinds)}, the packed trainer knows full attention "
            "alone; set training.trainer to torch"
        )
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


@lru_cache(maxsize=1)
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_starts: Tensor | None = None,
    packed_max: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence; (1, heads, N, D) -> (1, N, heads, D)."""
    assert packed_starts is not None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if q.is_cuda:
        out = _varlen(q, k, v, packed_starts, packed_max, scaling)
    else:
        out = _one_by_one(q, k, v, packed_starts.tolist(), scaling)
    return out.unsqueeze(0), None


@lru_cache(maxsize=1)
def _varlen_arguments() -> dict[str, Any]:
    """torch 2.11 takes grouped key heads as they are; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Without `return_aux` the result is the output alone.
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        **_varlen_arguments(),
    )
    return cast(Tensor, out)


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], scaling: float | None
) -> Tensor:
    parts = []
    for first, last in pairwise(starts):
        query, key, value = (t[first:last].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        part = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _pack(rows: Sequence[Row], pad_id: int) -> Pack:
    lengths = [len(row.ids) for row in rows]
    num_real = sum(lengths)
    filler = -num_real % _ALIGN
    if filler:
        lengths.append(filler)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    index: list[int] = []
    target: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for start, row in zip(starts, rows, strict=False):
        for sample in row.samples:
            first = int(start) + len(sample.prompt_ids) - 1
            index.extend(range(first, first + len(sample.token_ids)))
            target.extend(sample.token_ids)
            old.extend(sample.old_logprobs)
            advantages.extend(sample.advantages)
            weights.extend(sample.rollout_weights or [1.0] * len(sample.token_ids))
    ids = [token for row in rows for token in row.ids] + [pad_id] * filler
    return Pack(
        input_ids=torch.tensor(ids),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        starts=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=-(-max(lengths) // _LENGTH_STEP) * _LENGTH_STEP,
        num_real=num_real,
        index=torch.tensor(index),
        target=torch.tensor(target),
        old_logprobs=torch.tensor(old, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        samples=tuple(sample for row in rows for sample in row.samples),
    )
