"""Packed sequences through a transformers decoder: no padding, no mask, shared prefixes once.

Tokens stand one after the other on one axis; attention is told which of them each sequence is made
of. On a GPU that is torch's own variable-length flash attention, elsewhere scaled dot products
sequence by sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moopd.rl.batch import Row, merge_rows
from moopd.types import TrainingSample

ATTENTION = "moopd_packed"
_ALIGN = 64
"""Packs are filled up to this multiple with one sequence of pad tokens: matrix units want it."""
_LENGTH_STEP = 256
"""The longest lengths are rounded up to it, so that compiled layers see few values."""
_MIN_SHARED = 32
"""A shorter common prefix is cheaper computed twice than looked up."""


@dataclass(frozen=True)
class Pack:
    """`input_ids`, `positions` (N,): every distinct token once; a sequence is a path through them.

    `starts_q` (B+1,): where each segment of own tokens begins. `starts_k` (B+1,), `path` (K,): the
    tokens each segment may look back on, its own last; `path` is None where nothing is shared.
    The rest (M,), one per trained token; `index`: where the logits stand that predict it.
    """

    input_ids: Tensor
    positions: Tensor
    starts_q: Tensor
    starts_k: Tensor
    path: Tensor | None
    max_q: int
    max_k: int
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


class Looks(NamedTuple):
    """What attention needs of a pack; see `Pack`."""

    starts_q: Tensor
    starts_k: Tensor
    path: Tensor | None
    max_q: int
    max_k: int


@dataclass(frozen=True)
class _Segment:
    row: Row
    ids: NDArray[np.int64]
    shared: int
    """Length of the prefix that stands in the pack already, as that of the segment before."""


def make_packs(
    samples: Sequence[TrainingSample], max_tokens: int, pad_id: int, *, merge: bool = True
) -> Iterator[Pack]:
    """Packs of at most `max_tokens` own tokens (one longer sequence stands alone).

    With `merge`, a prefix that several sequences share stands and is computed once: system
    prompts, questions of one group, the prompt of five candidates.
    """
    block: list[_Segment] = []
    size = 0
    before = np.empty(0, dtype=np.int64)
    for row in sorted(merge_rows(samples, merge), key=lambda row: row.ids):
        ids = np.asarray(row.ids, dtype=np.int64)
        shared = _common_prefix(before, ids) if merge and block else 0
        if block and size + len(ids) - shared > max_tokens:
            yield _pack(block, pad_id)
            block, size, shared = [], 0, 0
        block.append(_Segment(row, ids, shared))
        size += len(ids) - shared
        before = ids
    if block:
        yield _pack(block, pad_id)


def _common_prefix(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    length = min(len(first), len(second) - 1)
    differs = np.flatnonzero(first[:length] != second[:length])
    common = int(differs[0]) if len(differs) else length
    return common if common >= _MIN_SHARED else 0


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
        "packed": Looks(pack.starts_q, pack.starts_k, pack.path, pack.max_q, pack.max_k),
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
    packed: Looks | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention along each path; (1, heads, N, D) -> (1, N, heads, D)."""
    assert packed is not None
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if packed.path is not None:
        take: Any = _Take.apply
        k, v = take(k, packed.path), take(v, packed.path)
    if q.is_cuda:
        return _varlen(q, k, v, packed, scaling).unsqueeze(0), None
    return _one_by_one(q, k, v, packed, scaling).unsqueeze(0), None


class _Take(torch.autograd.Function):
    """`source[index]`; a token's gradient is summed over its many readers in float32."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        (grad,) = grads
        total = grad.new_zeros((ctx.num_rows, *grad.shape[1:]), dtype=torch.float32)
        total.index_add_(0, index, grad.float())
        return total.to(grad.dtype), None


@lru_cache(maxsize=1)
def _varlen_arguments() -> dict[str, Any]:
    """torch 2.11 takes grouped key heads as they are; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


def _varlen(q: Tensor, k: Tensor, v: Tensor, looks: Looks, scaling: float | None) -> Tensor:
    """Flash attention; its causal mask ends at the last key, so a segment sees its whole path."""
    from torch.nn.attention.varlen import varlen_attn

    # Without `return_aux` the result is the output alone.
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        looks.starts_q,
        looks.starts_k,
        looks.max_q,
        looks.max_k,
        scale=scaling,
        **_varlen_arguments(),
    )
    return cast(Tensor, out)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, looks: Looks, scaling: float | None) -> Tensor:
    parts = []
    spans = zip(pairwise(looks.starts_q.tolist()), pairwise(looks.starts_k.tolist()), strict=True)
    for (first_q, last_q), (first_k, last_k) in spans:
        query = q[first_q:last_q].transpose(0, 1).unsqueeze(0)
        key, value = (t[first_k:last_k].transpose(0, 1).unsqueeze(0) for t in (k, v))
        num_q, num_k = last_q - first_q, last_k - first_k
        seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
        part = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _pack(segments: Sequence[_Segment], pad_id: int) -> Pack:
    owned = [len(segment.ids) - segment.shared for segment in segments]
    num_real = sum(owned)
    filler = -num_real % _ALIGN
    paths = _paths(segments, owned)
    flat = _flat_samples(segments, paths)
    ids = [segment.ids[segment.shared :] for segment in segments]
    positions = [np.arange(segment.shared, len(segment.ids)) for segment in segments]
    if filler:
        ids.append(np.full(filler, pad_id, dtype=np.int64))
        positions.append(np.arange(filler))
        owned.append(filler)
        paths.append(np.arange(num_real, num_real + filler))
    lengths = [len(path) for path in paths]
    return Pack(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        positions=torch.from_numpy(np.concatenate(positions)),
        starts_q=_starts(owned),
        starts_k=_starts(lengths),
        path=torch.from_numpy(np.concatenate(paths)) if owned != lengths else None,
        max_q=_round_up(max(owned)),
        max_k=_round_up(max(lengths)),
        num_real=num_real,
        samples=tuple(sample for segment in segments for sample in segment.row.samples),
        **flat,
    )


def _paths(segments: Sequence[_Segment], owned: Sequence[int]) -> list[NDArray[np.int64]]:
    """Where each sequence's tokens stand: the head of the path before it, then its own."""
    paths: list[NDArray[np.int64]] = []
    start = 0
    for segment, num_own in zip(segments, owned, strict=True):
        own = np.arange(start, start + num_own)
        paths.append(np.concatenate([paths[-1][: segment.shared], own]) if segment.shared else own)
        start += num_own
    return paths


def _flat_samples(
    segments: Sequence[_Segment], paths: Sequence[NDArray[np.int64]]
) -> dict[str, Tensor]:
    index: list[NDArray[np.int64]] = []
    target: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for segment, path in zip(segments, paths, strict=True):
        for sample in segment.row.samples:
            first = len(sample.prompt_ids) - 1
            index.append(path[first : first + len(sample.token_ids)])
            target.extend(sample.token_ids)
            old.extend(sample.old_logprobs)
            advantages.extend(sample.advantages)
            weights.extend(sample.rollout_weights or [1.0] * len(sample.token_ids))
    return {
        "index": torch.from_numpy(np.concatenate(index)),
        "target": torch.tensor(target),
        "old_logprobs": torch.tensor(old, dtype=torch.float32),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "weights": torch.tensor(weights, dtype=torch.float32),
    }


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _round_up(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
