"""Megatron's broadcast helpers."""

from __future__ import annotations

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
