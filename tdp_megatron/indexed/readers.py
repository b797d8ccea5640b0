"""How bytes come out of a file: a memory map, or positioned reads that are tried again.

Both know the file as it was when it was opened first; a file that has changed since is an error, never other data.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.pool import OPEN_FILES

__all__ = ["BinReader", "FileBinReader", "FileIdentity", "MMapBinReader", "map_file", "open_map"]

# Errors that a network file system may get over; anything else is reported at once.
_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ENOMEM})

# One read call moves at most this; Linux itself stops at 2 GiB.
_LARGEST_READ = 1 << 30


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one version of a file from the next."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, descriptor: int | None = None) -> FileIdentity:
        """The identity of ``path`` now, or of what ``descriptor`` has open."""
        # It may be opened later, or again, when the process works in another folder.
        path = os.path.abspath(path)
        status = os.stat(path if descriptor is None else descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", path)
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, now: FileIdentity) -> None:
        """Raise FormatError if the file is another one by now."""
        if now != self:
            raise FormatError(
                f"{self.path}: changed while in use ({self.size} bytes when opened, {now.size} now); open the "
                f"dataset again"
            )


class _Descriptor:
    """A file descriptor that closes with its last user."""

    def __init__(self, identity: FileIdentity) -> None:
        self.number = os.open(identity.path, os.O_RDONLY | os.O_CLOEXEC)
        identity.check(FileIdentity.of(identity.path, self.number))

    def __del__(self) -> None:
        number = getattr(self, "number", None)
        if number is not None:
            os.close(number)


def open_map(identity: FileIdentity) -> npt.NDArray[np.uint8]:
    """Map a whole file read-only; no descriptor stays open.

    Returns:
        uint8 [size].

    Raises:
        FormatError: the file has changed.
    """
    descriptor = os.open(identity.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        identity.check(FileIdentity.of(identity.path, descriptor))
        return _C.map_descriptor(descriptor)
    finally:
        os.close(descriptor)


def map_file(identity: FileIdentity) -> npt.NDArray[np.uint8]:
    """The map of a whole file, from the pool of open files."""
    mapped: npt.NDArray[np.uint8] = OPEN_FILES.get(("map", identity), lambda: open_map(identity))
    return mapped


class _Version(Protocol):
    """One version of a file, wherever it is."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


class BinReader(ABC):
    """Reads tokens of a ``.bin`` file; callers have checked single ranges, ``read_pieces`` checks its own.

    Args:
        identity: the file as it was when the index was checked against it.
        dtype: element type.
    """

    def __init__(self, identity: _Version, dtype: np.dtype[Any]) -> None:
        self.identity = identity
        self.dtype = dtype

    @abstractmethod
    def read(self, byte_offset: int, count: int) -> npt.NDArray[Any]:
        """``count`` tokens from ``byte_offset``."""

    @abstractmethod
    def _read_runs(self, offsets: list[int], out: list[npt.NDArray[Any]]) -> None:
        """Fill each array of ``out`` from its byte offset."""

    def bytes(self) -> npt.NDArray[np.uint8] | None:
        """The whole file as uint8 [size] without reading it, or None where there is no map."""
        return None

    def read_pieces(self, byte_offsets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Many token ranges, one after the other.

        Args:
            byte_offsets: int64 [p], bytes from the start of the file, multiples of the token size.
            counts: int64 [p], tokens.

        Returns:
            dtype [sum of counts].

        Raises:
            IndexError: a range is not inside the file.
            ValueError: the arrays differ in shape, or an offset is not that of a whole token.
        """
        offsets = np.asarray(byte_offsets, dtype=np.int64)
        counts = np.asarray(counts, dtype=np.int64)
        if offsets.ndim != 1 or offsets.shape != counts.shape:
            raise ValueError(
                f"byte_offsets and counts must be 1-D and equally long, got {offsets.shape} and {counts.shape}"
            )
        itemsize = self.dtype.itemsize
        # Divided, not multiplied: a hostile count must not overflow into the range.
        outside = (offsets < 0) | (counts < 0) | (counts > (self.identity.size - offsets) // itemsize)
        if outside.any():
            i = int(outside.argmax())
            raise IndexError(
                f"{self.identity.path}: piece {i}: {counts[i]} tokens from byte {offsets[i]} are not inside the "
                f"file of {self.identity.size} bytes"
            )
        if itemsize > 1 and (offsets % itemsize).any():
            i = int((offsets % itemsize != 0).argmax())
            raise ValueError(f"piece {i}: byte offset {offsets[i]} is not a multiple of the {itemsize}-byte token")
        result = np.empty(int(counts.sum()), dtype=self.dtype)
        if len(result):
            self._gather(offsets, counts, result)
        return result

    def _gather(self, offsets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], result: npt.NDArray[Any]) -> None:
        ends = np.cumsum(counts)
        # Neighbours in the file are neighbours in the result, so they are one read.
        breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + counts[:-1] * self.dtype.itemsize)
        starts = (ends - counts)[np.concatenate(([0], breaks + 1))].tolist()
        stops = ends[np.concatenate((breaks, [len(ends) - 1]))].tolist()
        run_offsets = offsets[np.concatenate(([0], breaks + 1))].tolist()
        self._read_runs(run_offsets, [result[a:b] for a, b in zip(starts, stops, strict=True)])


class MMapBinReader(BinReader):
    """Reads through a memory map; arrays are read-only views of it."""

    identity: FileIdentity

    def bytes(self) -> npt.NDArray[np.uint8]:
        return map_file(self.identity)

    def read(self, byte_offset: int, count: int) -> npt.NDArray[Any]:
        end = byte_offset + count * self.dtype.itemsize
        return map_file(self.identity)[byte_offset:end].view(self.dtype)

    def _gather(self, offsets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], result: npt.NDArray[Any]) -> None:
        # Short pieces cost more in calls than in bytes: one take through an index of every token. Long ones
        # are cheaper to copy one by one than to index at 8 bytes a token.
        if len(result) >= 64 * len(counts):
            super()._gather(offsets, counts, result)
            return
        firsts = offsets // self.dtype.itemsize - (np.cumsum(counts) - counts)
        index = np.repeat(firsts, counts)
        index += np.arange(len(result))
        np.take(map_file(self.identity).view(self.dtype), index, out=result, mode="clip")

    def _read_runs(self, offsets: list[int], out: list[npt.NDArray[Any]]) -> None:
        data = map_file(self.identity).view(self.dtype)
        for offset, part in zip(offsets, out, strict=True):
            first = offset // self.dtype.itemsize
            part[:] = data[first : first + len(part)]


class FileBinReader(BinReader):
    """Reads with positioned reads, for file systems where maps are slow or fail."""

    TRIES = 4
    """Attempts per range before the error is passed on."""
    BACKOFF_SECONDS = 0.1
    """Wait before the second attempt; it doubles with each further one."""

    identity: FileIdentity

    def read(self, byte_offset: int, count: int) -> npt.NDArray[Any]:
        result = np.empty(count, dtype=self.dtype)
        self._read_runs([byte_offset], [result])
        return result

    def _read_runs(self, offsets: list[int], out: list[npt.NDArray[Any]]) -> None:
        for offset, part in zip(offsets, out, strict=True):
            if len(part):
                self._fill(offset, part.view(np.uint8).data)

    def _fill(self, offset: int, target: memoryview) -> None:
        done = 0
        failures = 0
        while done < len(target):
            try:
                # A local reference keeps the descriptor open while another thread evicts it from the pool.
                handle: _Descriptor = OPEN_FILES.get(("fd", self.identity), lambda: _Descriptor(self.identity))
                read = os.preadv(handle.number, [target[done : done + _LARGEST_READ]], offset + done)
            except OSError as error:
                failures += 1
                if error.errno not in _TRANSIENT or failures >= self.TRIES:
                    raise OSError(
                        error.errno,
                        f"reading {len(target)} bytes from byte {offset} failed {failures} times: {error.strerror}",
                        self.identity.path,
                    ) from error
                # A stale handle stays stale: the next attempt opens the file again.
                OPEN_FILES.discard(("fd", self.identity))
                time.sleep(self.BACKOFF_SECONDS * 2 ** (failures - 1))
                continue
            if read == 0:
                raise FormatError(
                    f"{self.identity.path}: ends at byte {offset + done}, {len(target) - done} bytes short of what "
                    f"the index needs; it had {self.identity.size} bytes when opened"
                )
            done += read
