"""A build in threads ends when it is given up: Python tells Ctrl-C to the main thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["GivenUpError", "Stop", "current_stop"]


class GivenUpError(Exception):
    """The build this thread works for has ended."""


class Stop:
    """Ends the loops of other threads, native ones included; they call it now and then."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """End them."""
        self._event.set()

    def __call__(self) -> None:
        if self._event.is_set():
            raise GivenUpError


_CURRENT: ContextVar[Callable[[], None] | None] = ContextVar("tdp_stop", default=None)


def current_stop() -> Callable[[], None] | None:
    """What loops of the calling thread have to call now and then; None when they need not."""
    return _CURRENT.get()


def stop_with(stop: Callable[[], None]) -> None:
    """Let loops in the present context call ``stop``."""
    _CURRENT.set(stop)
