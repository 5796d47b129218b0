"""Samples -> tensors. Identical and prefix-sharing samples share one row.

A later turn of a conversation begins with the earlier one, so one forward pass over the longest
sequence yields the log-probabilities of both. Each sample's tokens are then gathered apart, with
their own advantage: merging changes neither loss, nor denominators, nor entropy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moopd.engines.rows import merge_prefixes
from moopd.types import Owner, Role, ScoreRequest, TrainingSample

_LENGTH_SPREAD = 1.2


@dataclass(frozen=True)
class Microbatch:
    """`input_ids` (B, T) right-padded; the rest (N,), one entry per trained token of a sample.

    `row`, `position`: where the logits that predict the token stand (position of its predecessor).
    """

    input_ids: Tensor
    row: Tensor
    position: Tensor
    target: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    samples: tuple[TrainingSample, ...]
    """Whose tokens the flat vectors hold, one sample after the other."""

    @property
    def num_tokens(self) -> int:
        return int(self.target.numel())


def split_minibatches(
    samples: Sequence[TrainingSample], num_minibatches: int, seed: int
) -> list[list[TrainingSample]]:
    """One epoch over `num_minibatches` parts of whole workflows, shuffled by `seed`.

    The parts depend on which workflows there are, not on the order of `samples`.
    """
    by_workflow: dict[tuple[str, int], list[TrainingSample]] = {}
    for sample in samples:
        key = (sample.owner.question_id, sample.owner.group_index)
        by_workflow.setdefault(key, []).append(sample)
    if len(by_workflow) < num_minibatches:
        raise ValueError(
            f"{len(by_workflow)} workflows cannot fill {num_minibatches} minibatches; "
            "raise training.questions_per_step or lower training.num_minibatches"
        )
    keys = sorted(by_workflow)
    order = np.random.default_rng(seed).permutation(len(keys))
    parts = np.array_split(order, num_minibatches)
    return [[s for index in part for s in by_workflow[keys[index]]] for part in parts]


def microbatches(
    samples: Sequence[TrainingSample], max_tokens: int, pad_id: int, *, merge: bool = True
) -> Iterator[Microbatch]:
    """Length-sorted microbatches of at most `max_tokens` padded tokens (one long row at least)."""
    rows = merge_rows(samples, merge)
    rows.sort(key=lambda row: (len(row.ids), row.ids))
    block: list[Row] = []
    for row in rows:
        longest = len(row.ids)
        too_big = longest * (len(block) + 1) > max_tokens
        too_uneven = bool(block) and longest > _LENGTH_SPREAD * len(block[0].ids) + 4
        if block and (too_big or too_uneven):
            yield _tensors(block, pad_id)
            block = []
        block.append(row)
    if block:
        yield _tensors(block, pad_id)


def uncredited(requests: Sequence[ScoreRequest]) -> list[TrainingSample]:
    """Samples that are only scored: zeros for credit, an owner of its own for each."""
    samples = []
    for number, request in enumerate(requests):
        zeros = (0.0,) * len(request.token_ids)
        owner = Owner("", number, 0, 0, Role.SEARCHER)
        samples.append(TrainingSample(owner, request.prompt_ids, request.token_ids, zeros, zeros))
    return samples


@dataclass
class Row:
    """One sequence and the samples that it holds, each a prefix of it."""

    ids: tuple[int, ...]
    samples: list[TrainingSample]


def merge_rows(samples: Sequence[TrainingSample], merge: bool) -> list[Row]:
    """Distinct rows; a sample whose sequence begins another one rides in its row."""
    sequences = [(*sample.prompt_ids, *sample.token_ids) for sample in samples]
    if not merge:
        return [Row(ids, [sample]) for ids, sample in zip(sequences, samples, strict=True)]
    merged, row_of = merge_prefixes(sequences)
    rows = [Row(ids, []) for ids in merged]
    for sample, row in zip(samples, row_of, strict=True):
        rows[row].samples.append(sample)
    return rows


def _tensors(rows: Sequence[Row], pad_id: int) -> Microbatch:
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    index: list[int] = []
    position: list[int] = []
    target: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = row.ids
        for sample in row.samples:
            start = len(sample.prompt_ids)
            index.extend([number] * len(sample.token_ids))
            position.extend(range(start - 1, start - 1 + len(sample.token_ids)))
            target.extend(sample.token_ids)
            old.extend(sample.old_logprobs)
            advantages.extend(sample.advantages)
            weights.extend(sample.rollout_weights or [1.0] * len(sample.token_ids))
    return Microbatch(
        input_ids=torch.from_numpy(ids),
        row=torch.tensor(index),
        position=torch.tensor(position),
        target=torch.tensor(target),
        old_logprobs=torch.tensor(old, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        samples=tuple(sample for row in rows for sample in row.samples),
    )
