"""A bounded pool of open files: thousands of datasets do not need thousands of descriptors."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["OPEN_FILES", "HandlePool"]


class HandlePool:
    """The most recently used handles; an evicted one closes when its last user lets go of it.

    Args:
        limit: handles kept; each descriptor and each map is one.
    """

    def __init__(self, limit: int = 64) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self._limit = limit
        self._handles: OrderedDict[Hashable, Any] = OrderedDict()
        # Reentrant: a finalizer that discards a handle may run in the thread that holds it.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, key: Hashable, open_handle: Callable[[], Any]) -> Any:
        """The handle of ``key``, opened with ``open_handle`` when it is not in the pool."""
        with self._lock:
            handle = self._handles.get(key)
            if handle is not None:
                self._handles.move_to_end(key)
                return handle
        handle = open_handle()
        evicted = None
        with self._lock:
            handle = self._handles.setdefault(key, handle)
            self._handles.move_to_end(key)
            if len(self._handles) > self._limit:
                _, evicted = self._handles.popitem(last=False)
        # Outside the lock: closing can be slow on network file systems.
        del evicted
        return handle

    def discard(self, key: Hashable) -> None:
        """Forget ``key``."""
        with self._lock:
            handle = self._handles.pop(key, None)
        del handle

    def renew_lock(self) -> None:
        """Replace the lock: a fork may have copied it while another thread held it."""
        self._lock = threading.RLock()


#: The pool every reader shares.
OPEN_FILES = HandlePool()

os.register_at_fork(after_in_child=OPEN_FILES.renew_lock)
