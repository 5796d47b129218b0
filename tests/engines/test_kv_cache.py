"""Rules: rows keep their own columns; old memory is never seen; finished rows cost the copy."""

from __future__ import annotations

import torch
from torch import Tensor

from moopd.engines.kv_cache import KVCache, Workspace


def workspace() -> Workspace:
    return Workspace(torch.float32, torch.device("cpu"))


def planes(length: int, value: float) -> Tensor:
    """Two layers, one head of 3 numbers: (4, 1, length, 3), the column number in its decimals."""
    columns = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1) / 10
    return (value + columns).expand(4, 1, length, 3).contiguous()


def test_rows_come_back_as_they_went_in() -> None:
    kept = [planes(2, 1), planes(0, 0), planes(3, 2)]
    cache = KVCache.of(kept, 2, workspace())
    # row 0: k k . | free free     row 1: . . . | free free     row 2: k k k | free free
    assert cache.valid.tolist() == [
        [True, True, False, False, False],
        [False, False, False, False, False],
        [True, True, True, False, False],
    ]
    assert cache.length == 3
    for number, row in enumerate(kept):
        assert torch.equal(cache.row(number), row)


def test_candidates_of_one_prompt_each_get_its_columns() -> None:
    prompt, other = planes(2, 1), planes(2, 5)
    cache = KVCache.of([prompt, prompt, other, prompt], 1, workspace())
    for number, row in enumerate([prompt, prompt, other, prompt]):
        assert torch.equal(cache.row(number), row)


def test_an_update_writes_the_next_columns_of_its_layer_only() -> None:
    cache = KVCache.of([planes(2, 1)], 2, workspace())
    keys, values = cache.update(torch.full((1, 1, 1, 3), 7.0), torch.full((1, 1, 1, 3), 8.0), 1)
    assert keys[0, 0, :, 0].tolist() == [1.0, torch.tensor(1.1).item(), 7.0]
    assert values[0, 0, :, 0].tolist() == [1.0, torch.tensor(1.1).item(), 8.0]
    assert cache.planes[0, 0, 0, 2].tolist() == [0.0, 0.0, 0.0]


def test_the_last_rows_move_into_the_gaps() -> None:
    # rows 0 1 2 3 4, of which 1 3 4 go on: row 0 is a gap for 3, row 2 one for 4
    kept = [planes(length, value) for length, value in ((1, 1), (2, 2), (1, 3), (3, 4), (2, 5))]
    cache = KVCache.of(kept, 1, workspace())
    assert cache.compact([1, 3, 4]) == [3, 1, 4]
    assert cache.planes.shape[1] == 3
    for place, old in enumerate([3, 1, 4]):
        assert torch.equal(cache.row(place), kept[old])


def test_memory_is_used_again_and_grows_clean() -> None:
    space = workspace()
    KVCache.of([planes(3, 9)], 1, space)
    first = space.take(4)
    assert space.take(2).data_ptr() == first.data_ptr()
    assert torch.equal(space.take(1000), torch.zeros(1000))


def test_a_large_memory_is_given_back_between_rollouts_and_a_small_one_stays() -> None:
    space = workspace()
    small = space.take(8).fill_(3.0)
    space.rest()
    assert torch.equal(space.take(8), small)
    space.take((1 << 25) + 1)  # float32: 4 bytes above 128 MiB
    space.rest()
    assert torch.equal(space.take(8), torch.zeros(8))
