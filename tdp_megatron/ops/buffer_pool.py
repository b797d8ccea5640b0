"""Memory that is used again: the pages of a new buffer cost more than what is written to them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]


def _references(buffers: list[npt.NDArray[np.uint8]], i: int) -> int:
    return sys.getrefcount(buffers[i])


# What that says of a buffer that only its list holds; Python versions differ.
_IDLE_REFERENCES = _references([np.empty(0, dtype=np.uint8)], 0)
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
        sizes = [(buffer.nbytes, i) for i, buffer in enumerate(self._buffers)]
        for _, i in sorted(pair for pair in sizes if size <= pair[0] <= 4 * size):
            if _references(self._buffers, i) == _IDLE_REFERENCES:
                return self._buffers[i][:size]
        return None
