"""Threads that work ahead of the training loop and are given time to end when the process ends."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["BackgroundThread", "error_at_exit"]

_EXIT_SECONDS = 5.0

_error_at_exit: BaseException | None = None
_ends_in_child: int | None = None

_started: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


class BackgroundThread(threading.Thread):
    """A daemon thread that the end of the interpreter waits for, a few seconds at most.

    A daemon, because Ctrl-C in the training loop must end the process even while a read hangs. But a daemon that
    comes back from native code when the interpreter is gone takes the whole process down with SIGABRT: torch and
    our kernels take the GIL again in destructors, through which a thread cannot be ended.

    Args:
        target: what to run.
        name: of the thread.
        stop: set at the end of the interpreter, to ask the thread to end.
    """

    def __init__(self, target: Callable[[], None], *, name: str, stop: threading.Event | None = None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop = stop

    def start(self) -> None:
        super().start()
        _started.add(self)
        _register_in_child()


def error_at_exit() -> BaseException | None:
    """The exception that nobody caught and that ends the process; None while it runs, and where there is none."""
    return _error_at_exit


def _register_in_child() -> None:
    """A process that multiprocessing has forked runs no ``atexit`` of before the fork."""
    global _ends_in_child
    if multiprocessing.parent_process() is not None and _ends_in_child != os.getpid():
        _ends_in_child = os.getpid()
        multiprocessing.util.Finalize(None, _end_all, exitpriority=0)


@atexit.register
def _end_all() -> None:
    global _error_at_exit
    # A child of multiprocessing comes here while the error is on its way; else the interpreter has shown it already.
    _error_at_exit = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(_error_at_exit, SystemExit):
        _error_at_exit = _error_at_exit.__context__ if _error_at_exit.code else None
    threads = [thread for thread in _started if thread.is_alive()]
    for thread in threads:
        if thread.stop is not None:
            thread.stop.set()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
