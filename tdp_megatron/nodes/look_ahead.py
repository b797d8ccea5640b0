"""``LookAhead``: global batches of equal work, by moving samples within a window of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes.base import (
    ENDLESS,
    BeyondEndError,
    SampleSource,
    draw_block,
    leaf_count,
    require_node,
    skip_samples,
)
from tdp_megatron.schedule import CostModel
from tdp_megatron.schedule.api import DEFAULT_COST
from tdp_megatron.types import Int64Array, SampleBlock

__all__ = ["LookAhead", "balanced_batches"]


def balanced_batches(costs: np.ndarray[Any, np.dtype[np.float64]], num_batches: int) -> Int64Array:
    """Deal samples into batches of equal number and nearly equal work.

    The dearest sample goes to the batch with the least work that still has room; inside a batch the order of arrival
    is kept. Ties are broken by place, so that the result is one everywhere.

    Args:
        costs: float64 [n], n a multiple of num_batches.
        num_batches: batches.

    Returns:
        int64 [n], places of the samples, batch after batch; inside a batch they rise.
    """
    size = len(costs) // num_batches
    members: list[list[int]] = [[] for _ in range(num_batches)]
    heap = [(0.0, b) for b in range(num_batches)]
    for i in np.argsort(-costs, kind="stable").tolist():
        work, b = heapq.heappop(heap)
        members[b].append(i)
        if len(members[b]) < size:
            heapq.heappush(heap, (work + float(costs[i]), b))
    return np.array([i for batch in members for i in sorted(batch)], dtype=np.int64)


class LookAhead(SampleSource):
    """Reorders samples within windows of ``num_batches`` global batches so that all of them are equally much work.

    A lone very long sequence can make a global batch slow however well it is scheduled; here its batch gets the short
    samples. This moves samples between optimiser steps, which training must accept, so it is never on by itself. The
    order depends on lengths and cost alone, not on ranks, and resumes exactly on any layout. A last incomplete window
    keeps its order.

    Args:
        source: samples.
        global_batch_size: as in ``Pack``.
        num_batches: global batches in a window.
        cost: what a sequence costs; None for the default model.

    Raises:
        TypeError, ValueError: a bad argument.
    """

    WINDOW_KEY = "window_position"

    def __init__(
        self, source: BaseNode[Any], *, global_batch_size: int, num_batches: int, cost: CostModel | None = None
    ) -> None:
        super().__init__()
        require_node(source)
        for name, value in (("global_batch_size", global_batch_size), ("num_batches", num_batches)):
            checked_int(name, value, least=1)
        self.source = source
        self.global_batch_size = int(global_batch_size)
        self.num_batches = int(num_batches)
        self.cost = DEFAULT_COST if cost is None else cost

    @property
    def num_datasets(self) -> int:
        return leaf_count(self.source)

    def fingerprint(self) -> dict[str, Any]:
        return {
            "global_batch_size": self.global_batch_size,
            "num_batches": self.num_batches,
            "a": self.cost.a,
            "b": self.cost.b,
            "attention_window": self.cost.window,
        }

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        self.source.reset(None if state is None else state[self.SOURCE_KEY])
        self._window: SampleBlock | None = None
        # The source stands where the present window began; that much of the window has been handed out.
        self._used = 0 if state is None else self._saved_place(state, position)
        self._window_state = self.source.state_dict()
        self._window_start = position - self._used

    def _saved_place(self, state: Mapping[str, Any], position: int) -> int:
        """How many samples of the window had been handed out."""
        used = state.get(self.WINDOW_KEY)
        if isinstance(used, bool) or not isinstance(used, int) or not 0 <= used <= position:
            raise StateMismatchError(
                f"LookAhead: {self.WINDOW_KEY} must be a number of samples up to {position}, found {used!r}"
            )
        return used

    _source_state_keys = ("source",)

    def _source_state(self) -> dict[str, Any]:
        return {self.WINDOW_KEY: self._used, self.SOURCE_KEY: self._window_state}

    def _fill(self) -> SampleBlock:
        if self._window is None:
            self._window_state = self.source.state_dict()
            with self.stats.waiting():
                block = draw_block(self.source, self._window_size, 0, self._window_start)
            if len(block) == self._window_size:
                costs = self.cost.sequence_costs(block.seqlens)
                block = block.select(balanced_batches(costs, self.num_batches))
            self._window = block
        return self._window

    @property
    def _window_size(self) -> int:
        return self.global_batch_size * self.num_batches

    def num_remaining(self) -> int | None:
        left = self.source.num_remaining() if isinstance(self.source, SampleSource) else None
        if left is None or left == ENDLESS:
            return left
        return left + (0 if self._window is None else len(self._window)) - self._used

    def _next_window(self) -> None:
        """Leave a full window that has been handed out."""
        self._window_start += self._window_size
        self._window, self._used = None, 0
        self._window_state = self.source.state_dict()

    def _skip(self, n: int) -> None:
        while n > 0:
            whole = n // self._window_size * self._window_size
            if whole and not self._used and self._window is None:  # whole windows keep their samples: no need to look
                skip_samples(self.source, whole)
                self._window_start += whole
                self._window_state = self.source.state_dict()
                n -= whole
                continue
            window = self._fill()
            part = min(n, len(window) - self._used)
            self._used += part
            n -= part
            if self._used == self._window_size:
                self._next_window()
            elif n:
                raise BeyondEndError(f"LookAhead: the data ends; {n} more samples were to be passed over")

    def _take(self, n: int) -> SampleBlock:
        blocks: list[SampleBlock] = []
        while n > 0:
            window = self._fill()
            end = min(self._used + n, len(window))
            blocks.append(window.select(np.arange(self._used, end, dtype=np.int64)))
            n -= end - self._used
            self._used = end
            if end == len(window):
                if len(window) < self._window_size:
                    break
                self._next_window()
        return SampleBlock.concatenate(blocks)
