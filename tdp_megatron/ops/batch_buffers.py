"""Memory for batches that is used again once nobody looks at it any more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BatchBuffers"]


def _references(arrays: list[npt.NDArray[Any]], i: int) -> int:
    return sys.getrefcount(arrays[i])


# What that says of an array with one view that nobody else holds; Python versions differ.
_probe = [np.empty(0)]
_view_of_probe = _probe[0].reshape(-1, 1)
_IDLE_REFERENCES = _references(_probe, 0)


#: Arrays in the order of the specs, and their flat views.
_Set: TypeAlias = tuple[list[npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]


class BatchBuffers:
    """Arrays for one batch after the other; converting into memory that is mapped already is about twice as fast.

    Where CUDA is there the memory is pinned and comes from torch's pinning allocator, which knows when copies to the
    device have ended. Elsewhere arrays are used again when their tensors are gone.

    Args:
        specs: dtype and shape [rows, S, ...] of every key.
        most: sets of arrays kept. A consumer that holds on to more batches gets new memory for the others.
        pin: whether to pin; None where CUDA is there.
    """

    def __init__(
        self, specs: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], *, most: int = 8, pin: bool | None = None
    ) -> None:
        self.specs = dict(specs)
        self._most = most
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._sets: list[_Set] = []

    def take(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, torch.Tensor]]:
        """Arrays [rows * S, ...] per key, uninitialised, and tensors [rows, S, ...] over the same memory."""
        if self._pin:
            tensors = {
                key: torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=True)
                for key, (dtype, shape) in self.specs.items()
            }
            return {key: tensor.numpy().reshape(-1, *tensor.shape[2:]) for key, tensor in tensors.items()}, tensors
        kept, flat = self._idle_set() or self._new_set()
        return flat, dict(zip(self.specs, map(torch.from_numpy, kept), strict=True))

    def _idle_set(self) -> _Set | None:
        for found in self._sets:
            arrays = found[0]
            for i in range(len(arrays)):
                if _references(arrays, i) != _IDLE_REFERENCES:
                    break
            else:
                return found
        return None

    def _new_set(self) -> _Set:
        arrays = [np.empty(shape, dtype=dtype) for dtype, shape in self.specs.values()]
        flat = {key: a.reshape(-1, *a.shape[2:]) for key, a in zip(self.specs, arrays, strict=True)}
        if len(self._sets) < self._most:
            self._sets.append((arrays, flat))
        return arrays, flat
