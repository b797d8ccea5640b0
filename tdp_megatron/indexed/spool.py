"""Integers that pile up while a file is written: in memory up to a limit, then in an unnamed temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

__all__ = ["Spool"]


class Spool:
    """An append-only array of bounded memory.

    Args:
        dtype: element type.
        folder: where the temporary file goes, without a name, so that a killed process leaves nothing.
        limit: elements kept in memory.
    """

    def __init__(self, dtype: npt.DTypeLike, folder: str, limit: int = 1 << 20) -> None:
        self._buffer = np.empty(1024, dtype=dtype)
        self._used = 0
        self._limit = limit
        self._folder = folder
        self._spilled = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self._spilled + self._used

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append 1-D ``values``."""
        needed = self._used + len(values)
        if needed > len(self._buffer):
            if needed > self._limit:
                self._spill()
                self._write(values)
                return
            grown = np.empty(max(needed, 2 * len(self._buffer)), dtype=self._buffer.dtype)
            grown[: self._used] = self._buffer[: self._used]
            self._buffer = grown
        self._buffer[self._used : needed] = values
        self._used = needed

    def _spill(self) -> None:
        self._write(self._buffer[: self._used])
        self._used = 0

    def _write(self, values: npt.NDArray[Any]) -> None:
        if self._file is None:
            # Unnamed, and closed by close() or with its last reference.
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._file.write(np.ascontiguousarray(values, dtype=self._buffer.dtype).data)
        self._spilled += len(values)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """Everything appended, in order, in arrays of bounded size."""
        if self._file is not None:
            self._file.seek(0)
            for first in range(0, self._spilled, self._limit):
                size = min(self._limit, self._spilled - first) * self._buffer.itemsize
                yield np.frombuffer(self._file.read(size), dtype=self._buffer.dtype)
        if self._used:
            yield self._buffer[: self._used]

    def close(self) -> None:
        """Free the memory and the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._buffer = self._buffer[:0]
        self._used = self._spilled = 0
