"""File names of a prefix, and renames that survive a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

__all__ = ["fsync_folder", "get_bin_path", "get_idx_path", "locked_file", "locked_folder"]


def get_idx_path(path_prefix: str) -> str:
    """The index file of a prefix."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """The data file of a prefix."""
    return path_prefix + ".bin"


def fsync_folder(path: str) -> None:
    """Make the renames done in the folder of ``path`` durable; file systems that refuse this are left alone."""
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(path: str) -> Iterator[None]:
    """Hold an advisory lock on the folder of ``path``, where the file system has such locks."""
    # The folder itself is locked rather than a lock file, so that nothing is left behind.
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[None]:
    """Hold an advisory lock by the name ``path``, which is gone afterwards; a dead holder's lock is free."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Whoever held it before has removed the name: a lock on that file keeps nobody out.
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)
