"""Passages on disk in shards, read by position without holding them in memory."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from moopd.retrieval.artefact import finished
from moopd.retrieval.corpus import from_line, to_line
from moopd.types import Passage

_LINES, _OFFSETS = "passages-{:05d}.jsonl", "passages-{:05d}.offsets.npy"


class PassageWriter:
    """Writes one shard in pieces; both files appear when `close` is called."""

    def __init__(self, folder: Path, shard: int) -> None:
        self._lines = folder / _LINES.format(shard)
        self._offsets_file = folder / _OFFSETS.format(shard)
        self._offsets = [0]
        self._part = self._lines.with_name(self._lines.name + ".writing")
        self._stream = self._part.open("wb")

    def write(self, passages: Iterable[Passage]) -> None:
        for passage in passages:
            self._offsets.append(self._offsets[-1] + self._stream.write(to_line(passage)))

    def close(self) -> None:
        self._stream.close()
        with finished(self._lines) as temporary:
            self._part.rename(temporary)
        with finished(self._offsets_file) as temporary, temporary.open("wb") as stream:
            np.save(stream, np.array(self._offsets, np.int64), allow_pickle=False)


class PassageStore:
    """The passages of an index, by corpus position."""

    def __init__(self, folder: Path, num_shards: int) -> None:
        self._offsets = [
            np.load(folder / _OFFSETS.format(shard), mmap_mode="r", allow_pickle=False)
            for shard in range(num_shards)
        ]
        self._lines = [_mapped(folder / _LINES.format(shard)) for shard in range(num_shards)]
        sizes = [len(offsets) - 1 for offsets in self._offsets]
        self._starts = np.cumsum([0, *sizes]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, position: int) -> Passage:
        if not 0 <= position < len(self):
            raise IndexError(f"passage {position}: got a position outside 0..{len(self) - 1}")
        shard = bisect_right(self._starts, position) - 1
        row = position - self._starts[shard]
        offsets = self._offsets[shard]
        return from_line(self._lines[shard][int(offsets[row]) : int(offsets[row + 1])])

    def many(self, positions: Sequence[int]) -> list[Passage]:
        return [self[position] for position in positions]


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
