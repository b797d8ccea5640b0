"""A rank that is killed tells nobody; the others end with its name all the same, and nobody is taken for dead."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

from tdp_megatron import background
from tdp_megatron.distributed import DpCpGroups
from tdp_megatron.distributed import liveness as liveness_module
from tdp_megatron.distributed import watch as watch_module
from tdp_megatron.distributed.beats import Left, Reached, has_left
from tdp_megatron.distributed.liveness import Liveness
from tdp_megatron.distributed.process_place import Condition, ProcessPlace
from tdp_megatron.distributed.progress import Cause, Progress
from tdp_megatron.distributed.standstill import Standstill
from tdp_megatron.distributed.watch import Watch
from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops import packing_session, wrap_data_iterator
from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.nodes import Loader, Pack, Prefetch, Reroute
from tdp_megatron.testing import RankFailure, run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(3, 1, 64)
KILLED = "it was killed, or left with os._exit before DpCpGroups.close()"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing() -> None:
    pass


class Samples:
    """Endless samples of all ranks, three to a step; ``fault`` is called before the third step's first."""

    def __init__(self, fault: Callable[[], None] = nothing) -> None:
        self.fault = fault

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(1000):
            if i == 6:
                self.fault()
            yield {"tokens": torch.arange(10)}


def steps(groups: DpCpGroups, fault: Callable[[], None] = nothing, depth: int = 0) -> Iterator[Any]:
    root = Reroute(Pack(IterableWrapper(Samples(fault)), LAYOUT, global_batch_size=3), groups=groups)
    return iter(Loader(Prefetch(root, depth=depth) if depth else root))


def walk(groups: DpCpGroups, fault: Callable[[], None] = nothing, depth: int = 0) -> str:
    """What ends a loop that takes its time over every step."""
    try:
        for _ in steps(groups, fault, depth):
            time.sleep(0.1)
    except ExchangeError as error:
        return str(error)
    return ""


def is_accused(groups: DpCpGroups) -> bool:
    return groups.data._progress.read_cause() is not None


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it came true; the limit is only there to end a test that fails."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package has logged; torch's own come from another thread, at any moment."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("tdp_megatron")]


def assert_killed(results: list[Any], culprit: int, where: str, what: str = f"is gone; {{where}}; {KILLED}") -> None:
    """The culprit died, and the others say so, with its process and its step."""
    assert isinstance(results[culprit], RankFailure)
    assert results[culprit].error_type == "ProcessDied"
    others = {result for rank, result in enumerate(results) if rank != culprit}
    (said,) = others
    assert said.startswith(f"rank {culprit} (pid ")
    assert said.endswith(f") {what.format(where=where)}")


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_killed_while_it_reads_is_named(culprit: int, depth: int) -> None:
    def body(rank: int, world: int) -> str:
        def fault() -> None:
            time.sleep(0.6)
            die()

        return walk(DpCpGroups.create(LAYOUT, timeout_s=30), fault if rank == culprit else nothing, depth)

    assert_killed(run_ranks(body, 3, timeout_s=40, return_failures=True), culprit, "last seen at step 1")


@pytest.mark.parametrize("when", ["in the step", "after the step"])
def test_a_rank_killed_in_or_after_a_step_is_named(when: str) -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        if rank != 1:
            return walk(groups)
        for step in steps(groups):
            if step.index == 3 and when == "in the step":
                time.sleep(0.6)
                die()
            torch.ones(3, requires_grad=True).sum().backward()
            if step.index == 3:
                time.sleep(0.6)
                die()
        return ""

    assert_killed(run_ranks(body, 3, timeout_s=40, return_failures=True), 1, "last seen at step 3")


def test_a_rank_killed_before_its_first_step_is_named() -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        groups.data.watch("")
        if rank == 1:
            time.sleep(0.6)
            die()
        return walk(groups)

    assert_killed(run_ranks(body, 3, timeout_s=40, return_failures=True), 1, "before its first step")


def test_who_is_stuck_in_its_own_loop_ends_with_the_name_of_the_killed_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        next(steps(groups))
        time.sleep(0.5 if rank == 1 else 60)  # such as a collective of another backend
        die()
        return ""

    results = run_ranks(body, 3, timeout_s=30, return_failures=True)
    assert all(isinstance(result, RankFailure) and result.error_type == "ProcessDied" for result in results)
    assert "exit code -9" in results[1].message
    said = capfd.readouterr().err
    for rank in (0, 2):
        assert "exit code 1 " in results[rank].message
        assert f"last seen at step 0; {KILLED}; rank {rank} has been waiting in one place for 1 s" in said


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank on a machine of its own."""
    monkeypatch.setattr(ProcessPlace, "is_near", lambda self, here: self == here)


def test_a_rank_killed_on_another_machine_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)

    def body(rank: int, world: int) -> str:
        monotonic = time.monotonic
        time.monotonic = lambda: monotonic() + 1e6 * rank  # no machine's clock is another's
        groups = DpCpGroups.create(LAYOUT, timeout_s=2.0)
        if rank != 1:
            return walk(groups)
        for step in steps(groups):
            if step.index == 3:
                time.sleep(0.6)
                die()
        return ""

    silent = "has given no sign of life for 2 s; {where}; it was killed, stopped or cut off, or its machine is gone"
    assert_killed(run_ranks(body, 3, timeout_s=40, return_failures=True), 1, "last seen at step 3", silent)


def test_a_rank_stopped_beyond_the_deadline_is_said_to_be_stopped_and_acquitted_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 20.0)  # the others wait for it in a collective

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        mine = steps(groups)
        next(mine)
        pids: list[Any] = [None] * world
        dist.all_gather_object(pids, os.getpid())
        time.sleep(0.5)
        said = ""
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
            wait_until(lambda: is_accused(groups))
            cause = groups.data._progress.read_cause()
            said = "" if cause is None else f"{cause.rank} {cause.text}"
            os.kill(pids[1], signal.SIGCONT)
            wait_until(lambda: not is_accused(groups))
        dist.barrier()
        time.sleep(0.3)
        return [said, [next(mine).index for _ in range(2)]]

    results = run_ranks(body, 3, timeout_s=40)
    assert [steps for _, steps in results] == [[1, 2]] * 3
    assert results[0][0].startswith("1 rank 1 (pid ")
    assert (
        "has given no sign of life for 1 s; last seen at step 0; its process is stopped, by a signal" in results[0][0]
    )


def leave(how: str, groups: list[DpCpGroups]) -> None:
    """End the process of its own accord, in one of the ways there are."""
    if how == "close":
        groups[0].close()
    elif how == "destroy":
        dist.destroy_process_group()
        time.sleep(0.5)
    elif how == "exit":
        background._end_all()
    else:
        groups.clear()
        gc.collect()
        time.sleep(0.5)
    os._exit(0)


@pytest.mark.parametrize("how", ["close", "destroy", "exit", "drop"])
def test_who_leaves_of_its_own_accord_is_not_missed(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """After its last step others may still work, on a checkpoint above all; where it has closed, they may go on."""

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        mine = steps(groups)
        next(mine)
        dist.barrier()
        if rank == 1:
            held = [groups]
            del groups, mine
            leave(how, held)
        time.sleep(3.0)
        told = messages(caplog)
        further = [next(mine).index for _ in range(3)] if how in ("close", "drop") else []
        time.sleep(0.5)
        return [further, is_accused(groups), told]

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert isinstance(results[1], RankFailure)
    assert results[0] == results[2] == [[1, 2, 3] if how in ("close", "drop") else [], False, []]


LEFT = "left after step {at}, without an uncaught error"


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("how", ["destroy", "exit"])
def test_who_leaves_while_the_others_go_on_is_named(how: str, depth: int) -> None:
    """Such as a rank that catches its own error and calls sys.exit(1): nobody sees the code."""

    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        if rank != 1:
            return walk(groups, depth=depth)
        for step in steps(groups, depth=depth):
            if step.index == 2:
                leave(how, [groups])
        return ""

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    for rank in (0, 2):
        assert results[rank].startswith("rank 1 (pid ")
        assert f") {LEFT.format(at=2)}, and rank 0 has come to step 3" in results[rank]


@pytest.mark.parametrize("graph", ["Prefetch", "Prefetch of a Mapper", "Prefetcher"])
def test_steps_made_ahead_are_not_missed_at_the_end(graph: str, caplog: pytest.LogCaptureFixture) -> None:
    """All take two steps; rank 1 leaves with fewer made ahead than the others, which stay longer than the deadline."""

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        fault = (lambda: time.sleep(8)) if rank == 1 else nothing
        made = Reroute(Pack(IterableWrapper(Samples(fault)), LAYOUT, global_batch_size=3), groups=groups)
        root = {
            "Prefetch": lambda: Prefetch(made, depth=4),
            "Prefetch of a Mapper": lambda: Prefetch(Mapper(made, lambda step: step), depth=4),
            "Prefetcher": lambda: Prefetcher(made, 4),
        }[graph]()
        mine = iter(Loader(root))
        taken = [next(mine).index for _ in range(2)]
        if rank != 1:
            assert wait_until(lambda: made.stats.items > 4)
        dist.barrier()
        if rank == 1:
            assert made.stats.items == 2
            leave("destroy", [groups])
        time.sleep(3.0)
        return [taken, is_accused(groups), messages(caplog)]

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert results[0] == results[2] == [[0, 1], False, []]


@pytest.mark.parametrize("waits", ["in a collective", "elsewhere"])
def test_who_waits_in_a_collective_for_a_rank_that_left_ends(waits: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the step after which it left: elsewhere that may be its last one, and a checkpoint being written."""

    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        next(steps(groups))
        dist.barrier()
        if rank == 1:
            background._end_all()
            time.sleep(8)  # its connections are not cut off, as those of a machine that loses power
            os._exit(0)
        if rank == 0 and waits == "in a collective":
            dist.all_reduce(torch.ones(1))
        for _ in range(50):
            time.sleep(0.1)
            if rank == 2:
                groups.data.note_use()  # it works on something
        return "went on"

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert results[2] == "went on"
    if waits == "elsewhere":
        assert results[0] == "went on"
        return
    assert "exit code 1 " in results[0].message
    said = capfd.readouterr().err
    assert f") {LEFT.format(at=0)}; rank 0 has been waiting for it in all_reduce for 1 s; rank 0 has been" in said


def test_how_far_a_rank_came_that_left_is_said_where_it_is_known() -> None:
    def body(rank: int, world: int) -> str:
        config = LoopConfig(max_seqlen_per_dp_cp_rank=64, data_timeout_s=30)
        data = iter([{"tokens": torch.arange(10)} for _ in range(40)])
        for _ in range(3):
            host = wrap_data_iterator(data, config, 2)[0].session.groups.dp_cp.data
        if rank == 1:
            leave("exit", [])
        assert wait_until(lambda: host._progress.read_left() is not None)
        who, note = host._progress.read_left()
        return Left.parse(note).describe(who)

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    for rank in (0, 2):
        assert re.fullmatch(r"rank 1 \(pid \d+ on \S+\) left, without an uncaught error", results[rank])
    place = ProcessPlace(5, 7, "space", "node")
    assert Left(3, (), place).describe(1) == f"rank 1 (pid 5 on node) {LEFT.format(at=2)}"


def test_a_collective_cut_off_by_a_rank_that_left_names_it(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, world: int) -> list[str]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        next(steps(groups))
        dist.barrier()
        if rank == 1:
            leave("exit", [groups])
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            sys.last_value = error
            background._end_all()
        return messages(caplog)

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    for rank in (0, 2):
        said = results[rank][-1]
        assert "rank 1 (pid " in said
        # The later one may have read what the first one has told.
        assert re.search(rf"{LEFT.format(at=0)}; rank {rank} (ends after that|cannot go on without it)$", said)


def test_the_end_of_a_forked_child_of_multiprocessing_says_so_too() -> None:
    """Such as the ranks of a notebook launcher, for which no atexit of the parent's runs."""

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(ParallelLayout(2, 1, 64), timeout_s=1.0)
        groups.data.watch("")
        dist.barrier()
        if rank == 1:
            import multiprocessing.util

            multiprocessing.util._exit_function()
            os._exit(0)
        time.sleep(2.0)
        note = groups.data._progress.read_beat(1)
        return [note is not None and has_left(note), is_accused(groups)]

    assert run_ranks(body, 2, timeout_s=40, return_failures=True)[0] == [True, False]


def test_a_fork_that_ends_does_not_leave_in_its_parents_name() -> None:
    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        mine = steps(groups)
        next(mine)
        child = os.fork()
        if child == 0:  # such as a worker of a DataLoader
            background._end_all()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
        left = [r for r in range(world) if has_left(groups.data._progress.read_beat(r) or "")]
        dist.barrier()
        return [left, is_accused(groups)]

    assert run_ranks(body, 3, timeout_s=40) == [[[], False]] * 3


def test_a_rank_that_pauses_long_in_one_call_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        mine = steps(groups)
        next(mine)
        time.sleep(4.0 if rank == 1 else 3.5)  # such as writing a checkpoint
        return [next(mine).index, is_accused(groups)]

    assert run_ranks(body, 3, timeout_s=40) == [[1, False]] * 3


def test_an_error_that_nobody_catches_is_told_at_the_end_of_its_process() -> None:
    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        if rank != 1:
            return walk(groups)
        for step in steps(groups):
            if step.index == 2:
                sys.last_value = ValueError("loss is NaN")  # as the interpreter does before it ends
                background._end_all()
                die()
        return ""

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert results[0] == results[2] == "rank 1 failed in step 2: ValueError: loss is NaN"


def test_an_error_on_its_way_past_the_end_of_the_process_group_is_told() -> None:
    """As of ``try: train() finally: destroy_process_group()``."""

    def body(rank: int, world: int) -> str:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        next(steps(groups))
        dist.barrier()
        progress = groups.data._progress
        if rank == 1:
            dist.destroy_process_group()
            wait_until(lambda: has_left(progress.read_beat(1) or ""))
            sys.last_value = ValueError("loss is NaN")
            background._end_all()
            os._exit(1)
        wait_until(lambda: is_accused(groups))
        cause = progress.read_cause()
        return "" if cause is None else cause.text

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert results[0] == results[2] == "rank 1 failed in step 0: ValueError: loss is NaN"


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_error_of_a_wrapped_loop_is_told_with_its_step(steps_before: int, read_ahead: bool) -> None:
    def body(rank: int, world: int) -> str:
        config = LoopConfig(max_seqlen_per_dp_cp_rank=64, read_ahead=read_ahead, data_timeout_s=30)
        data = iter([{"tokens": torch.arange(10)} for _ in range(40)])
        if rank == 1:
            if not steps_before:
                packing_session(data, config)
            for _ in range(steps_before):
                wrap_data_iterator(data, config, 2)
            sys.last_value = ValueError("loss is NaN")  # as the interpreter does before it ends
            background._end_all()
            die()
        try:
            for _ in range(20):
                wrap_data_iterator(data, config, 2)
                time.sleep(0.3)
        except ExchangeError as error:
            return str(error)
        return ""

    results = run_ranks(body, 3, timeout_s=60, return_failures=True)
    # Without a step, no thread tells anything.
    where = "rank 1 failed in step 2: ValueError: loss is NaN" if steps_before else "rank 1 "
    assert where in results[0]
    assert where in results[2]
    assert "step -1" not in results[0] + results[2]


def test_a_rank_whose_collective_is_cut_off_learns_at_its_end_who_was_killed(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, world: int) -> list[str]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=30)
        next(steps(groups))
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
            die()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            sys.last_value = error
            background._end_all()
        return messages(caplog)

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    for rank in (0, 2):
        said = results[rank][-1]
        assert said.startswith("rank 1 (pid ")
        assert said.endswith(f"is gone; last seen at step 0; {KILLED}; rank {rank} cannot go on without it")


def test_when_the_store_goes_with_rank_0_only_who_is_stuck_ends(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, world: int) -> Any:
        logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]  # instead of pytest's
        port: list[Any] = [None]
        store: Any = None
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)
            port = [store.port]
        dist.broadcast_object_list(port, 0)
        if rank != 0:
            store = dist.TCPStore("127.0.0.1", port[0], None, False, timeout=timedelta(seconds=20))
        dist.distributed_c10d._get_default_store = lambda: store  # the job's, as without torchrun
        groups = DpCpGroups.create(LAYOUT, timeout_s=1.0)
        mine = steps(groups)
        next(mine)
        dist.barrier()
        if rank == 0:
            time.sleep(0.5)
            die()
        if rank == 1:
            for _ in range(60):  # a rank that needs no other one
                time.sleep(0.05)
                next(mine)
            return "went on"
        time.sleep(60)
        return ""

    results = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert results[1] == "went on"
    assert "exit code 1 " in results[2].message
    said = capfd.readouterr().err
    assert " is gone, and with it the process of rank 0 (" in said
    assert "; rank 2 has been waiting in one place for 1 s since, so its process ends now" in said


class Machine:
    """Ranks of one group in one process, each with a place and a clock; no time passes but what is let pass."""

    def __init__(self, spaces: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> None:
        """``spaces`` names the machine of every rank by a letter."""
        self.now = 100.0
        self.conditions: dict[int, Condition] = {}
        self.questions = 0
        self.notes: dict[str, str] = {}
        monkeypatch.setattr(liveness_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(liveness_module.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(
            ProcessPlace, "condition", lambda place, here: self.conditions.get(place.pid, Condition.RUNS)
        )
        self.progress = [self._progress(rank, len(spaces)) for rank in range(len(spaces))]
        self.ranks: dict[int, Liveness] = {}
        self.reached = [Reached() for _ in spaces]
        for rank, space in enumerate(spaces):
            liveness = Liveness(self.progress[rank], rank, len(spaces), timeout_s, self.reached[rank])
            liveness._here = ProcessPlace(rank, 7, space, f"node-{space}")
            self.ranks[rank] = liveness

    def _progress(self, rank: int, num_ranks: int) -> Progress:
        progress = Progress(range(num_ranks), rank, "group")
        progress._store = self  # type: ignore[assignment]
        return progress

    def set(self, key: str, value: str) -> None:
        self.questions += 1
        self.notes[key] = value

    def get(self, key: str) -> bytes:
        self.questions += 1
        return self.notes[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(key in self.notes for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.questions += 1
        if self.notes.get(key, "") == expected:
            self.notes[key] = value

    def run(self, seconds: int, stopped: tuple[int, ...] = ()) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank, liveness in self.ranks.items():
                if rank not in stopped:
                    self.reached[rank].come("train", int(self.now))
                    liveness.look(1.0)

    @property
    def accused(self) -> int | None:
        cause = self.progress[0].read_cause()
        return None if cause is None else cause.rank


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdp_megatron.distributed.progress.default_store", lambda: None)


@pytest.mark.parametrize("spaces", ["aaaabbbb", "abababab", "abcdefgh", "aaaaaaaa", "abbbbbbb"])
@pytest.mark.parametrize("dead", [(0,), (3,), (7,), (3, 4), (4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6)])
def test_whoever_dies_is_found_wherever_it_ran(
    spaces: str, dead: tuple[int, ...], no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Machine(spaces, monkeypatch)
    job.run(300)
    assert job.accused is None
    for rank in dead:
        del job.ranks[rank]
        job.conditions[rank] = Condition.UNKNOWN
    job.run(60)
    assert job.accused is None
    job.run(20)
    assert job.accused in dead


@pytest.mark.parametrize("dead", range(8))
@pytest.mark.parametrize("spaces", ["aaaabbbb", "aaaaaaaa", "abbbbbbb"])
def test_a_neighbour_on_the_machine_sees_an_end_at_once(
    spaces: str, dead: int, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Machine(spaces, monkeypatch)
    job.run(30)
    del job.ranks[dead]
    job.conditions[dead] = Condition.ENDED
    job.run(1)
    alone = spaces.count(spaces[dead]) == 1
    assert job.accused == (None if alone else dead)


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
def test_the_questions_of_a_rank_do_not_depend_on_how_many_there_are(
    num_ranks: int, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Machine("".join(chr(65 + rank // 4) for rank in range(num_ranks)), monkeypatch)
    job.run(30)
    before = job.questions
    job.run(100)
    # Every look brings another step here; with the question for the cause this makes the number the interval counts on.
    assert (job.questions - before) / 100 / num_ranks <= watch_module._QUESTIONS_PER_LOOK - 1


def test_who_left_is_passed_over_and_the_next_one_looked_after(no_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Machine("abcdefgh", monkeypatch)
    job.run(30)
    for rank in (3, 4):
        job.ranks.pop(rank).leave(is_missed=False)
    job.run(200)
    assert job.accused is None
    del job.ranks[5]
    job.run(80)
    assert job.accused == 5


def test_a_job_stopped_as_a_whole_finds_nobody_dead(no_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All machines are suspended for an hour; the first to go on sees beats of an hour ago."""
    job = Machine("abcd", monkeypatch)
    job.run(30)
    job.now += 3600
    job.run(3, stopped=(1, 2, 3))
    assert job.accused is None
    job.run(100)
    assert job.accused is None


def test_a_rank_that_was_only_late_is_acquitted_and_accused_again_when_it_dies(
    no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Machine("abcd", monkeypatch)
    job.run(30)
    job.run(90, stopped=(2,))
    assert job.accused == 2
    cause = job.progress[0].read_cause()
    assert cause is not None
    assert "rank 2 (pid 2 on node-c) has given no sign of life for 6" in cause.text
    assert 60 < cause.silent_s < 70
    assert "; last seen at step 1" in cause.text
    job.run(30)
    assert job.accused is None
    job.run(90, stopped=(2,))
    assert job.accused == 2


@pytest.mark.parametrize(
    ("silent_s", "stands_since", "ends_at"),
    [
        (-1, 100.0, 1060.0),  # it told its failure itself
        (65, 100.0, 995.0),  # it fell silent on another machine 65 s before that was told, at 935: at once
        (65, 950.0, 1010.0),  # this rank came to wait after that
        (65, 1020.0, 1080.0),  # and this one still went on
        (2, 100.0, 1058.0),  # it ended on this machine
    ],
)
def test_who_waits_for_a_failed_rank_ends_a_timeout_after_the_failure(
    silent_s: int, stands_since: float, ends_at: float, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is learned of at 1000, with a time-out of 60 s."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    watch = Watch.__new__(Watch)
    watch._progress, watch._rank, watch._timeout_s, watch._cause = Progress([0, 1], 0, "group"), 0, 60.0, None
    watch._learn(Cause(1, 5, "rank 1 is gone", 1 if silent_s < 0 else 2, 0, silent_s))
    assert watch._has_waited(ends_at + 0.5, stands_since)
    assert not watch._has_waited(ends_at - 0.5, stands_since)


def test_a_process_stands_still_while_its_threads_are_where_they_were() -> None:
    standstill = Standstill()
    seen = []
    for came, now in ((0, 10.0), (0, 15.0), (1, 20.0), (1, 25.0), (1, 3625.0), (1, 3626.0)):
        seen.append(standstill.look(came, now))
    # Stopped for an hour, it has stood still for 5 s before and for 1 s since.
    assert seen == [10.0, 10.0, 20.0, 20.0, 3620.0, 3620.0]
    assert Standstill().look(0, 1.0) == 1.0


def test_the_condition_of_a_process_is_what_it_is() -> None:
    here = ProcessPlace.of_this_process()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        started = ProcessPlace(child, _started(child), here.space, here.host)
        assert ProcessPlace.parse(str(started)) == started
        assert started.condition(here) is Condition.RUNS
        os.kill(child, signal.SIGSTOP)
        assert wait_until(lambda: started.condition(here) is Condition.STOPPED)
        os.kill(child, signal.SIGKILL)
        assert wait_until(lambda: started.condition(here) is Condition.ENDED)  # a zombie
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert started.condition(here) is Condition.ENDED
    reused = ProcessPlace(os.getpid(), here.started + 1, here.space, here.host)
    assert reused.condition(here) is Condition.ENDED
    assert ProcessPlace(os.getpid(), here.started, "other", here.host).condition(here) is Condition.UNKNOWN


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])
