"""How index caches get their names: complete or not at all, many of them with one wait for the device."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.cache_files import Arrays, CacheKey, file_stamps, manifest_bytes
from tdp_megatron.datasets.cache_lock import CacheLock
from tdp_megatron.errors import CacheError
from tdp_megatron.indexed.atomic import temporary_names
from tdp_megatron.indexed.paths import fsync_folder

__all__ = ["UNWRITABLE_REMEDY", "CacheWriter", "current_writer", "grouped_writes", "unwritable", "write_beside"]

# What waits for a commit is what a crash loses, what others wait for, and a descriptor each.
_MOST_CACHES = 64
_MOST_BYTES = 256 << 20
_LONGEST_S = 2.0

# A signal is seen between two writes.
_WRITE_BYTES = 64 << 20

_DESCRIPTION = "description.txt"

UNWRITABLE_REMEDY = (
    "Set path_to_cache to a folder with room that this process may write, or to '' for indices without a cache"
)


@dataclass(slots=True)
class _Pending:
    """A cache whose files are written and do not have their names yet."""

    key: CacheKey
    lock: CacheLock
    described: dict[str, Any]
    suffixes: list[str]
    """Of the arrays' files."""


class CacheWriter:
    """Writes caches under temporary names and gives them their own in groups.

    A process that dies at any point leaves whole caches and temporary files, which the next builder of the same cache
    removes. The files of a group reach the device before the first of them is renamed, with one call for all of them:
    a call per file costs more than everything else when there are thousands.

    Args:
        most_caches: caches in a group.
    """

    def __init__(self, most_caches: int = 1) -> None:
        self._most_caches = most_caches
        self._token = secrets.token_hex(4)
        self._pending: list[_Pending] = []
        self._bytes = 0
        self._since = 0.0
        self._folders: set[str] = set()
        self._left: dict[str, list[str]] = {}
        self._mutex = threading.Lock()

    def write(self, key: CacheKey, described: dict[str, Any], arrays: Arrays, lock: CacheLock) -> None:
        """Write a cache; it is there after ``commit``, which happens by itself when a group is large.

        Args:
            key: where.
            described: what the manifest says, as ``describe_arrays`` gives it.
            arrays: its content.
            lock: the cache's, which the writer releases, here when it fails.

        Raises:
            OSError: the files cannot be written; none of them is left.
        """
        pending = _Pending(key, lock, described, [f"{name}.npy" for name in key.names])
        try:
            if lock.exclusive:
                self._remove_abandoned(key)
            # A cache counts as complete with its description: that goes first and comes last, so that no reader,
            # Megatron's included, takes new and old files for one cache.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key.path(_DESCRIPTION))
            for name, suffix in zip(key.names, pending.suffixes, strict=True):
                _write_array(self._temporary(key, suffix), arrays[name])
            if lock.exclusive:
                lock.write(key.description.encode())
            else:
                _write_bytes(self._temporary(key, _DESCRIPTION), key.description.encode())
        except BaseException:
            self._drop([pending])
            raise
        with self._mutex:
            self._since = self._since if self._pending else time.monotonic()
            self._pending.append(pending)
            self._bytes += sum(array.nbytes for array in arrays.values())
            full = len(self._pending) >= self._most_caches or self._bytes >= _MOST_BYTES
            full = full or time.monotonic() - self._since > _LONGEST_S
        if full:
            self.commit()

    def commit(self) -> None:
        """Give everything written its name.

        Raises:
            OSError: that is not possible; what has no name yet is removed.
        """
        pending = self._take()
        placed = 0
        try:
            self._make_durable(pending)
            for cache in pending:
                self._place(cache)
                cache.lock.release()
                placed += 1
        except BaseException:
            self._drop(pending[placed:])
            raise

    def close(self) -> None:
        """Commit, and make the names durable.

        Raises:
            OSError: see ``commit``.
        """
        self.commit()
        for folder in self._folders:
            fsync_folder(f"{folder}/")
        self._folders.clear()

    def discard(self) -> None:
        """Remove what has no name yet."""
        self._drop(self._take())

    def _take(self) -> list[_Pending]:
        with self._mutex:
            pending, self._pending, self._bytes = self._pending, [], 0
        return pending

    def _remove_abandoned(self, key: CacheKey) -> None:
        """Remove what killed builders of this cache left; whoever holds its lock is the only living one."""
        if key.folder not in self._left:
            self._left[key.folder] = temporary_names(key.folder)
        for name in self._left[key.folder]:
            if name.startswith(f"{key.base}-"):
                with contextlib.suppress(OSError):
                    os.unlink(f"{key.folder}/{name}")

    def _temporary(self, key: CacheKey, suffix: str) -> str:
        return f"{key.path(suffix)}.{self._token}.tmp"

    def _make_durable(self, pending: list[_Pending]) -> None:
        if len(pending) == 1:
            (cache,) = pending
            for suffix in cache.suffixes:
                _sync_file(self._temporary(cache.key, suffix))
            _sync_file(cache.lock.path if cache.lock.exclusive else self._temporary(cache.key, _DESCRIPTION))
            return
        devices = {os.stat(cache.key.folder).st_dev: cache.key.folder for cache in pending}
        for folder in devices.values():
            _C.sync_file_system(folder)

    def _place(self, cache: _Pending) -> None:
        key = cache.key
        # Times as they are now: a network file system may have changed them since the files were written.
        stamps = file_stamps(key, lambda suffix: self._temporary(key, suffix))
        for suffix in cache.suffixes:
            os.rename(self._temporary(key, suffix), key.path(suffix))
        write_beside(key, manifest_bytes(cache.described, stamps))
        if cache.lock.exclusive:
            cache.lock.rename(key.path(_DESCRIPTION))
        else:
            os.rename(self._temporary(key, _DESCRIPTION), key.path(_DESCRIPTION))
        self._folders.add(key.folder)

    def _drop(self, pending: list[_Pending]) -> None:
        for cache in pending:
            for suffix in (*cache.suffixes, _DESCRIPTION):
                with contextlib.suppress(OSError):
                    os.unlink(self._temporary(cache.key, suffix))
            cache.lock.release()


_CURRENT: ContextVar[CacheWriter | None] = ContextVar("tdp_cache_writer", default=None)


def current_writer() -> CacheWriter | None:
    """The writer of the ``grouped_writes`` around the caller."""
    return _CURRENT.get()


@contextlib.contextmanager
def grouped_writes() -> Iterator[CacheWriter]:
    """Caches built inside get their names in groups, the last ones at the end; after an error those are removed."""
    writer = CacheWriter(_MOST_CACHES)
    token = _CURRENT.set(writer)
    try:
        yield writer
        try:
            writer.close()
        except OSError as error:
            raise unwritable("files", error) from error
    finally:
        writer.discard()
        _CURRENT.reset(token)


def unwritable(what: str, error: OSError) -> CacheError:
    """The error for caches that cannot be written."""
    return CacheError(f"cannot keep the index cache {what}: {error}. {UNWRITABLE_REMEDY}")


def write_beside(key: CacheKey, manifest: bytes) -> None:
    """Put a manifest beside a cache.

    It is not waited for: one that a crash has damaged counts as missing, and the cache is then checked as those of
    others are.
    """
    path = key.path("manifest.json")
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        _write_bytes(temporary, manifest)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_array(path: str, array: npt.NDArray[Any]) -> None:
    _write_bytes(path, _npy_header(array), array)


def _npy_header(array: npt.NDArray[Any]) -> bytes:
    """What ``numpy.save`` puts before a C-ordered array of a plain dtype, several times faster."""
    text = f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': {array.shape}, }}"
    size = -(-(10 + len(text) + 1) // 64) * 64
    return b"\x93NUMPY\x01\x00" + (size - 10).to_bytes(2, "little") + f"{text:<{size - 11}}\n".encode()


def _write_bytes(path: str, head: bytes, array: npt.NDArray[Any] | None = None) -> None:
    """Write a new file; closed at once, because thousands wait together."""
    body = memoryview(b"") if array is None else array.reshape(-1).view(np.uint8).data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in (memoryview(head), body):
            while len(part):
                part = part[os.write(descriptor, part[:_WRITE_BYTES]) :]
    finally:
        os.close(descriptor)


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
