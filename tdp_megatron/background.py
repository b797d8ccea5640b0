"""Threads that work ahead of the training loop and are given time to end when the process ends."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["BackgroundThread"]

_EXIT_SECONDS = 5.0

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


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in _started if thread.is_alive()]
    for thread in threads:
        if thread.stop is not None:
            thread.stop.set()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
