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

    The lock file may become a file that its holder wants to write anyway: a file less to make and to delete.

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
        self._renamed = False
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self.exclusive = self._wait(while_waiting)
                # Whoever held it before has removed the name, or given the file another one: a lock on that file keeps
                # nobody out.
                if not self.exclusive or self._is_named():
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def write(self, content: bytes) -> None:
        """Make this the content of the lock file; for a later ``rename``."""
        os.ftruncate(self._descriptor, 0)
        while content:
            content = content[os.pwrite(self._descriptor, content, os.fstat(self._descriptor).st_size) :]

    def rename(self, path: str) -> None:
        """Give the lock file another name, which stays when the lock is released."""
        os.rename(self.path, path)
        self._renamed = True

    def release(self) -> None:
        """Let others have it; nothing happens the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self.exclusive and not self._renamed:
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
