"""Ranks that read by plan and compare nothing: whatever one of them meets, the others end with that as the cause."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchdata.nodes import BaseNode

from tdp_megatron.distributed import DpCpGroups
from tdp_megatron.distributed import watch as watch_module
from tdp_megatron.errors import ExchangeError
from tdp_megatron.nodes import DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute
from tdp_megatron.nodes import pack as pack_module
from tdp_megatron.testing import RankFailure, run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(3, 1, 64)
STEPS = 12
#: Whose data ends two steps in, so that there are steps before and after.
AT = 2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(watch_module, "_GRACE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("plan") / "d", [[i] * (1 + i % 5) for i in range(3 * STEPS)])


class Ending(BaseNode[Any]):
    """A user's node that passes on so many samples of a source, and calls ``fault`` before the next one."""

    def __init__(self, source: BaseNode[Any], count: int, fault: Callable[[], Any]) -> None:
        super().__init__()
        self.source, self.count, self.fault = source, count, fault

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.passed = 0 if initial_state is None else initial_state["passed"]

    def next(self) -> Any:
        if self.passed == self.count:
            self.fault()
        self.passed += 1
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "passed": self.passed}


def end() -> None:
    raise StopIteration


def die() -> None:
    time.sleep(0.5)  # the others have noted that they watch
    os.kill(os.getpid(), signal.SIGKILL)


def planted(*_: Any, **__: Any) -> Any:
    raise MemoryError("planted")


def fail_to_read(*_: Any) -> Any:
    raise OSError(errno.EIO, "disk gone")


class Run:
    """One rank's graph, of which rank 1 meets ``fault`` in step AT."""

    def __init__(self, prefix: str, rank: int, fault: str = "", *, depth: int = 0, timeout_s: float = 30.0) -> None:
        self.groups = DpCpGroups.create(LAYOUT, timeout_s=timeout_s)
        self.rank = rank
        self.fault = fault if rank == 1 else ""
        in_source = {"raises in read": fail_to_read, "killed": die, "ends early": end}
        samples = DocumentSample(IndexedRead(prefix, mmap=False), max_seqlen=8, shuffle=False)
        source = Ending(samples, 3 * AT, in_source.get(self.fault, lambda: None))
        self.pack = Pack(source, LAYOUT, global_batch_size=3)
        root = Reroute(self.pack, groups=self.groups)
        self.steps = iter(Loader(Prefetch(root, depth=depth) if depth else root))
        self.made = 0

    def plant(self) -> None:
        if self.fault == "raises in plan":
            self.pack._plan = planted  # type: ignore[method-assign]
        elif self.fault == "raises in pack":
            pack_module.packed_batches = planted  # type: ignore[attr-defined]
        elif self.fault == "raises in the read of tokens":
            os.preadv = os.pread = fail_to_read  # type: ignore[assignment]

    def walk(self, pause_s: float = 0.1) -> str:
        """The error that ends the steps; each takes a while."""
        try:
            while True:
                if self.made == AT:
                    self.plant()
                next(self.steps)
                self.made += 1
                time.sleep(pause_s)
        except StopIteration:
            return "the end"
        except (ExchangeError, MemoryError, OSError) as error:
            return f"{type(error).__name__}: {error}"


EARLY_END = f"the data of rank 1 ended after {AT} global batches, that of rank {{other}} has more"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("raises in read", "OSError: [Errno 5] disk gone"),
        ("raises in the read of tokens", "OSError: [Errno 5] reading 8 bytes from byte "),
        ("raises in plan", "MemoryError: planted"),
        ("raises in pack", "MemoryError: planted"),
    ],
)
def test_a_rank_that_raises_is_named(prefix: str, fault: str, error: str) -> None:
    first, second, third = run_ranks(lambda rank, world: Run(prefix, rank, fault).walk(), 3, timeout_s=40)
    assert second.startswith(error)
    assert first == third
    assert first.startswith(f"ExchangeError: rank 1 failed in step {AT}: {error}")


@pytest.mark.parametrize("depth", [0, 3])
def test_a_killed_rank_is_named(prefix: str, depth: int) -> None:
    def body(rank: int, world: int) -> str:
        return Run(prefix, rank, "killed", depth=depth).walk(0.3)

    first, second, third = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert isinstance(second, RankFailure)
    assert first == third
    assert first.startswith("ExchangeError: rank 1 (pid ")
    assert f"is gone; last seen at step {AT - 1}; it was killed" in first


@pytest.mark.parametrize("depth", [0, 3])
def test_a_rank_whose_data_ends_early_is_named_while_it_lives(prefix: str, depth: int) -> None:
    def body(rank: int, world: int) -> tuple[str, int | None]:
        run = Run(prefix, rank, "ends early", depth=depth, timeout_s=2.0)  # a beat every 0.25 s
        said = run.walk(0.4)
        assert run.made < STEPS  # not at its own end
        dist.barrier()
        watch = run.groups.data._watch
        assert watch is not None
        deadline = time.monotonic() + 20
        while watch._cause is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return said, None if watch._cause is None else watch._cause.rank

    (first, _), (second, told), (third, _) = run_ranks(body, 3, timeout_s=40)
    assert second == "the end"  # as it must look to that rank then
    assert told == 1  # but it hears of it
    assert first == third
    assert any(first.startswith(f"ExchangeError: {EARLY_END.format(other=other)}") for other in (0, 2))


def test_a_rank_whose_data_ends_early_and_that_is_done_is_named(prefix: str) -> None:
    def body(rank: int, world: int) -> str:
        run = Run(prefix, rank, "ends early", timeout_s=2.0)
        said = run.walk(0.4)
        assert run.made < STEPS
        if rank == 1:
            dist.destroy_process_group()
            time.sleep(0.5)
            os._exit(0)
        return said

    first, _, third = run_ranks(body, 3, timeout_s=40, return_failures=True)
    assert first == third
    assert first.startswith(f"ExchangeError: {EARLY_END.format(other=0)}")


def test_ranks_that_need_nobody_compare_their_ends(prefix: str) -> None:
    """Rank 1 comes to its end first; the others are faster than any look at the beats."""

    def body(rank: int, world: int) -> str:
        run = Run(prefix, rank, "ends early")
        said = run.walk(0.0) if rank == 1 else ""
        dist.barrier()
        return said or run.walk(0.0)

    first, second, third = run_ranks(body, 3, timeout_s=40)
    assert second == "the end"
    assert first == third
    assert any(first.startswith(f"ExchangeError: {EARLY_END.format(other=other)}") for other in (0, 2))


def test_a_rank_that_comes_to_its_early_end_after_the_others_raises(prefix: str) -> None:
    def body(rank: int, world: int) -> str:
        run = Run(prefix, rank, "ends early")
        said = run.walk(0.0) if rank != 1 else ""
        dist.barrier()
        return said or run.walk(0.0)

    first, second, third = run_ranks(body, 3, timeout_s=40)
    assert first == third == "the end"
    assert any(second.startswith(f"ExchangeError: {EARLY_END.format(other=other)}") for other in (0, 2))


@pytest.mark.parametrize("agree_every", [1, 2, 4])
def test_an_early_end_is_found_where_plans_are_compared(prefix: str, agree_every: int) -> None:
    held = []  # who drops its groups says that the others may go on

    def body(rank: int, world: int) -> str:
        run = Run(prefix, rank, "ends early", timeout_s=4.0)
        held.append(run)
        run.steps = iter(Reroute(run.pack, groups=run.groups, agree_every=agree_every))
        return run.walk(0.0 if rank == 1 else 0.3)

    first, second, third = run_ranks(body, 3, timeout_s=40)
    if AT % agree_every:  # no comparison is due where the data of rank 1 ends
        assert second == "the end"
        assert EARLY_END.format(other=0) in first
        assert EARLY_END.format(other=0) in third
    else:
        assert first == third
        assert first == second
        assert f"of step {AT}: the data of ranks [1] has ended, ranks [0, 2] have more" in first


@pytest.mark.parametrize("agree_every", [0, 1, 5])
@pytest.mark.parametrize("depth", [0, 3])
def test_ranks_that_end_together_again_and_again_are_left_alone(prefix: str, depth: int, agree_every: int) -> None:
    """Two pipelines of one order, one of them over two epochs, and a third that rank 0 alone has walked before."""

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=20)

        def loader() -> Loader[Any]:
            pack = Pack(DocumentSample(IndexedRead(prefix), max_seqlen=8), LAYOUT, global_batch_size=3)
            root = Reroute(pack, groups=groups, agree_every=agree_every)
            return Loader(Prefetch(root, depth=depth) if depth else root)

        seen: list[Any] = []
        if rank == 0 and not agree_every:
            seen.append(sum(1 for _ in loader()))
        dist.barrier()
        train, valid = loader(), loader()
        for one in (train, valid, train):
            seen.append(sum(1 for _ in one))
            time.sleep(0.3)
        return [seen[-3:], groups.data._progress.read_cause()]

    assert run_ranks(body, 3, timeout_s=40) == [[[STEPS] * 3, None]] * 3


def test_the_shorter_of_two_pipelines_is_no_early_end_of_the_longer(prefix: str) -> None:
    """Validation data ends at every evaluation, at steps that training has long passed."""

    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=20)

        def steps(global_batch_size: int) -> Any:
            pack = Pack(DocumentSample(IndexedRead(prefix), max_seqlen=8), LAYOUT, global_batch_size=global_batch_size)
            return iter(Loader(Reroute(pack, groups=groups)))

        train = steps(3)
        for _ in range(STEPS // 2):
            next(train)
        assert sum(1 for _ in steps(12)) == 3
        time.sleep(0.5)
        dist.barrier()
        time.sleep(0.5)
        return [sum(1 for _ in train), groups.data._progress.read_cause()]

    assert run_ranks(body, 3, timeout_s=40) == [[STEPS // 2, None]] * 3


@pytest.mark.parametrize("num_restarts", [1, 3])
def test_who_walks_again_after_an_error_is_not_taken_for_one_that_ended_early(
    prefix: str, tmp_path: Path, num_restarts: int
) -> None:
    """One rank alone goes back, and comes to the end more often than the others fail."""

    def body(rank: int, world: int) -> list[Any]:
        run = Run(prefix, rank)
        root = Reroute(run.pack, groups=run.groups)
        root.reset(None)
        for _ in range(num_restarts if rank == 1 else 0):
            next(root)
            state = root.state_dict()
            next(root)
            root.reset(state)
        count = sum(1 for _ in root)
        dist.barrier()
        time.sleep(0.5)
        return [count + (num_restarts if rank == 1 else 0), run.groups.data._progress.read_cause()]

    assert run_ranks(body, 3, timeout_s=40) == [[STEPS, None]] * 3


def test_a_graph_with_a_node_that_has_no_state_ends_as_well(prefix: str) -> None:
    class Stateless(Ending):
        def get_state(self) -> dict[str, Any]:
            raise NotImplementedError

    def body(rank: int, world: int) -> int:
        groups = DpCpGroups.create(LAYOUT, timeout_s=20)
        source = Stateless(DocumentSample(IndexedRead(prefix), max_seqlen=8), 0, lambda: None)
        return sum(1 for _ in Reroute(Pack(source, LAYOUT, global_batch_size=3), groups=groups))

    assert run_ranks(body, 3, timeout_s=40) == [STEPS] * 3


def test_another_pipeline_takes_no_failure_back(prefix: str) -> None:
    """Such as validation, which a rank walks after its training data has failed."""

    def body(rank: int, world: int) -> str:
        run = Run(prefix, rank, "raises in read")
        if rank == 1:
            said = run.walk(0.0)
            pack = Pack(DocumentSample(IndexedRead(prefix), max_seqlen=8), LAYOUT, global_batch_size=12)
            assert sum(1 for _ in Loader(Reroute(pack, groups=run.groups))) == 3
        dist.barrier()
        return said if rank == 1 else run.walk(0.1)

    first, second, third = run_ranks(body, 3, timeout_s=60)
    assert first == third == f"ExchangeError: rank 1 failed in step {AT}: {second}"


def test_pipelines_that_differ_in_drop_last_have_ends_of_their_own(prefix: str) -> None:
    def body(rank: int, world: int) -> list[Any]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=20)
        counts = {}
        for drop_last in (True, False) if rank == 0 else (False, True):
            samples = DocumentSample(IndexedRead(prefix), max_seqlen=8)
            pack = Pack(samples, LAYOUT, global_batch_size=3 * STEPS - 1, drop_last=drop_last)
            counts[drop_last] = sum(1 for _ in Reroute(pack, groups=groups))
            dist.barrier()
        return [counts[True], counts[False], groups.data._progress.read_cause()]

    assert run_ranks(body, 3, timeout_s=40) == [[1, 2, None]] * 3
