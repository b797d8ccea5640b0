"""Memory that is used again: the pages of a new buffer cost more than what is written to them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]

#: References to a buffer that nobody uses: the pool's list, the loop variable, and the argument of getrefcount.
_IDLE_REFERENCES = 3
_SMALLEST = 1 << 16


class BufferPool:
    """Hands out uninitialised arrays, and takes the memory back when the last array or tensor over it is gone.

    Nothing has to be returned: CPython's reference count of a buffer tells whether a view of it is still alive.

    Args:
        max_buffers: buffers kept; more are handed out, but not kept.
    """

    def __init__(self, max_buffers: int = 64) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._max_buffers = max_buffers
        self._lock = threading.Lock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised, writable, contiguous array."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if size < _SMALLEST:
            return np.empty(shape, dtype=kind)
        with self._lock:
            view = self._idle(size)
            if view is None:
                # Some room to grow, so that steps of slightly different size share one buffer.
                owner = np.empty(size + size // 8, dtype=np.uint8)
                if len(self._buffers) < self._max_buffers:
                    self._buffers.append(owner)
                view = owner[:size]
        array: npt.NDArray[Any] = view.view(kind).reshape(shape)
        return array

    def _idle(self, size: int) -> npt.NDArray[np.uint8] | None:
        best = None
        for buffer in self._buffers:
            fits = size <= buffer.nbytes <= 4 * size
            if fits and sys.getrefcount(buffer) == _IDLE_REFERENCES and (best is None or buffer.nbytes < best[0]):
                best = (buffer.nbytes, buffer[:size])
        return None if best is None else best[1]
