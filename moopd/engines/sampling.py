"""Sampling whose randomness depends on (seed, candidate, position) alone, never on the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.uint64], candidates: npt.NDArray[np.uint64], position: int
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row: splitmix64 over seed, candidate and position."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(_mix(seeds) + candidates) + np.uint64(position))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def choose(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Token per row by inverse CDF. `logits` (B, V), the rest (B,); temperature 0 is greedy."""
    greedy = temperature == 0
    scaled = logits.double() / torch.where(greedy, 1.0, temperature.double()).unsqueeze(1)
    probabilities = torch.softmax(scaled, dim=-1)
    drawn = _invert(probabilities, uniform)
    nucleus = top_p < 1
    if bool(nucleus.any()):
        # Row by row, so that a row draws alike whatever top-p its neighbours have.
        drawn[nucleus] = _draw_nucleus(probabilities[nucleus], top_p[nucleus], uniform[nucleus])
    return torch.where(greedy, logits.argmax(-1), drawn.squeeze(1))


def _draw_nucleus(probabilities: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """From the smallest set of most probable tokens that holds at least `top_p`."""
    order = probabilities.argsort(dim=-1, descending=True, stable=True)
    ranked = probabilities.gather(1, order)
    before = ranked.cumsum(1) - ranked
    kept = torch.where(before < top_p.double().unsqueeze(1), ranked, 0.0)
    return order.gather(1, _invert(kept, uniform))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    cumulative = weights.cumsum(1)
    threshold = uniform.double().unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, threshold, right=True)
    # A threshold that rounds up to the total would fall behind the last token with any weight.
    last = (weights > 0).cumsum(1).argmax(1, keepdim=True)
    return torch.minimum(found, last)
