from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tdp_megatron.testing import RankFailure, RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed


def test_every_rank_joins_the_group_and_returns() -> None:
    def body(rank: int, world_size: int, offset: int) -> int:
        value = torch.tensor([rank + offset])
        dist.all_reduce(value)
        return int(value)

    assert run_ranks(body, 3, 10) == [33, 33, 33]


def test_an_exception_names_its_rank() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ValueError("planted")

    with pytest.raises(RanksFailedError, match="rank 1: ValueError: planted"):
        run_ranks(body, 2)


def test_a_killed_rank_and_a_hanging_rank_are_reported() -> None:
    def body(rank: int, world_size: int) -> str:
        dist.barrier()
        if rank == 0:
            os._exit(7)
        if rank == 1:
            time.sleep(600)
        return "fine"

    died, hung, fine = run_ranks(body, 3, timeout_s=1.0, return_failures=True)
    assert isinstance(died, RankFailure)
    assert died.error_type == "ProcessDied"
    assert isinstance(hung, RankFailure)
    assert hung.error_type == "Timeout"
    assert fine == "fine"
