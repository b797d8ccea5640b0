"""Threads that wait for object storage, and the blocks of objects kept in memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCKS", "Block", "BlockCache", "run_in_threads"]

THREADS = 16
"""Requests under way at a time."""

T = TypeVar("T")

Block: TypeAlias = npt.NDArray[np.uint8]


class BlockCache:
    """The most recently used blocks, of a bounded number of bytes."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[Any, ...], Block] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def get(self, key: tuple[Any, ...]) -> Block | None:
        """The block of ``key``, None when it is not there."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: tuple[Any, ...], block: Block, limit: int) -> None:
        """Keep a block, and let go of others until no more than ``limit`` bytes are held."""
        with self._lock:
            if key in self._blocks:
                return
            self._blocks[key] = block
            self._bytes += block.nbytes
            while self._bytes > limit:
                _, old = self._blocks.popitem(last=False)
                self._bytes -= old.nbytes

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0

    def renew_lock(self) -> None:
        """Replace the lock: a fork may have copied it while another thread held it."""
        self._lock = threading.Lock()


#: What all readers of the process share.
BLOCKS = BlockCache()

_threads: ThreadPoolExecutor | None = None
_threads_lock = threading.Lock()


def run_in_threads(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Do ``work`` for every item, several at a time; the first error is raised once all have ended."""
    todo = list(items)
    if len(todo) == 1:
        work(todo[0])
        return
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tdp-object-storage")
        threads = _threads
    # All must have ended before an error leaves: they write into the caller's memory.
    futures = [threads.submit(work, item) for item in todo]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _after_fork() -> None:
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()
    BLOCKS.renew_lock()


os.register_at_fork(after_in_child=_after_fork)
