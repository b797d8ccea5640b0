"""Every rank ends with the same first cause; none hangs."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchdata.nodes import IterableWrapper

from tdp_megatron import background
from tdp_megatron.distributed import DpCpGroups, Exchange, HostGroup, require_equal, sum_int64
from tdp_megatron.errors import ExchangeError, ScheduleError
from tdp_megatron.loops import HybridCPDataLoaderWrapper, wrap_data_iterator
from tdp_megatron.loops import hybrid_cp as hybrid_module
from tdp_megatron.loops import session as session_module
from tdp_megatron.nodes import DocumentSample, IndexedRead, Pack, Reroute, Shard
from tdp_megatron.nodes import pack as pack_module
from tdp_megatron.testing import RankFailure, run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(2, 2, 64)


class Samples:
    """An iterable of ``count`` samples that can raise, die, stall or be stopped at one of them."""

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
            if i == self.at and self.do == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
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


@pytest.mark.parametrize("how", ["skip", "consumed_samples", "global_batch_size", "skip_to"])
def test_ranks_that_want_other_global_batches_all_end(how: str) -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=8.0)
        odd = rank == 2
        options: dict[str, Any] = {"global_batch_size": 8 + 4 * (how == "global_batch_size" and odd)}
        if how == "skip":
            options["skip"] = [(1, 2 + odd)]
        elif how == "consumed_samples":
            options["consumed_samples"] = 8 * odd
        pack = Pack(IterableWrapper(Samples(30)), LAYOUT, exchange=Exchange(groups), **options)
        root = Reroute(pack, groups=groups)
        root.reset(None)
        with pytest.raises(ExchangeError) as caught:  # noqa: PT012
            for step in range(5):
                next(root)
                if how == "skip_to" and odd and not step:
                    root.skip_to(3)
        return str(caught.value)

    messages = run_ranks(body, 4)
    for message in messages:
        assert re.search(r"rank 0 wants global batch \d of 8 .*; rank 2 wants global batch \d of (8|12) ", message)


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

    def dying(out: torch.Tensor, given: torch.Tensor, *sizes: list[int], **options: Any) -> Any:
        if dist.get_rank() == 2 and sizes:  # the samples; what is gathered from all has no sizes
            os._exit(9)
        return real(out, given, *sizes, **options)

    monkeypatch.setattr(dist, "all_to_all_single", dying)
    results = run_ranks(lambda rank, world: outcome(Samples(6)), 4, timeout_s=40, return_failures=True)
    assert isinstance(results[2], RankFailure)
    for rank in (0, 1, 3):
        assert results[rank].startswith("step 0: exchanging samples ")
        assert "rank 2 vanished in step 0" in results[rank]


@pytest.mark.parametrize("how", ["stall", "stop"])
def test_a_rank_that_stalls_meets_the_deadline(how: str) -> None:
    begin = time.monotonic()
    results = run_ranks(
        lambda rank, world: outcome(Samples(6, at=2, do=how if rank == 1 else ""), timeout_s=2.0),
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


# One rank fails where the others cannot know it: between two collectives.


def walk(source: Any, *, exchange: bool, timeout_s: float = 1.5, agree_every: int = 0, before: Any = None) -> str:
    """The error that ends a walk over two ranks; ``before(step, groups, pack)`` is called before each step."""
    layout = ParallelLayout(2, 1, 64)
    groups = DpCpGroups.create(layout, timeout_s=timeout_s)
    pack = Pack(source, layout, global_batch_size=4, exchange=Exchange(groups) if exchange else None)
    root = Reroute(pack, groups=groups, agree_every=agree_every)
    root.reset(None)
    for step in itertools.count():
        try:
            if before is not None:
                before(step, groups, pack)
            next(root)
        except StopIteration:
            return f"{step} steps"
        except (ExchangeError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError


def out_of_memory(*arguments: Any, **options: Any) -> Any:
    raise MemoryError("no room for the plan")


@pytest.mark.parametrize(
    ("where", "seen_in"),
    [("plan", "step 2: exchanging samples"), ("exchange", "step 2: exchanging samples"), ("pack", "step 3: gathering")],
)
def test_a_rank_that_fails_alone_is_named_with_its_cause(where: str, seen_in: str) -> None:
    def body(rank: int, world: int) -> str:
        def before(step: int, groups: DpCpGroups, pack: Pack) -> None:
            if rank == 1 and step == 2:
                if where == "plan":
                    pack._plan = out_of_memory  # type: ignore[method-assign]
                elif where == "exchange":
                    pack.exchange.transfer = out_of_memory  # type: ignore[method-assign, union-attr]
                else:
                    pack_module.packed_batches = out_of_memory  # type: ignore[attr-defined]

        return walk(IterableWrapper(Samples(20)), exchange=True, before=before)

    first, second = run_ranks(body, 2, timeout_s=20)
    assert second == "MemoryError: no room for the plan"
    assert first.startswith(f"ExchangeError: {seen_in}")
    assert first.endswith("did not complete within 1.5 s: rank 1 failed in step 2: MemoryError: no room for the plan")


@pytest.mark.parametrize("adapter", ["wrap_data_iterator", "HybridCPDataLoaderWrapper"])
def test_a_rank_that_fails_alone_in_an_existing_loop_is_named(adapter: str) -> None:
    config = SimpleNamespace(max_seqlen_per_dp_cp_rank=64, data_timeout_s=1.5)

    def body(rank: int, world: int) -> str:
        samples = iter(Samples(8))
        steps: Any = None
        if adapter == "wrap_data_iterator":
            steps = iter(lambda: wrap_data_iterator(samples, config, 2)[1], 0)
        else:
            steps = HybridCPDataLoaderWrapper(samples, config)
        next(steps)
        if rank == 1:
            # The first step planned from now on; a loop may have read one step ahead already.
            session_module.schedule = hybrid_module.schedule = out_of_memory  # type: ignore[attr-defined]
        try:
            for _ in range(3):
                next(steps)
        except (ExchangeError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(body, 2, timeout_s=20)
    assert second == "MemoryError: no room for the plan"
    assert re.search(r"rank 1 failed in step [12]: MemoryError: no room for the plan", first)


def test_a_cause_is_forgotten_when_the_rank_goes_on() -> None:
    """All ranks pass over a bad step; what happens later is not put down to it."""

    def body(rank: int, world: int) -> str:
        host = HostGroup([0, 1], 1.5)
        with pytest.raises(ValueError, match="bad step"), host.telling_failures(0):
            raise ValueError("bad step")
        sum_int64(host, 1, "both have told")
        host.begin_step(1)
        sum_int64(host, 1, "both go on")
        if rank == 1:
            time.sleep(5.5)
            return ""
        with pytest.raises(ExchangeError) as caught:
            sum_int64(host, 1, "step 1: summing")
        return str(caught.value)

    first, _ = run_ranks(body, 2, timeout_s=20)
    assert "step 1: summing did not complete within 1.5 s: rank 1 vanished in step 1" in first


def test_a_rank_killed_after_the_exchange_is_named() -> None:
    def body(rank: int, world: int) -> str:
        def before(step: int, groups: DpCpGroups, pack: Pack) -> None:
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return walk(IterableWrapper(Samples(20)), exchange=True, before=before)

    first, second = run_ranks(body, 2, timeout_s=20, return_failures=True)
    assert isinstance(second, RankFailure)
    assert second.error_type == "ProcessDied"
    assert "step 2: gathering lengths" in first
    assert "rank 1 is missing: it began step 1, not step 2" in first


@pytest.mark.parametrize("exchange", [False, True])
def test_a_rank_that_leaves_is_named_by_those_who_meet_it_no_more(equal_documents: str, exchange: bool) -> None:
    """Such as one that catches an error of its own and calls sys.exit(1)."""

    def body(rank: int, world: int) -> str:
        def before(step: int, groups: DpCpGroups, pack: Pack) -> None:
            if rank == 1 and step == 3:
                background._end_all()
                os._exit(1)

        source: Any = documents(equal_documents)
        if exchange:
            source = Shard(source, rank=rank, num_ranks=world)
        return walk(source, exchange=exchange, agree_every=1, before=before)

    first, _ = run_ranks(body, 2, timeout_s=20, return_failures=True)
    assert first.startswith(f"ExchangeError: {'step 3: gathering lengths' if exchange else 'comparing the plan'}")
    assert "rank 1 left of its own accord, having begun step 2" in first


@pytest.fixture(scope="module")
def equal_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of one length, so that every order of them makes the same plans."""
    return write_corpus(tmp_path_factory.mktemp("equal") / "d", [[i, i, i, i] for i in range(40)])


def documents(prefix: str, seed: int = 1) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=8, seed=seed)


@pytest.mark.parametrize("exchange", [False, True])
def test_ranks_with_different_seeds_are_an_error(equal_documents: str, exchange: bool) -> None:
    def body(rank: int, world: int, seed_of_rank_1: int) -> str:
        source: Any = documents(equal_documents, seed_of_rank_1 if rank else 1)
        if exchange:
            source = Shard(source, rank=rank, num_ranks=world)
        return walk(source, exchange=exchange, agree_every=4, timeout_s=10)

    assert run_ranks(body, 2, 1) == ["10 steps"] * 2
    results = run_ranks(body, 2, 2)
    assert len(set(results)) == 1
    assert "the plan or the order of the samples of step 0 differs between ranks: ranks [1] disagree" in results[0]
    assert "seed" in results[0]


def test_a_plan_that_differs_later_is_found_at_the_next_comparison(equal_documents: str) -> None:
    def body(rank: int, world: int) -> str:
        def before(step: int, groups: DpCpGroups, pack: Pack) -> None:
            if rank == 1 and step == 3:
                pack.algorithm = "dp_balanced"

        return walk(documents(equal_documents), exchange=False, agree_every=4, timeout_s=10, before=before)

    results = run_ranks(body, 2)
    assert len(set(results)) == 1
    assert "of step 4 differs between ranks: ranks [1] disagree with rank 0" in results[0]


@pytest.mark.parametrize("how", ["late", "raises"])
def test_without_an_exchange_a_missing_rank_is_named_at_the_next_comparison(equal_documents: str, how: str) -> None:
    def body(rank: int, world: int) -> str:
        def before(step: int, groups: DpCpGroups, pack: Pack) -> None:
            if rank == 1 and step == 2:
                if how == "late":
                    time.sleep(5.5)  # past the deadline and the time the others take to find out who is missing
                    raise MemoryError("woke up")
                pack._plan = out_of_memory  # type: ignore[method-assign]

        return walk(documents(equal_documents), exchange=False, agree_every=2, before=before)

    first, _ = run_ranks(body, 2, timeout_s=20)
    reason = "is missing: it began step 0, not step 2" if how == "late" else "failed in step 2: MemoryError: no room"
    assert f"did not complete within 1.5 s: rank 1 {reason}" in first


@pytest.mark.parametrize("exchange", [False, True])
def test_a_disk_read_that_fails_once_is_tried_again(
    equal_documents: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []
    real = os.preadv

    def failing_once(*arguments: Any) -> int:
        if dist.get_rank() == 1 and not failures:
            failures.append(1)
            raise OSError(errno.EIO, "input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", failing_once)

    def body(rank: int, world: int) -> Any:
        source: Any = DocumentSample(IndexedRead(equal_documents, mmap=False), max_seqlen=8)
        if exchange:
            source = Shard(source, rank=rank, num_ranks=world)
        return walk(source, exchange=exchange, agree_every=1, timeout_s=10), len(failures)

    assert run_ranks(body, 2) == [("10 steps", 0), ("10 steps", 1)]


@pytest.mark.parametrize("lengths", [(20, 20), (20, 48)])
def test_a_stretch_left_out_past_the_end_ends_all_ranks_alike(lengths: tuple[int, int]) -> None:
    """Global batches 2 to 11 are left out; a rank with 20 samples ends among them, one with 48 does not."""

    def body(rank: int, world: int) -> tuple[list[int], str]:
        source = IterableWrapper([{"tokens": torch.arange(3)} for _ in range(lengths[rank])])
        layout = ParallelLayout(2, 1, 64)
        groups = DpCpGroups.create(layout, timeout_s=20)
        pack = Pack(source, layout, global_batch_size=8, exchange=Exchange(groups), skip=[(2, 11)])
        seen, message = [], ""
        try:
            seen = [step.index for step in Reroute(pack, groups=groups)]
        except ExchangeError as error:
            message = str(error)
        return seen, message

    for seen, message in run_ranks(body, 2):
        if lengths[0] == lengths[1]:
            assert (seen, message) == ([0, 1], "")
        else:
            assert "the data of rank 0 ended 4 samples short" in message
