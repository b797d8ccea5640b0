"""Ranks forked from a warm process: multi-rank tests in about a second instead of a torchrun launch each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailure", "RanksFailedError", "run_ranks"]


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended when it did not return."""

    rank: int
    error_type: str
    """Class name of the exception; ``ProcessDied`` or ``Timeout`` when there was none."""
    message: str
    traceback: str = ""


class RanksFailedError(AssertionError):
    """At least one rank raised, died or hung; the message has every failure with its traceback."""

    def __init__(self, failures: list[RankFailure]) -> None:
        self.failures = failures
        lines = [f"rank {f.rank}: {f.error_type}: {f.message}\n{f.traceback}" for f in failures]
        super().__init__(f"{len(failures)} rank(s) failed\n" + "\n".join(lines))


def _child(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    pipe: Connection,
    release: Connection,
    args: Any,
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        outcome: Any = fn(rank, world_size, *args)
    except BaseException as error:  # whatever it is, the parent reports it
        outcome = RankFailure(rank, type(error).__name__, str(error), traceback.format_exc())
    pipe.send(outcome)
    # A rank that is done waits for the others, which may still be connecting to it; a failed one must be seen to go.
    if not isinstance(outcome, RankFailure):
        release.poll(timeout_s)
    # Skips interpreter shutdown: gloo's threads of a failed group would wait there for the other ranks.
    os._exit(0)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    return_failures: bool = False,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in forked ranks joined by a gloo process group.

    The parent must not have started threads that hold locks; OpenMP stays at one thread.

    Args:
        fn: any callable, closures included (it is forked, not pickled); what it returns must pickle.
        world_size: ranks to fork.
        *args: handed to ``fn``.
        timeout_s: seconds until the ranks that still run are killed, and the group's collective time-out.
        return_failures: put a ``RankFailure`` in the failed ranks' places instead of raising.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailedError: a rank raised, died or hung and ``return_failures`` is false.
    """
    context = multiprocessing.get_context("fork")
    results: list[Any] = [None] * world_size
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tdp-ranks-") as folder:
        store = os.path.join(folder, "store")
        processes = []
        pipes: dict[Connection, int] = {}
        releases: list[Connection] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            waiter, release = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(fn, rank, world_size, store, timeout_s, sender, waiter, args), daemon=True
            )
            process.start()
            sender.close()
            waiter.close()
            releases.append(release)
            processes.append(process)
            pipes[receiver] = rank
        deadline = time.monotonic() + timeout_s + 5.0
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for receiver in [r for r in pipes if r in ready]:
                rank = pipes.pop(receiver)
                try:
                    results[rank] = receiver.recv()
                except EOFError:
                    processes[rank].join(5)
                    code = processes[rank].exitcode
                    results[rank] = RankFailure(rank, "ProcessDied", f"exit code {code} without a result")
        for rank in pipes.values():
            results[rank] = RankFailure(rank, "Timeout", f"still running after {timeout_s + 5.0:.0f} s")
        for release in releases:
            with contextlib.suppress(OSError):
                release.send(None)
        for process in processes:
            if process.is_alive():
                process.join(1 if not pipes else 0)
            if process.is_alive():
                process.kill()
            process.join()
    failures = [r for r in results if isinstance(r, RankFailure)]
    if failures and not return_failures:
        raise RanksFailedError(failures)
    return results
