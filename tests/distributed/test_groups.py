"""Groups follow the DP x CP order they are given, whatever the ranks' numbers are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.distributed import DpCpGroups, require_equal
from tdp_megatron.distributed.collectives import all_gather_rows, all_to_all_bytes, broadcast_bytes, gather_texts
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed


def check_order(groups: DpCpGroups, ranks: list[int]) -> None:
    me = dist.get_rank()
    assert groups.data.global_ranks == tuple(ranks)
    assert groups.rank == ranks.index(me)
    assert all_gather_rows(groups.data, np.array([me]), "test")[:, 0].tolist() == ranks
    assert gather_texts(groups.data, f"rank {me}", "test") == [f"rank {r}" for r in ranks]
    n = len(ranks)
    # Rank i sends i + j + 1 bytes of value 16 i + j to rank j.
    i = groups.rank
    send = np.concatenate([np.full(i + j + 1, 16 * i + j, dtype=np.uint8) for j in range(n)])
    received = all_to_all_bytes(groups.data, send, [i + j + 1 for j in range(n)], [j + i + 1 for j in range(n)], "test")
    assert received.tolist() == [16 * j + i for j in range(n) for _ in range(j + i + 1)]
    require_equal(groups.data, "00" * 32, "nothing")
    for source in range(n):
        assert broadcast_bytes(groups.data, b"x" * i if i == source else None, source, "test") == b"x" * source


def test_ranks_in_any_order() -> None:
    def body(rank: int, world: int) -> None:
        layout = ParallelLayout(2, 2, 64, cp_sizes=(1, 2, 4))
        order = [2, 0, 1, 3]
        groups = DpCpGroups.create(layout, global_ranks=order, timeout_s=20)
        check_order(groups, order)
        for size in (2, 4):
            first = groups.rank // size * size
            group = groups.cp_group(first, size)
            assert group is not None
            # A member's number in its CP group is its cp_rank: zigzag slices gathered in order are in order.
            assert dist.get_rank(group) == groups.rank - first
            assert dist.get_process_group_ranks(group) == order[first : first + size]
        assert groups.cp_group(groups.rank, 1) is None
        with pytest.raises(ValueError, match="has no group of 8 ranks"):
            groups.cp_group(0, 8)

    run_ranks(body, 4)


@pytest.mark.parametrize("order", ["tp-cp-dp", "dp-cp-tp"])
def test_from_a_mesh_with_a_tensor_parallel_axis(order: str) -> None:
    """Two data-parallel worlds side by side in one process group, CP or DP the faster axis."""

    def body(rank: int, world: int) -> None:
        grid = torch.arange(8).reshape(2, 2, 2)
        if order == "tp-cp-dp":  # TP neighbours have neighbouring numbers
            mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "cp", "tp"))
            column = grid[:, :, rank % 2]
        else:
            mesh = DeviceMesh("cpu", grid, mesh_dim_names=("tp", "cp", "dp"))
            column = grid[rank // 4].T
        groups = DpCpGroups.from_mesh(mesh, ParallelLayout(2, 2, 64), timeout_s=20)
        check_order(groups, column.reshape(-1).tolist())

    run_ranks(body, 8)


def test_a_mesh_without_context_parallelism_and_meshes_that_do_not_fit() -> None:
    def body(rank: int, world: int) -> list[str]:
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp",))
        check_order(DpCpGroups.from_mesh(mesh, ParallelLayout(2, 1, 64), timeout_s=20), [0, 1])
        messages = []
        for layout, names in [(ParallelLayout(1, 2, 64), {}), (ParallelLayout(3, 1, 64), {}), (None, {"dp": "data"})]:
            arguments: Any = (mesh, layout or ParallelLayout(2, 1, 64))
            try:
                DpCpGroups.from_mesh(*arguments, **names)
            except ValueError as error:
                messages.append(str(error))
        return messages

    for messages in run_ranks(body, 2):
        assert "needs 'dp' and 'cp'" in messages[0]
        assert "dp x cp = 2 x 1, the layout 3 x 1" in messages[1]
        assert "needs 'data'" in messages[2]


def test_members_may_belong_to_different_numbers_of_other_groups() -> None:
    """torch names a group after how many others a process has; the stages of a pipeline have different numbers."""

    def body(rank: int, world: int) -> list[int]:
        others = [dist.new_group([rank], use_local_synchronization=True) for _ in range(3 * rank)]
        groups = DpCpGroups.create(ParallelLayout(2, 2, 64, cp_sizes=(1, 2, 4)), timeout_s=10)
        again = DpCpGroups.create(ParallelLayout(2, 2, 64), timeout_s=10)
        sums = []
        for group in (groups.data.group, groups.cp_group(rank // 2 * 2, 2), groups.cp_group(0, 4), again.data.group):
            total = torch.tensor(rank)
            dist.all_reduce(total, group=group)
            sums.append(int(total))
        assert len(others) == 3 * rank
        return sums

    pair = {0: 1, 1: 5}
    assert run_ranks(body, 4, timeout_s=40) == [[6, pair[rank // 2], 6, 6] for rank in range(4)]
