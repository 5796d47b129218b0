"""Keys and values of conversations that may go on, within a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Key = tuple[int, int]
Ids = tuple[int, ...]


@dataclass
class _Kept:
    ids: Ids
    planes: Tensor
    call: int

    @property
    def num_bytes(self) -> int:
        return self.planes.numel() * self.planes.element_size()


class Conversations:
    """What was computed of each conversation: planes (2 * layers, heads, length, dim) of `ids`.

    A conversation that is not kept is computed again, so the budget never changes a result.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[Key, _Kept] = {}
        self._num_bytes = 0
        self._call = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def begin_call(self) -> None:
        """One engine call; what is used or kept in it is not thrown out by its neighbours."""
        self._call += 1

    def past(self, key: Key | None, prompt_ids: Ids) -> Tensor | None:
        """Planes of the longest usable prefix; None where the kept ids are no prefix of it."""
        kept = self._kept.get(key) if key is not None else None
        if kept is None:
            return None
        # The last prompt token is always computed anew: its logits are needed.
        limit = min(len(kept.ids), len(prompt_ids) - 1)
        if kept.ids[:limit] != prompt_ids[:limit]:
            return None
        kept.call = self._call
        return kept.planes[:, :, :limit]

    def keep(self, key: Key, ids: Ids, planes: Tensor) -> None:
        """Keep in place of what the key had, at the cost of what was not used for longest.

        Where all the rest belongs to this very call the new one is let go: lock-step drivers come
        back to all conversations in turn, and throwing out the neighbours would lose every one.
        """
        if len(ids) != planes.shape[2]:
            raise ValueError(
                f"conversation {key} has {len(ids)} ids but keys and values of {planes.shape[2]}; "
                "the last sampled token was never fed, leave it out"
            )
        self._drop(key)
        entry = _Kept(ids, planes, self._call)
        idle = sorted((k for k, v in self._kept.items() if v.call < self._call), key=self._age)
        for other in idle:
            if self._num_bytes + entry.num_bytes <= self._max_bytes:
                break
            self._drop(other)
        if self._num_bytes + entry.num_bytes <= self._max_bytes:
            self._kept[key] = entry
            self._num_bytes += entry.num_bytes

    def clear(self) -> None:
        self._kept.clear()
        self._num_bytes = 0

    def _age(self, key: Key) -> int:
        return self._kept[key].call

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes
