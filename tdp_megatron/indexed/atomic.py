"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import weakref
from typing import IO

__all__ = ["TemporaryOutput"]

_BUFFER = 1 << 20


class TemporaryOutput:
    """A file written as ``<path>.<random>.tmp`` and renamed to ``path`` by ``rename``.

    It is locked while it is written; files that killed writers of the same ``path`` left behind hold no lock, and
    are removed by the next writer. One that is dropped without ``rename`` removes itself.

    Args:
        path: final name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _remove_abandoned(path)
        while True:
            self.temporary_path = f"{path}.{secrets.token_hex(4)}.tmp"
            self.file: IO[bytes] = open(self.temporary_path, "xb", buffering=_BUFFER)  # noqa: SIM115
            with contextlib.suppress(OSError):
                fcntl.flock(self.file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another writer may have taken it for abandoned between its creation and its lock.
            if os.fstat(self.file.fileno()).st_nlink:
                break
            self.file.close()
        self._discard = weakref.finalize(self, _discard, self.file, self.temporary_path)

    def sync(self) -> None:
        """Write everything to the device."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self) -> None:
        """Give the file its final name; call ``sync`` before and ``fsync_folder`` after."""
        os.replace(self.temporary_path, self.path)
        self._discard.detach()
        self.file.close()

    def discard(self) -> None:
        """Remove the file; nothing happens after ``rename``."""
        self._discard()


def _discard(file: IO[bytes], path: str) -> None:
    # Removed first: closing flushes, which fails on a full device.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        file.close()


def _remove_abandoned(path: str) -> None:
    for left in glob.glob(glob.escape(path) + ".????????.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
            finally:
                os.close(descriptor)
