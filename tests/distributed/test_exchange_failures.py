"""Every rank ends with the same first cause; none hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchdata.nodes import IterableWrapper

from tdp_megatron.distributed import DpCpGroups, Exchange, require_equal
from tdp_megatron.errors import ExchangeError, ScheduleError
from tdp_megatron.nodes import Pack, Reroute
from tdp_megatron.testing import RankFailure, run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(2, 2, 64)


class Samples:
    """An iterable of ``count`` samples that can raise, die or stall at one of them."""

    def __init__(self, count: int, *, at: int = -1, do: str = "", seqlen: int = 10, key: str = "") -> None:
        self.count, self.at, self.do, self.seqlen, self.key = count, at, do, seqlen, key

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.count):
            if i == self.at and self.do == "raise":
                raise OSError("disk gone")
            if i == self.at and self.do == "die":
                os._exit(9)
            if i == self.at and self.do == "stall":
                time.sleep(600)
            sample: dict[str, Any] = {"tokens": torch.arange(self.seqlen)}
            if self.key:
                sample[self.key] = torch.zeros(self.seqlen)
            yield sample


def outcome(samples: Samples, *, timeout_s: float = 8.0, keys: tuple[str, ...] = ()) -> str:
    groups = DpCpGroups.create(LAYOUT, timeout_s=timeout_s)
    pack = Pack(IterableWrapper(samples), LAYOUT, global_batch_size=8, exchange=Exchange(groups), token_keys=keys)
    root = Reroute(pack, groups=groups)
    root.reset(None)
    steps = 0
    try:
        while True:
            next(root)
            steps += 1
    except StopIteration:
        return f"{steps} steps"
    except (ExchangeError, ScheduleError) as error:
        with pytest.raises(type(error), match="step|rank|sample"):
            next(root)  # and again
        return str(error)


def test_all_ranks_end_together() -> None:
    assert run_ranks(lambda rank, world: outcome(Samples(6)), 4) == ["3 steps"] * 4


def test_a_rank_whose_data_ends_early_is_named_on_all_ranks() -> None:
    results = run_ranks(lambda rank, world: outcome(Samples(3 if rank == 2 else 6)), 4)
    assert len(set(results)) == 1
    assert "step 1: the data of rank 2 ended 1 samples short of the step while ranks [0, 1, 3] have more" in results[0]


def test_a_rank_without_any_data_is_named() -> None:
    results = run_ranks(lambda rank, world: outcome(Samples(0 if rank == 0 else 6)), 4)
    assert len(set(results)) == 1
    assert "the data of rank 0 ended 2 samples short of the step" in results[0]


def test_a_rank_whose_source_raises_is_named_on_all_ranks() -> None:
    results = run_ranks(lambda rank, world: outcome(Samples(6, at=4, do="raise" if rank == 3 else "")), 4)
    assert set(results) == {"step 2: rank 3 failed: OSError: disk gone"}


def test_different_keys_are_shown() -> None:
    def body(rank: int, world: int) -> str:
        return outcome(Samples(6, key="reward" if rank == 1 else ""), keys=("reward",) if rank == 1 else ())

    results = run_ranks(body, 4)
    assert len(set(results)) == 1
    assert "different per-token keys" in results[0]
    assert "reward" in results[0]


def test_a_sample_above_the_cap_is_named_on_all_ranks() -> None:
    results = run_ranks(lambda rank, world: outcome(Samples(6, seqlen=129 if rank == 1 else 10)), 4)
    assert len(set(results)) == 1
    for part in ("129", "128"):
        assert part in results[0]


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    results = run_ranks(
        lambda rank, world: outcome(Samples(6, at=2, do="die" if rank == 1 else "")),
        4,
        timeout_s=40,
        return_failures=True,
    )
    assert isinstance(results[1], RankFailure)
    assert results[1].error_type == "ProcessDied"
    for rank in (0, 2, 3):
        assert results[rank].startswith("step 1: gathering lengths ")  # cut off, or past the deadline
        assert "rank 1 is missing: it began step 0, not step 1" in results[rank]


def test_a_rank_killed_in_the_exchange_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_to_all_single

    def dying(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 2:
            os._exit(9)
        return real(*arguments, **options)

    monkeypatch.setattr(dist, "all_to_all_single", dying)
    results = run_ranks(lambda rank, world: outcome(Samples(6)), 4, timeout_s=40, return_failures=True)
    assert isinstance(results[2], RankFailure)
    for rank in (0, 1, 3):
        assert results[rank].startswith("step 0: exchanging samples ")
        assert "rank 2 vanished in step 0" in results[rank]


def test_a_rank_that_stalls_meets_the_deadline() -> None:
    begin = time.monotonic()
    results = run_ranks(
        lambda rank, world: outcome(Samples(6, at=2, do="stall" if rank == 1 else ""), timeout_s=2.0),
        4,
        timeout_s=8,
        return_failures=True,
    )
    assert time.monotonic() - begin < 60
    assert isinstance(results[1], RankFailure)
    for rank in (0, 2, 3):
        assert "did not complete within 2 s: rank 1 is missing: it began step 0, not step 1" in results[rank]


def test_plans_that_differ_are_an_error() -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(ParallelLayout(2, 1, 64), timeout_s=10)
        try:
            require_equal(groups.data, "ab" * 32 if rank == 0 else "cd" * 32, "the plan of step 3")
        except ExchangeError as error:
            return str(error)
        return "equal"

    results = run_ranks(body, 2)
    assert len(set(results)) == 1
    assert "the plan of step 3 differs between ranks: ranks [1] disagree with rank 0" in results[0]


def test_groups_that_do_not_fit_the_world() -> None:
    def body(rank: int, world: int) -> str:
        try:
            DpCpGroups.create(ParallelLayout(2, 2, 64))
        except ValueError as error:
            dist.barrier()
            return str(error)
        return ""

    assert all("3 ranks do not make dp 2 x cp 2 = 4" in text for text in run_ranks(body, 3))


def test_batch_that_does_not_divide_names_the_nearest_sizes() -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(ParallelLayout(3, 1, 64), timeout_s=10)
        try:
            Pack(IterableWrapper([]), groups.layout, global_batch_size=8, exchange=Exchange(groups))
        except ValueError as error:
            return str(error)
        return ""

    for text in run_ranks(body, 3):
        assert "8 is not divisible by the 3 ranks" in text
        assert "6, 9" in text
