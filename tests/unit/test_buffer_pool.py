"""Memory of a pool: used again when nobody looks at it, whatever kind of view it is, and never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.ops.buffer_pool import BufferPool

SIZE = 1 << 18


def place(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    "hold",
    [
        lambda a: a,
        lambda a: a[5:6],
        lambda a: a.reshape(2, -1).T,
        torch.from_numpy,
        lambda a: torch.from_numpy(a)[3:4].view(2, 2),
        lambda a: memoryview(a),
    ],
    ids=["itself", "a part", "another shape", "a tensor", "a view of a tensor", "a memoryview"],
)
def test_memory_that_is_looked_at_stays(hold: Callable[[Any], Any]) -> None:
    pool = BufferPool()
    array = pool.empty((SIZE // 32, 4), np.int64)
    first = place(array)
    held = hold(array)
    del array
    other = pool.empty((SIZE // 32, 4), np.int64)
    assert place(other) != first
    del held
    assert place(pool.empty(SIZE // 4, np.float32)) == first


def test_the_smallest_that_fits_is_taken() -> None:
    pool = BufferPool()
    arrays = [pool.empty(SIZE * factor, np.uint8) for factor in (3, 1, 2)]
    places = [place(array) for array in arrays]
    arrays.clear()
    assert place(pool.empty(SIZE, np.uint8)) == places[1]
    assert place(pool.empty(SIZE * 2 - 5, np.uint8)) == places[2]
    assert place(pool.empty(SIZE // 2, np.uint8)) in places
    assert place(pool.empty(SIZE * 9, np.uint8)) not in places


def test_more_than_it_keeps_is_handed_out_all_the_same() -> None:
    pool = BufferPool(max_buffers=1)
    arrays = [pool.empty(SIZE, np.uint8) for _ in range(3)]
    assert len({place(array) for array in arrays}) == 3
    first = place(arrays[0])
    arrays.clear()
    assert place(pool.empty(SIZE, np.uint8)) == first
