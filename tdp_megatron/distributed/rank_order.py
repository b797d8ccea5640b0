"""One rank works first, the others after it, and an error of any of them reaches all.

Works through the key-value store of the default process group, not through collectives: that needs no device, does not
end because one rank builds for an hour, and can say which ranks never came.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from tdp_megatron.distributed.restarts import attempt_name
from tdp_megatron.errors import ExchangeError

__all__ = ["run_in_rank_order"]

T = TypeVar("T")

_calls = itertools.count()
_HEARTBEAT_S = 2.0
_LONGEST_POLL_S = 0.5
_FAREWELL_S = 2.0


def run_in_rank_order(
    work: Callable[[], T], *, takes_part: bool, what: str, first_rank: int = 0, timeout_s: float = 600.0
) -> T | None:
    """Run ``work`` on the first rank, then on the others; return when all have done it.

    Must be called by all ranks of the default process group, which has to be initialised, in the same order.

    Args:
        work: what to do.
        takes_part: whether this rank does anything; if not, it waits for the others.
        what: how errors name the work.
        first_rank: the rank that goes first.
        timeout_s: how long to wait for ranks that do not come, or give no sign of life.

    Returns:
        What ``work`` returned, None where the rank takes no part.

    Raises:
        ExchangeError: another rank failed, never came, or is gone; the message names it.
        Exception: what ``work`` raised on this rank.
    """
    meeting = _Meeting(f"tdp_megatron/{attempt_name()}/rank_order/{next(_calls)}", what, timeout_s)
    if meeting.rank != first_rank:
        meeting.wait_until(lambda: meeting.has("first_done"))
    try:
        with meeting.alive():
            result = work() if takes_part else None
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone; this error is the one to tell
            meeting.report(error)
        raise
    if meeting.rank == first_rank:
        meeting.set("first_done")
    meeting.done()
    return result


class _Meeting:
    """One rendezvous of all ranks in the store."""

    def __init__(self, prefix: str, what: str, timeout_s: float) -> None:
        default = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore(prefix, default)
        self._what = what
        self._timeout_s = timeout_s
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()
        self.set(f"came/{self.rank}")
        self._started = time.monotonic()

    def set(self, key: str, value: str = "1") -> None:
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def report(self, error: BaseException) -> None:
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        if self._store.add("errors", 1) == 1:
            self.set("first_error", text)
        # The store may live in this process: the others should read the cause before it goes.
        came = sum(self.has(f"came/{rank}") for rank in range(self._world))
        end = time.monotonic() + _FAREWELL_S
        while self._store.add("told", 0) < came - 1 and time.monotonic() < end:
            time.sleep(0.02)

    def done(self) -> None:
        self.set(f"done/{self.rank}")
        self._store.add("done", 1)
        self.wait_until(lambda: self._store.add("done", 0) == self._world)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Count up while the body runs, so that the others can tell slow from gone."""
        stop = threading.Event()

        def beat() -> None:
            for count in itertools.count(1):
                try:
                    self.set(f"alive/{self.rank}", str(count))
                except RuntimeError:  # the group is gone; the body's end will say so
                    return
                if stop.wait(_HEARTBEAT_S):
                    return

        thread = threading.Thread(target=beat, name="tdp-rank-order", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        try:
            self._wait_until(condition)
        except ExchangeError:
            raise
        except RuntimeError as error:
            raise ExchangeError(
                f"{self._what}: the process group's store is gone, and with it the rank that holds it, mostly rank 0; "
                f"look at its log. Cause: {str(error).splitlines()[0]}"
            ) from error

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        pause = 0.002
        beats: dict[int, str] = {}
        checked = self._started
        while not condition():
            if self._store.add("errors", 0) and self.has("first_error"):
                cause = self._store.get("first_error").decode()
                self._store.add("told", 1)
                raise ExchangeError(f"{self._what} failed on another rank: {cause}")
            now = time.monotonic()
            if now - max(checked, self._started) > self._timeout_s:
                beats = self._check_others(beats)
                checked = now
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)

    def _check_others(self, before: dict[int, str]) -> dict[int, str]:
        others = [rank for rank in range(self._world) if rank != self.rank and not self.has(f"done/{rank}")]
        absent = [rank for rank in others if not self.has(f"came/{rank}")]
        if absent:
            raise ExchangeError(
                f"{self._what}: ranks {absent} did not come within {self._timeout_s:g} s, rank {self.rank} waits for "
                "them; all ranks must make this call, also those that build nothing"
            )
        beats = {rank: self._store.get(f"alive/{rank}").decode() for rank in others if self.has(f"alive/{rank}")}
        silent = [rank for rank, beat in beats.items() if before.get(rank) == beat]
        if silent:
            raise ExchangeError(
                f"{self._what}: ranks {silent} gave no sign of life for {self._timeout_s:g} s; look at their logs"
            )
        return beats
