"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import weakref
from typing import IO

__all__ = ["TemporaryOutput", "temporary_names"]

_BUFFER = 1 << 20
_SUFFIX_LENGTH = len(".01234567.tmp")
_MOST_LISTS = 64
_LISTS: dict[str, tuple[float, list[str]]] = {}


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
            self.file: IO[bytes] = self._created()
            with contextlib.suppress(OSError):
                fcntl.flock(self.file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another writer may have taken it for abandoned between its creation and its lock.
            if os.fstat(self.file.fileno()).st_nlink:
                break
            self.file.close()
        self._discard = weakref.finalize(self, _discard, self.file, self.temporary_path)

    def _created(self) -> IO[bytes]:
        try:
            return open(self.temporary_path, "xb", buffering=_BUFFER)
        except OSError as error:
            folder = os.path.dirname(self.path) or "."
            why = os.strerror(error.errno or 0)
            if not os.path.isdir(folder):
                why = f"{folder} is {'a file' if os.path.exists(folder) else 'missing'}; make that folder first"
            # The temporary name says nothing to who has asked for the file.
            raise OSError(error.errno, f"cannot write it: {why}", self.path) from error

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
    folder, name = os.path.split(path)
    for found in temporary_names(folder or "."):
        if not (found.startswith(name + ".") and len(found) == len(name) + _SUFFIX_LENGTH):
            continue
        with contextlib.suppress(OSError):
            left = os.path.join(folder, found)
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
            finally:
                os.close(descriptor)


def temporary_names(folder: str) -> list[str]:
    """Names of temporary files in a folder.

    A folder of thousands of caches is not listed for every file that is written into it: a list is used again for
    ten times as long as it took to make.
    """
    now = time.monotonic()
    until, names = _LISTS.get(folder, (0.0, []))
    if now < until:
        return names
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    except OSError:
        return []
    done = time.monotonic()
    if len(_LISTS) >= _MOST_LISTS:
        _LISTS.clear()
    _LISTS[folder] = (done + 10 * (done - now), names)
    return names
