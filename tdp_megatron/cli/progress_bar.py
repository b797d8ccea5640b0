"""How far a long command is, on terminals."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

__all__ = ["ProgressBar"]

_QUIET_S = 2.0
"""Commands that take less show nothing."""
_SECONDS_BETWEEN_LINES = 5.0


class ProgressBar:
    """Shows on standard error how many of something are done: a bar with rich, lines without; nothing in files.

    Args:
        what: what is counted.
        quiet_s: nothing is shown before, seconds.
    """

    def __init__(self, what: str, quiet_s: float = _QUIET_S) -> None:
        self._what = what
        self._quiet_s = quiet_s
        self._done, self._total = 0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is; from any thread."""
        self._done, self._total = done, total

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        # A thread shows it, because the one that works may be in native code for a long time.
        if self._ended.wait(self._quiet_s):
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            self._show_lines()
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task: Any = bar.add_task(self._what, total=None)
            over = False
            while not over:
                bar.update(task, completed=self._done, total=self._total or None)
                over = self._ended.wait(0.2)

    def _show_lines(self) -> None:
        began = time.monotonic() - self._quiet_s
        while True:
            of = f" of {self._total}" if self._total else ""
            print(f"{self._what}: {self._done}{of} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if self._ended.wait(_SECONDS_BETWEEN_LINES):
                return
