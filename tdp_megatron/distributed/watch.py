"""``Watch``: a thread that learns why another rank failed while this one waits for it in the training loop.

Ranks that read by plan meet in no collective of ours. A rank that fails notes the first cause in the job's store, and
for one that died its neighbour does; here it is looked up about once a second, so that a step pays nothing for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from tdp_megatron.background import BackgroundThread, error_at_exit
from tdp_megatron.distributed.beats import Left, Reached
from tdp_megatron.distributed.liveness import Liveness
from tdp_megatron.distributed.ordered_group import default_store
from tdp_megatron.distributed.progress import Cause, Progress
from tdp_megatron.distributed.standstill import Standstill, collective_in_progress, stacks
from tdp_megatron.distributed.store_host import lost_store
from tdp_megatron.errors import ExchangeError

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_THREAD_NAME = "tdp-watch"
_POLL_SECONDS = 1.0
#: Questions per second that the one store answers for all ranks and groups of the job, and how many a look takes at
#: most: one for the cause, one to note the step, and now and then one to two for another rank's beat.
_QUESTIONS_PER_SECOND = 500
_QUESTIONS_PER_LOOK = 2.5
#: How long the end of a process that failed waits at most to learn whether another rank's end was the cause.
_LAST_LOOK_SECONDS = 3.0
#: How long a failed rank whose process may hold the store waits at least for the others to have read the cause.
_FAREWELL_SECONDS = 3.0

#: A collective of ours ends by itself after the same time-out, and with a better message.
_GRACE_SECONDS = 5.0


class Watch:
    """Looks for the first cause of a failure that another rank of the group has told, or that a rank is gone.

    The cause is logged at once. Whoever asks for a step that the other rank cannot make gets it as an error. A
    process that does not ask, because its threads have stood still for ``timeout_s`` since the failure (in a collective
    of the training loop that will never complete, above all), is ended: nothing can be raised there.

    Args:
        progress: the group's notes.
        rank: this process's place in the group.
        global_ranks: torch.distributed ranks in the group's order.
        timeout_s: how long the threads may stand still, and other ranks give no sign of life, seconds.
        reached: how far this rank has come.
    """

    def __init__(
        self, progress: Progress, rank: int, global_ranks: Sequence[int], timeout_s: float, reached: Reached
    ) -> None:
        self._progress = progress
        self._rank = rank
        self._timeout_s = timeout_s
        self._global_ranks = tuple(global_ranks)
        self._reached = reached
        self._num_ranks = dist.get_world_size()
        self._may_hold_store = dist.get_rank() == 0
        self._liveness = Liveness(progress, rank, len(global_ranks), timeout_s, reached)
        self._store = default_store()
        self._cause: Cause | None = None
        self._happened = 0.0
        """When that was, as far as known."""
        self._came = 0
        self._stopped = False
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = BackgroundThread(self._run, name=_THREAD_NAME, stop=self._stop)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether there is a thread; not in a fork of the process, nor when stopped or when the store is gone."""
        return not self._stopped and self._pid == os.getpid() and self._thread.is_alive()

    @property
    def interval_s(self) -> float:
        """Seconds between two looks: one, or what the store can bear with all watches of all ranks of a big job."""
        num_watches = sum(thread.name == _THREAD_NAME for thread in threading.enumerate())
        return max(_POLL_SECONDS, self._num_ranks * num_watches * _QUESTIONS_PER_LOOK / _QUESTIONS_PER_SECOND)

    def stop(self) -> None:
        """End the thread when it looks next; this takes no lock, so that the garbage collector may call it anywhere."""
        self._stopped = True

    def close(self) -> None:
        """End the thread now; the others learn that this rank has left of its own accord."""
        self._stopped = True
        self._stop.set()
        self._thread.join(_LAST_LOOK_SECONDS)

    def came(self) -> None:
        """Note that the training loop goes on: it may be in the same place whenever one looks, and yet move."""
        self._came += 1

    def raise_if_told(self, step: int) -> None:
        """Raise when another rank has told that it cannot make ``step``, or an earlier one.

        Raises:
            ExchangeError: with the first cause and the rank.
        """
        cause = self._cause
        if cause is not None and cause.step <= step:
            self.say_farewell()
            self.stop()  # from here on it is the program's own affair how it ends
            raise ExchangeError(cause.text)

    def _run(self) -> None:
        standstill = Standstill()
        while not self._stop.wait(self.interval_s):
            if self._stopped:
                break
            if not dist.is_initialized():
                self._await_end()
                break
            if self._progress.has_store:
                self._look()
            if not self._progress.has_store and self._cause is None:
                self._learn(self._lost_store())
                if self._cause is None:
                    return
            now = time.monotonic()
            since = standstill.look(self._came, now)
            if self._cause is None:
                self._look_for_who_left(now - since)
            elif self._has_waited(now, since):
                self._end(self._cause)
        self._leave()

    def _has_waited(self, now: float, since: float) -> bool:
        """Whether the threads, which are where they are since then, have waited for a rank that failed long enough."""
        # From when a rank fell silent, not from when that was told, or the others would wait for twice as long.
        return now - max(since, self._happened) > self._timeout_s + _GRACE_SECONDS

    def _look(self, *, at_once: bool = False) -> None:
        """Read the first cause, after this rank has told what it knows itself."""
        self._progress.tell_again()
        self._liveness.look(self.interval_s, at_once=at_once)
        cause = self._progress.read_cause()
        if self._progress.has_store:
            # It has raised its own failure already; and whoever is taken for dead and reads this is not.
            if cause is not None and cause.rank == self._rank:
                cause = None if cause.told_by == self._rank or cause.silent_s >= 0 else cause
            self._learn(cause)

    def _look_for_who_left(self, still_s: float) -> None:
        """Tell when this rank waits in a collective for one that has left; which may be no mistake elsewhere."""
        waiting = collective_in_progress() if still_s > self._timeout_s + _GRACE_SECONDS else None
        first = None if waiting is None else self._progress.read_left()
        if waiting is None or first is None or self._global_ranks[first[0]] not in waiting[1]:
            return
        rank, note = first
        what = f"rank {self._rank} has been waiting for it in {waiting[0]} for {still_s:.0f} s"
        text = f"{Left.parse(note).describe(rank)}; {what}"
        self._progress.accuse(rank, self._reached.step, text, teller=f"left {rank}", silent_s=still_s)

    def _await_end(self) -> None:
        """The process groups are gone; note that at once, as nothing may follow, and wait for the error behind it."""
        self._liveness.leave(is_missed=True)
        while not self._stopped and not self._stop.wait(self.interval_s):
            pass

    def _learn(self, cause: Cause | None) -> None:
        if cause is not None and cause != self._cause:
            self._progress.confirm_cause(cause)
            self._happened = time.monotonic() - max(0, cause.silent_s)
            logger.error("%s; rank %d cannot go on without it", cause.text, self._rank)
        self._cause = cause

    def _lost_store(self) -> Cause | None:
        text = None if self._store is None else lost_store(self._store)
        # Nobody can tell any more whether what held it has failed or has ended before this rank. So no step is refused,
        # and only a process that is stuck is ended.
        return None if text is None else Cause(-1, sys.maxsize, text, -1, 0)

    def _leave(self) -> None:
        """Tell the others that this rank ends, and why where that is an error."""
        error = None if self._stopped else error_at_exit()
        if error is None or isinstance(error, ExchangeError):
            self._liveness.leave(is_missed=not self._stopped and error is None)
            return
        # Another rank's end cuts off the loop's own collectives, which name no rank, before it has been told here.
        deadline = time.monotonic() + _LAST_LOOK_SECONDS
        is_first = True
        while self._cause is None and self._progress.has_store and time.monotonic() < deadline:
            self._look(at_once=is_first)
            is_first = False
            time.sleep(_LAST_LOOK_SECONDS / 30)
        if self._cause is None:
            said = f"{type(error).__name__}: {error}"
            first = self._progress.read_left()
            if first is not None:  # perhaps the reason; its end cuts off collectives, too
                rank, note = first
                who_left = Left.parse(note).describe(rank)
                logger.error("%s; rank %d ends after that", who_left, self._rank)
                said = f"{said}; {who_left}"
            step = self._reached.step if self._reached.step >= 0 else self._reached.begun
            self._progress.tell_cause(step, said)
        self.say_farewell()

    def say_farewell(self) -> None:
        """Let the others read the cause before this process ends, if the store may go with it."""
        if self._may_hold_store:
            farewell_s = max(_FAREWELL_SECONDS, 2 * self.interval_s)
            others = len(self._global_ranks) - 1 - (self._progress.read_left() is not None)
            self._progress.await_confirmations(others, farewell_s)

    def _end(self, cause: Cause) -> None:
        said = (
            f"{cause.text}; rank {self._rank} has been waiting in one place for {self._timeout_s:g} s since, so its "
            "process ends now (raise timeout_s of the groups if it may pause that long). Its threads:"
        )
        # In one piece, as other ranks may end on the same terminal at the same moment, which makes one jumble of what
        # faulthandler writes word by word; and not to a log, which might not be written before the end.
        with suppress(Exception):  # standard error may be closed, or no file
            sys.stderr.write("\n".join([said, *stacks(), ""]))
            sys.stderr.flush()
        os._exit(1)
