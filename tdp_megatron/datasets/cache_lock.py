"""One builder per index cache, among all threads and processes that see its folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable

__all__ = ["CacheLock"]

logger = logging.getLogger(__name__)

_LONGEST_POLL_S = 0.25
_SECONDS_BETWEEN_NOTICES = 30.0


class CacheLock:
    """An advisory lock by the name ``path``, which is gone afterwards; a dead holder's lock is free.

    Args:
        path: the lock file.
        while_waiting: called again and again until the lock is free; may raise.

    Raises:
        OSError: the folder cannot be written.
    """

    exclusive: bool
    """Whether nobody else holds it; without locks in the file system, nobody knows."""

    def __init__(self, path: str, while_waiting: Callable[[], None]) -> None:
        self.path = path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self.exclusive = self._wait(while_waiting)
                # Whoever held it before has removed the name: a lock on that file keeps nobody out.
                if not self.exclusive or os.fstat(self._descriptor).st_nlink:
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)

    def release(self) -> None:
        """Let others have it; nothing happens the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self.exclusive:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(descriptor)

    def _wait(self, while_waiting: Callable[[], None]) -> bool:
        started = notified = time.monotonic()
        pause = 0.005
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                while_waiting()
                now = time.monotonic()
                if now - notified > _SECONDS_BETWEEN_NOTICES:
                    notified = now
                    waited = now - started
                    logger.warning("waiting for %s since %.0f s: another process builds this cache", self.path, waited)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_S)
            except OSError as error:
                # Without locks several may build; each still replaces whole files by equal ones.
                logger.warning("%s: this file system has no locks (%s); several processes may build", self.path, error)
                return False
