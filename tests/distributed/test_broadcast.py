"""Megatron's broadcast helpers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tdp_megatron.loops import broadcast_scalars, broadcast_tensor
from tdp_megatron.testing import run_ranks

pytestmark = pytest.mark.distributed


def test_scalars_and_tensors_arrive_exactly() -> None:
    def body(rank: int, world: int) -> tuple[list[int | float], list[int]]:
        group = dist.new_group([1, 2])
        dist.barrier()
        if rank == 0:
            return [], []
        mine = [2**24 + 1, -(2**62) - 3, 0.1, 7.0] if rank == 1 else [0, 0, 0, 0]
        values = broadcast_scalars(mine, group)
        item = torch.tensor([rank, 2**40 + rank])
        broadcast_tensor(item, 1, group)
        broadcast_tensor(None, 1, group)
        return values, item.tolist()

    results = run_ranks(body, 3)
    for values, item in results[1:]:
        assert values == [2**24 + 1, -(2**62) - 3, 0.1, 7.0]
        assert [type(v) for v in values] == [int, int, float, float]
        assert item == [1, 2**40 + 1]


def test_numbers_of_other_libraries_and_unusual_floats() -> None:
    values: list[Any] = [np.int64(2**53 + 1), torch.tensor(2**62 + 1), 2**63 - 1, -(2**63), np.float32(0.5), True]
    values += [math.nan, math.inf, -0.0, 5e-324]

    def body(rank: int, world: int) -> list[int | float]:
        assert broadcast_scalars([], dist.group.WORLD) == []
        return broadcast_scalars(values if rank == 0 else [0] * len(values), dist.group.WORLD)

    for got in run_ranks(body, 2):
        assert got[:6] == [2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63), 0.5, 1.0]
        assert [type(v) for v in got] == [int] * 4 + [float] * 6
        assert math.isnan(got[6])
        assert got[7:] == [math.inf, 0.0, 5e-324]
        assert math.copysign(1, got[8]) == -1


@pytest.mark.parametrize(
    ("value", "error", "message"), [(2**63, ValueError, "9223372036854775808 is more"), (None, TypeError, "NoneType")]
)
def test_what_cannot_be_sent_is_told_to_all(value: Any, error: type[Exception], message: str) -> None:
    """Only the first rank looks at its values; the others would wait for it."""

    def body(rank: int, world: int) -> None:
        wanted, text = (error, message) if rank == 0 else (ValueError, "rank 0 cannot broadcast its value 1")
        with pytest.raises(wanted, match=text):
            broadcast_scalars([7, value, 1], dist.group.WORLD)
        assert broadcast_scalars([rank], dist.group.WORLD) == [0]

    run_ranks(body, 2)
