"""Memory for batches that is used again once nobody looks at it any more."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron import _C
from tdp_megatron.torch_dtypes import array_of, tensor_of
from tdp_megatron.types import Int64Array

__all__ = ["BatchBuffers", "RowBuffers", "row_specs"]

# Vectors are stored whole where no store crosses a cache line, and pages of this size need few entries in the TLB.
_HUGE_PAGE = 2 << 20
_LINE = 64


#: Dtype and shape [rows, S, ...] of every key.
Specs: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class _Set(NamedTuple):
    arrays: dict[str, npt.NDArray[Any]]
    references: list[int]
    """Of every array, when nobody else holds it."""


def _references(arrays: dict[str, npt.NDArray[Any]]) -> list[int]:
    return list(map(sys.getrefcount, arrays.values()))


# Without a global lock counts of references do not tell whether another thread is about to take one.
_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()


class BatchBuffers:
    """Arrays for one batch after the other; converting into memory that is mapped already is about twice as fast.

    Where CUDA is there the memory is pinned and comes from torch's pinning allocator, which knows when copies to the
    device have ended. Elsewhere a set of arrays is used again when no tensor over it, and no view of one, is left:
    each tensor's storage holds a reference to its array.

    Args:
        specs: dtype and shape [rows, S, ...] of every key.
        most: sets of arrays kept. A consumer that holds on to more batches gets new memory for the others.
        pin: whether to pin; None where CUDA is there.
    """

    def __init__(self, specs: Specs, *, most: int = 8, pin: bool | None = None) -> None:
        self.specs = dict(specs)
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._arena = _Arena(self.specs, most if _COUNTS_ARE_EXACT else 0)
        self._sets: list[_Set] = []

    def take(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, torch.Tensor]]:
        """Uninitialised arrays [rows, S, ...] per key, and tensors over the same memory."""
        if self._pin:
            return _pinned(self.specs)
        arrays = self._idle_set() or self._new_set()
        return arrays, dict(zip(arrays, map(tensor_of, arrays.values()), strict=True))

    def _idle_set(self) -> dict[str, npt.NDArray[Any]] | None:
        for arrays, references in self._sets:
            if _references(arrays) == references:
                return arrays
        return None

    def _new_set(self) -> dict[str, npt.NDArray[Any]]:
        arrays = self._arena.next_set()
        if arrays is None:
            return _unkept(self.specs)
        self._sets.append(_Set(arrays, _references(arrays)))
        return arrays


class RowBuffers:
    """Batches of samples that are as long as a row: looking for memory, reading and making tensors in one native call.

    Memory is used again as in ``BatchBuffers``.

    Args:
        rows: samples of a batch.
        width: tokens of a sample.
        most: batches whose memory is kept.
        pin: whether to pin; None where CUDA is there.
        documents: whether the documents of each sample are told apart.
    """

    def __init__(
        self, rows: int, width: int, *, most: int = 8, pin: bool | None = None, documents: bool = False
    ) -> None:
        self._specs = row_specs(rows, width, documents=documents)
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._arena = _Arena(self._specs, most if _COUNTS_ARE_EXACT else 0)
        self._native = _C.RowBuffers(list(self._specs), torch.from_numpy)

    def read(
        self,
        readers: list[_C.SpanReader],
        reader_index: Int64Array | None,
        sample_ids: Int64Array,
        first: int,
        next_first: int = -1,
    ) -> dict[str, torch.Tensor]:
        """The tensors of ``row_specs``.

        Args:
            readers: of mapped files.
            reader_index: int64 [rows], the reader of each sample; None where there is one.
            sample_ids: int64 [n].
            first: the sample of the first row; those of the others follow.
            next_first: that of the next read, whose pages are then asked for where storage is slow; -1 if not known.
        """
        if not self._pin:
            batch = self._native.read(readers, reader_index, sample_ids, first, next_first)
            if batch is not None:
                return batch
            arrays = self._arena.next_set()
            if arrays is not None:
                self._native.add(*arrays.values())
                del arrays  # a set is free when only the native side refers to it
                return self.read(readers, reader_index, sample_ids, first, next_first)
            arrays = _unkept(self._specs)
            tensors = {key: tensor_of(array) for key, array in arrays.items()}
        else:
            arrays, tensors = _pinned(self._specs)
        _C.read_rows(readers, reader_index, sample_ids, first, *arrays.values())
        return tensors


def row_specs(rows: int, width: int, *, documents: bool) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """What a batch of token files holds: dtype and shape by key.

    Args:
        rows: samples.
        width: S, tokens of a row.
        documents: whether ``cu_seqlens`` [rows, S + 1] and ``max_seqlen`` [rows] are among it.
    """
    integers, shape = np.dtype(np.int64), (rows, width)
    specs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "tokens": (integers, shape),
        "labels": (integers, shape),
        "loss_mask": (np.dtype(np.float32), shape),
        "position_ids": (integers, shape),
    }
    if documents:
        specs["cu_seqlens"] = (np.dtype(np.int32), (rows, width + 1))
        specs["max_seqlen"] = (np.dtype(np.int32), (rows,))
    return specs


def _pinned(specs: Specs) -> tuple[dict[str, npt.NDArray[Any]], dict[str, torch.Tensor]]:
    tensors = {
        key: torch.empty(shape, dtype=tensor_of(np.empty(0, dtype)).dtype, pin_memory=True)
        for key, (dtype, shape) in specs.items()
    }
    return {key: array_of(tensor) for key, tensor in tensors.items()}, tensors


def _unkept(specs: Specs) -> dict[str, npt.NDArray[Any]]:
    return {key: np.empty(shape, dtype=dtype) for key, (dtype, shape) in specs.items()}


class _Arena:
    """The arrays of the sets that are kept, in one stretch of memory, of which unused parts cost nothing.

    Args:
        specs: what a set holds.
        most: sets.
    """

    def __init__(self, specs: Specs, most: int) -> None:
        self._specs = specs
        self._most = most
        self._num_sets = 0
        self._memory: npt.NDArray[np.uint8] | None = None

    def next_set(self) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of one more set; None when there are as many as are kept."""
        if self._num_sets >= self._most:
            return None
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in self._specs.values()]
        steps = [-(-size // _LINE) * _LINE for size in sizes]
        if self._memory is None:
            self._memory = _aligned(sum(steps) * self._most)
        at = sum(steps) * self._num_sets
        self._num_sets += 1
        arrays = {}
        for (key, (dtype, shape)), size, step in zip(self._specs.items(), sizes, steps, strict=True):
            arrays[key] = self._memory[at : at + size].view(dtype).reshape(shape)
            at += step
        return arrays


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Private memory, zeros, from the start of a huge page where there is more than one of it."""
    if size < _HUGE_PAGE:
        whole = np.zeros(size + _LINE, dtype=np.uint8)
        begin = -whole.ctypes.data % _LINE
        return whole[begin : begin + size]
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE
    return whole[begin : begin + size]
