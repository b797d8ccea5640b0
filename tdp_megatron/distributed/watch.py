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
from contextlib import suppress
from types import FrameType
from typing import TypeAlias

import torch.distributed as dist

from tdp_megatron.background import BackgroundThread, error_at_exit
from tdp_megatron.distributed.liveness import Liveness
from tdp_megatron.distributed.ordered_group import default_store
from tdp_megatron.distributed.progress import Cause, Progress
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

#: Where threads are: code and instruction of every frame.
_Places: TypeAlias = tuple[tuple[int, int], ...]


class Watch:
    """Looks for the first cause of a failure that another rank of the group has told, or that a rank is gone.

    The cause is logged at once. Whoever asks for a step that the other rank cannot make gets it as an error. A
    process that does not ask, because its threads have stood still for ``timeout_s`` since then (in a collective of the
    training loop that will never complete, above all), is ended: nothing can be raised there.

    Args:
        progress: the group's notes.
        rank: this process's place in the group.
        group_size: ranks in the group.
        timeout_s: how long the threads may stand still, and other ranks give no sign of life, seconds.
    """

    def __init__(self, progress: Progress, rank: int, group_size: int, timeout_s: float) -> None:
        self._progress = progress
        self._rank = rank
        self._timeout_s = timeout_s
        self._group_size = group_size
        self._num_ranks = dist.get_world_size()
        self._may_hold_store = dist.get_rank() == 0
        self._liveness = Liveness(progress, rank, group_size, timeout_s)
        self._store = default_store()
        self._step = -1
        self._cause: Cause | None = None
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

    def came(self, step: int | None = None) -> None:
        """Note that the training loop goes on: it may be in the same place whenever one looks, and yet move.

        Args:
            step: the one it is given.
        """
        self._came += 1
        if step is not None:
            self._step = step

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
        seen: tuple[int, Cause, _Places] | None = None
        moved = 0.0
        while not self._stop.wait(self.interval_s):
            if self._stopped or not dist.is_initialized():
                break
            if self._progress.has_store:
                self._look()
            if not self._progress.has_store and self._cause is None:
                self._learn(self._lost_store())
                if self._cause is None:
                    return
            cause = self._cause
            if cause is None:
                seen = None
                continue
            now = self._came, cause, _places()
            if now != seen:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved > self._timeout_s + _GRACE_SECONDS:
                self._end(cause)
        self._leave()

    def _look(self) -> None:
        """Read the first cause, after this rank has told what it knows itself."""
        self._progress.tell_again()
        self._liveness.look(self._step, self.interval_s)
        cause = self._progress.read_cause()
        if self._progress.has_store:
            self._learn(cause if cause is None or cause.rank != self._rank else None)

    def _learn(self, cause: Cause | None) -> None:
        if cause is not None and cause != self._cause:
            self._progress.confirm_cause(cause)
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
            self._liveness.leave()
            return
        # Another rank's end cuts off the loop's own collectives, which name no rank, before it has been told here.
        deadline = time.monotonic() + _LAST_LOOK_SECONDS
        while self._cause is None and self._progress.has_store and time.monotonic() < deadline:
            self._look()
            time.sleep(_LAST_LOOK_SECONDS / 30)
        if self._cause is None:
            self._progress.tell_cause(self._step, f"{type(error).__name__}: {error}")
        self.say_farewell()

    def say_farewell(self) -> None:
        """Let the others read the cause before this process ends, if the store may go with it."""
        if self._may_hold_store:
            farewell_s = max(_FAREWELL_SECONDS, 2 * self.interval_s)
            self._progress.await_confirmations(self._group_size - 1, farewell_s)

    def _end(self, cause: Cause) -> None:
        said = (
            f"{cause.text}; rank {self._rank} has been waiting in one place for {self._timeout_s:g} s since, so its "
            "process ends now (raise timeout_s of the groups if it may pause that long). Its threads:"
        )
        # In one piece, as other ranks may end on the same terminal at the same moment, which makes one jumble of what
        # faulthandler writes word by word; and not to a log, which might not be written before the end.
        with suppress(Exception):  # standard error may be closed, or no file
            sys.stderr.write("\n".join([said, *_stacks(), ""]))
            sys.stderr.flush()
        os._exit(1)


def _places() -> _Places:
    """Where the main thread is, and every other that the program waits for at its end."""
    frames = sys._current_frames()
    main = threading.main_thread()
    places: list[tuple[int, int]] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is not main and thread.daemon:
            continue
        while frame is not None:
            places.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return tuple(places)


def _stacks() -> list[str]:
    """The stack of every thread, the most recent call first; without lines of code, which may lie on a file system that
    hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: list[str] = []
    for ident, frame in sys._current_frames().items():
        stacks.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        at: FrameType | None = frame
        while at is not None:
            stacks.append(f'  File "{at.f_code.co_filename}", line {at.f_lineno} in {at.f_code.co_name}')
            at = at.f_back
    return stacks
