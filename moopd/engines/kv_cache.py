"""Keys and values of many conversations in one buffer, for transformers' attention layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class KVCache:
    """Preallocated (rows, heads, columns, dim) per layer; the next forward writes at `length`.

    Rows are ragged: `valid` (rows, columns) says which columns hold a token of the row.
    """

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], valid: Tensor, length: int
    ) -> None:
        self.keys = keys
        self.values = values
        self.valid = valid
        self.length = length

    @classmethod
    def of(cls, kept: Sequence[Tensor], extra: int) -> KVCache:
        """From one (length, 2 * layers, heads, dim) tensor per row, with `extra` free columns."""
        lengths = torch.tensor([len(row) for row in kept])
        width = max(len(row) for row in kept)
        _, planes, heads, dim = kept[0].shape
        buffers = []
        # Plane by plane, so that no second copy of everything exists at once.
        for plane in range(planes):
            packed = pad_sequence([row[:, plane] for row in kept], batch_first=True)
            buffer = packed.new_zeros(len(kept), heads, width + extra, dim)
            buffer[:, :, :width] = packed.transpose(1, 2)
            buffers.append(buffer)
        valid = torch.zeros(len(kept), width + extra, dtype=torch.bool)
        valid[:, :width] = torch.arange(width) < lengths.unsqueeze(1)
        return cls(buffers[0::2], buffers[1::2], valid.to(kept[0].device), width)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Called by an attention layer: write the new columns, return all so far."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def select(self, rows: Tensor) -> None:
        """Keep `rows` only (or repeat them)."""
        for planes in (self.keys, self.values):
            for layer, plane in enumerate(planes):
                planes[layer] = plane.index_select(0, rows)
        self.valid = self.valid.index_select(0, rows)

    def row(self, number: int) -> Tensor:
        """The valid columns of one row as (length, 2 * layers, heads, dim)."""
        columns = self.valid[number, : self.length].nonzero().squeeze(1)
        planes = [
            plane[number].index_select(1, columns).transpose(0, 1)
            for pair in zip(self.keys, self.values, strict=True)
            for plane in pair
        ]
        return torch.stack(planes, dim=1)
