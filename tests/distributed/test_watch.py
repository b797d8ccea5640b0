"""Ranks that read by plan, and so meet in no collective of ours, still end with the first cause."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode, IterableWrapper

from tdp_megatron.distributed import DpCpGroups
from tdp_megatron.distributed import watch as watch_module
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.progress import Progress
from tdp_megatron.errors import ExchangeError
from tdp_megatron.nodes import Loader, Pack, Prefetch, Reroute
from tdp_megatron.testing import RankFailure, run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(3, 1, 64)
CAUSE = "rank 1 failed in step 2: OSError: disk gone"


class Samples:
    """Twelve samples of all ranks, three to a step; ``fault`` is called before the third step's first."""

    def __init__(self, fault: Callable[[], None] = lambda: None) -> None:
        self.fault = fault

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(12):
            if i == 6:
                self.fault()
            yield {"tokens": torch.arange(10) + i}


def disk_gone() -> None:
    raise OSError("disk gone")


def disk_gone_late() -> None:
    time.sleep(4)  # by then the others have their step and wait for this rank in the loop's own collective
    disk_gone()


def graph(rank: int, groups: DpCpGroups, fault: Callable[[], None] = disk_gone) -> Reroute:
    source = IterableWrapper(Samples(fault if rank == 1 else lambda: None))
    return Reroute(Pack(source, LAYOUT, global_batch_size=3), groups=groups)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.0)


def steps_until_error(root: BaseNode[Any], pause_s: Callable[[int], float]) -> tuple[int, str]:
    """Steps handed out before the error, and the error; the pause depends on the number of the step."""
    steps = 0
    try:
        for step in iter(Loader(root)):
            time.sleep(pause_s(step.index))
            steps += 1
    except (ExchangeError, OSError) as error:
        return steps, f"{type(error).__name__}: {error}"
    return steps, ""


def test_a_rank_that_fails_is_named_when_the_others_ask_for_that_step() -> None:
    def body(rank: int, world: int) -> tuple[int, str]:
        root = graph(rank, DpCpGroups.create(LAYOUT, timeout_s=30))
        return steps_until_error(root, lambda step: 3.0 if rank != 1 and step == 1 else 0.0)

    results = run_ranks(body, 3, timeout_s=40)
    assert results == [(2, f"ExchangeError: {CAUSE}"), (2, "OSError: disk gone"), (2, f"ExchangeError: {CAUSE}")]


def test_steps_made_ahead_are_not_handed_out_when_another_rank_cannot_make_them() -> None:
    def body(rank: int, world: int) -> tuple[int, str]:
        root = Prefetch(graph(rank, DpCpGroups.create(LAYOUT, timeout_s=30)), depth=4)
        return steps_until_error(root, lambda step: 3.0 if step == 1 else 0.0)

    results = run_ranks(body, 3, timeout_s=40)
    assert results == [(2, f"ExchangeError: {CAUSE}"), (2, "OSError: disk gone"), (2, f"ExchangeError: {CAUSE}")]


def test_a_loop_stuck_in_its_own_collective_is_told_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world: int) -> str:
        logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]  # instead of pytest's
        groups = DpCpGroups.create(LAYOUT, timeout_s=2.0)
        try:
            for _ in iter(Loader(graph(rank, groups, disk_gone_late))):
                dist.all_reduce(torch.ones(1))  # its time-out is that of the default group: 60 s
        except OSError as error:
            time.sleep(6)  # the culprit lives on, so that the others' collective is not cut off
            return str(error)
        return ""

    results = run_ranks(body, 3, timeout_s=60, return_failures=True)
    assert results[1] == "disk gone"
    said = capfd.readouterr().err
    for rank in (0, 2):
        assert isinstance(results[rank], RankFailure)
        assert results[rank].error_type == "ProcessDied"
        assert f"{CAUSE}; rank {rank} cannot go on without it" in said
        assert f"{CAUSE}; rank {rank} has been waiting in one place for 2 s since, so its process ends now" in said
    for stack in said.split("its process ends now")[1:]:
        assert "all_reduce" in stack  # where it was


def test_a_slow_loop_that_moves_is_not_ended() -> None:
    def validate() -> None:
        for _ in range(8):
            time.sleep(0.2)
            dist.get_world_size(), time.sleep(0.2)

    def body(rank: int, world: int) -> str:
        root = graph(rank, DpCpGroups.create(LAYOUT, timeout_s=1.0))
        try:
            for step in iter(Loader(root)):
                if step.index == 1 and rank != 1:
                    validate()
        except (ExchangeError, OSError) as error:
            return str(error)
        return ""

    assert run_ranks(body, 3, timeout_s=40) == [CAUSE, "disk gone", CAUSE]


def test_a_rank_that_recovers_takes_its_cause_back() -> None:
    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=3.0)
        broken = [True]

        def fault() -> None:
            if broken.pop():
                broken.append(False)
                raise OSError("disk gone")
            broken.append(False)

        root = graph(rank, groups, fault)
        root.reset(None)
        seen: list[Any] = [next(root).index, next(root).index]
        if rank == 1:
            with pytest.raises(OSError, match="disk gone"):
                next(root)
            time.sleep(0.5)  # the others learn of it
            state = root.state_dict()
            root.reset(state)
            seen.append(next(root).index)
        dist.barrier()
        time.sleep(0.5)
        if rank != 1:
            seen.append(next(root).index)
        time.sleep(4.5)  # nobody is ended
        seen.append(next(root).index)
        return seen

    assert run_ranks(body, 3, timeout_s=40) == [[0, 1, 2, 3]] * 3


def test_a_cause_is_not_taken_back_by_another_pipeline() -> None:
    """Reading ahead, the training data of a rank fails while it validates with the same groups."""

    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        root = graph(rank, groups)
        root.reset(None)
        next(root), next(root)
        if rank == 1:
            with pytest.raises(OSError, match="disk gone"):
                next(root)
        dist.barrier()
        validation = graph(rank, groups, lambda: None)
        validation.reset(None)
        if rank == 1:
            next(validation)
        dist.barrier()
        time.sleep(1.5)
        with pytest.raises(OSError if rank == 1 else ExchangeError) as caught:
            next(root)
        return str(caught.value)

    assert run_ranks(body, 3, timeout_s=40) == [CAUSE, "disk gone", CAUSE]


def test_without_a_store_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> tuple[int, str, bool]:
        monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
        groups = DpCpGroups.create(LAYOUT, timeout_s=5)
        steps, error = steps_until_error(graph(rank, groups), lambda step: 0.3)
        return steps, error, groups.data._watch is None

    assert run_ranks(body, 3, timeout_s=40) == [(4, "", True), (2, "OSError: disk gone", True), (4, "", True)]


def test_a_store_that_goes_ends_the_watch_and_nothing_else() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

        def compare_set(self, key: str, expected: str, value: str) -> str:
            raise RuntimeError("connection reset")

    def body(rank: int, world: int) -> tuple[int, str, bool]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=5)
        root = graph(rank, groups, lambda: None)
        root.reset(None)
        next(root)
        watch = groups.data._watch
        assert watch is not None
        assert watch.is_running
        groups.data._progress._store = Gone()  # type: ignore[assignment]
        time.sleep(1.5)
        return sum(1 for _ in root), "", watch.is_running

    assert run_ranks(body, 3, timeout_s=40) == [(3, "", False)] * 3


def test_a_fork_of_the_process_has_no_watch_and_needs_none() -> None:
    def body(rank: int, world: int) -> tuple[bool, int]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        root = graph(rank, groups, lambda: None)
        root.reset(None)
        next(root)
        watch = groups.data._watch
        assert watch is not None
        child = os.fork()
        if child == 0:  # such as a worker of a DataLoader
            os._exit(7 if not watch.is_running else 1)
        _, status = os.waitpid(child, 0)
        return watch.is_running, os.waitstatus_to_exitcode(status)

    assert run_ranks(body, 3, timeout_s=40) == [(True, 7)] * 3


def test_the_culprit_hears_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, world: int) -> tuple[str, list[str]]:
        with caplog.at_level(logging.ERROR):
            root = graph(rank, DpCpGroups.create(LAYOUT, timeout_s=30))
            _, error = steps_until_error(root, lambda step: 0.0 if rank == 1 else 0.3)
            time.sleep(1.0)
            return error, [record.getMessage() for record in caplog.records]

    results = run_ranks(body, 3, timeout_s=40)
    assert results[1] == ("OSError: disk gone", [])
    assert results[0][1] == [f"{CAUSE}; rank 0 cannot go on without it"]


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it came true; the limit is only there to end a test that fails."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def in_turns(rank: int, *acts: Callable[[], Any]) -> Any:
    """Let rank i do the i-th act, one after the other; its result."""
    result = None
    for turn, act in enumerate(acts):
        if turn == rank:
            result = act()
        dist.barrier()
    return result


def told_rank(progress: Progress) -> int | None:
    cause = progress.read_cause()
    return None if cause is None else cause.rank


@pytest.mark.parametrize("recovers", [0, 1])
def test_of_two_ranks_that_fail_one_recovers_and_the_other_is_still_known(recovers: int) -> None:
    """Rank 0 tells first; the cause that stays is that of the rank that does not recover."""

    def body(rank: int, world: int) -> str:
        host = HostGroup(range(world), timeout_s=30)
        host.watch("train")

        def fail() -> None:
            host._progress.tell_cause(2, f"disk {rank} gone", "train")

        in_turns(rank, fail, fail)
        if rank == recovers:
            host.watch("train")
        dist.barrier()
        watch = host._watch
        assert watch is not None
        error = ""
        if rank != 1 - recovers:
            wait_until(lambda: watch._cause is not None and watch._cause.rank == 1 - recovers)
            with pytest.raises(ExchangeError) as caught:
                host.raise_if_told(2)
            error = str(caught.value)
        dist.barrier()
        return error

    culprit = 1 - recovers
    told = f"rank {culprit} failed in step 2: disk {culprit} gone"
    assert run_ranks(body, 3, timeout_s=40) == ["" if rank == culprit else told for rank in range(3)]


def test_only_its_own_rank_takes_a_cause_back_and_may_tell_it_again() -> None:
    def body(rank: int, world: int) -> list[int | None]:
        first, second = (Progress([0, 1], place, "group") for place in (0, 1))
        seen = []
        for act in (
            lambda: first.tell_cause(2, "disk gone"),
            lambda: second.tell_cause(2, "disk gone"),
            second.take_back,
            first.take_back,
            lambda: first.tell_cause(2, "disk gone"),
        ):
            act()
            seen.append(told_rank(first))
        return seen

    assert run_ranks(body, 1, timeout_s=40) == [[0, 0, 0, None, 0]]


def test_a_cause_of_several_pipelines_of_a_rank_stays_until_all_go_on() -> None:
    def body(rank: int, world: int) -> list[int | None]:
        progress = Progress(range(world), rank, "group")
        progress.tell_cause(2, "disk gone", "train")
        progress.tell_cause(2, "disk gone", "valid")
        seen = [told_rank(progress)]
        for teller in ("train", "valid"):
            progress.take_back(teller)
            seen.append(told_rank(progress))
        return seen

    assert run_ranks(body, 1, timeout_s=40) == [[0, 0, None]]


def test_a_cause_that_is_no_utf_8_is_told() -> None:
    def body(rank: int, world: int) -> str:
        progress = Progress(range(world), rank, "group")
        progress.tell_cause(2, "no file \udcff\nin folder")
        return progress.explain(2)[0]

    assert run_ranks(body, 1, timeout_s=40) == ["rank 0 failed in step 2: no file \\udcff\nin folder"]


def test_who_has_confirmed_a_cause_that_was_taken_back_has_not_confirmed_the_next() -> None:
    def body(rank: int, world: int) -> list[bool]:
        progress = Progress([0, 1], 0, "group")
        other = Progress([0, 1], 1, "group")
        arrived = []
        for confirms in (True, False, True):
            progress.tell_cause(2, "disk gone")
            cause = other.read_cause()
            assert cause is not None
            if confirms:
                other.confirm_cause(cause)
            arrived.append(progress.await_confirmations(1, 0.2))
            progress.take_back()
        return arrived

    assert run_ranks(body, 1, timeout_s=40) == [[True, False, True]]


def watch_threads() -> int:
    return sum(thread.name == "tdp-watch" for thread in threading.enumerate())


def test_a_watch_ends_with_its_group() -> None:
    def body(rank: int, world: int) -> tuple[int, bool]:
        hosts = [HostGroup(range(world), timeout_s=30) for _ in range(3)]
        for host in hosts:
            host.watch("")
        before = watch_threads()
        del hosts[1:], host
        gc.collect()
        return before, wait_until(lambda: watch_threads() == 1)

    assert run_ranks(body, 2, timeout_s=40) == [(3, True)] * 2


def test_the_store_is_asked_less_often_the_more_ranks_and_groups_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> list[float]:
        hosts = [HostGroup(ranks, timeout_s=30) for ranks in ((0, 1, 2), (0, 1, 2), (0, 1)) if rank in ranks]
        monkeypatch.setattr(watch_module, "_QUESTIONS_PER_SECOND", 75)
        intervals = []
        for host in hosts:
            host.watch("")
            assert host._watch is not None
            intervals.append(round(host._watch.interval_s, 6))
        return intervals

    assert run_ranks(body, 3, timeout_s=40) == [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0.1, 0.2]]
