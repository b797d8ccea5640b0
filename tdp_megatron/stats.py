"""Counters and timers that every node fills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["NodeStats"]


@dataclass(slots=True)
class NodeStats:
    """What one node has done since it was made."""

    items: int = 0
    """Items (samples, global batches, steps) handed on."""
    tokens: int = 0
    """Tokens in them, as far as the node knows."""
    wait_seconds: float = 0.0
    """Time spent waiting for the source."""
    work_seconds: float = 0.0
    """Time spent in the node itself."""
    queue_depth: int = 0
    """Items ready ahead of the consumer; only ``Prefetch`` has any."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for the source."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - begin

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside as work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.work_seconds += time.perf_counter() - begin
