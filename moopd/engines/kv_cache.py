"""Keys and values of many conversations in one buffer, for transformers' attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

_WARM_BYTES = 1 << 27


class Workspace:
    """Memory that one cache after another lives in: fresh pages each time cost more than the copy.

    What an earlier cache left is masked; it must be finite, since 0 * NaN would not be 0.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        if size > len(self._memory):
            self.clear()
            self._memory = self._memory.new_zeros(size)
        return self._memory[:size].view(shape)

    def rest(self) -> None:
        """Between rollouts: a large memory is given back, a small one stays warm."""
        if self._memory.numel() * self._memory.element_size() > _WARM_BYTES:
            self.clear()

    def clear(self) -> None:
        self._memory = self._memory.new_zeros(0)


class KVCache:
    """`planes` (2 * layers, rows, heads, columns, dim); the next forward writes at `length`.

    Keys of a layer at 2 * layer, its values behind. Rows are ragged: `valid` (rows, columns) says
    which columns hold a token of the row.
    """

    def __init__(self, planes: Tensor, valid: Tensor, length: int) -> None:
        self.planes = planes
        self.valid = valid
        self.length = length

    @classmethod
    def of(cls, kept: Sequence[Tensor], extra: int, workspace: Workspace) -> KVCache:
        """From one (2 * layers, heads, length, dim) tensor per row, with `extra` free columns."""
        lengths = torch.tensor([row.shape[2] for row in kept])
        width = int(lengths.max())
        num_planes, heads, _, dim = kept[0].shape
        planes = workspace.take(num_planes, len(kept), heads, width + extra, dim)
        start = 0
        for _, same in groupby(kept, key=id):  # candidates of one prompt stand side by side
            rows = list(same)
            end = start + len(rows)
            planes[:, start:end, :, : rows[0].shape[2]] = rows[0].unsqueeze(1)
            start = end
        valid = torch.arange(width + extra) < lengths.unsqueeze(1)
        return cls(planes, valid.to(planes.device), width)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Called by an attention layer: write the new columns, return all so far."""
        end = self.length + keys.shape[2]
        of_layer = self.planes[2 * layer : 2 * layer + 2]
        of_layer[0, :, :, self.length : end] = keys
        of_layer[1, :, :, self.length : end] = values
        return of_layer[0, :, :, :end], of_layer[1, :, :, :end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def compact(self, going: Sequence[int]) -> list[int]:
        """Keep the rows `going` (ascending); the last of them move into the gaps.

        Returns which old row now stands at each place: the cost is that of the finished rows, not
        of all that go on.
        """
        count = len(going)
        stay = set(going)
        gaps = [row for row in range(count) if row not in stay]
        movers = [row for row in going if row >= count]
        order = list(range(count))
        for gap, mover in zip(gaps, movers, strict=True):
            self.planes[:, gap, :, : self.length] = self.planes[:, mover, :, : self.length]
            order[gap] = mover
        self.planes = self.planes[:, :count]
        self.valid = self.valid[torch.tensor(order, device=self.valid.device)]
        return order

    def row(self, number: int) -> Tensor:
        """The valid columns of one row as (2 * layers, heads, length, dim)."""
        columns = self.valid[number, : self.length].nonzero().squeeze(1)
        return self.planes[:, number].index_select(2, columns)
