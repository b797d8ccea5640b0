"""``Shard``: one rank's share of a global order, for the exchange and for plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int
from tdp_megatron.nodes.base import ENDLESS, SampleSource, draw_block, leaf_count, require_node, skip_samples
from tdp_megatron.types import SampleBlock

__all__ = ["Shard"]


class Shard(SampleSource):
    """Deals a global order out sample by sample: rank r of n gets samples r, r + n, r + 2n, ...

    The state counts the samples of all ranks, so that it is the same on every rank and fits any other number of ranks
    as long as whole rounds of both have been read. A last incomplete round is dealt as far as it goes.

    Args:
        source: the same on every rank.
        rank: this rank.
        num_ranks: ranks that share the order.

    Raises:
        ValueError, TypeError: a bad argument.
    """

    def __init__(self, source: BaseNode[Any], *, rank: int, num_ranks: int) -> None:
        super().__init__()
        require_node(source)
        rank, num_ranks = checked_int("rank", rank), checked_int("num_ranks", num_ranks, least=1)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} is outside the {num_ranks} ranks")
        self.source = source
        self.rank = rank
        self.num_ranks = num_ranks

    @property
    def num_datasets(self) -> int:
        return leaf_count(self.source)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def get_state(self) -> dict[str, Any]:
        # In samples, not in rounds: rounds depend on the number of ranks.
        return {**super().get_state(), self.POSITION_KEY: self._drawn}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        # The state counts the samples of all ranks, the position those dealt to this one.
        self._position = max(0, -(-(self._drawn - self.rank) // self.num_ranks))

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        self._drawn = position
        self.source.reset(None if state is None else state[self.SOURCE_KEY])

    _source_state_keys = ("source",)

    def _source_state(self) -> dict[str, Any]:
        return {self.SOURCE_KEY: self.source.state_dict()}

    def num_remaining(self) -> int | None:
        source = self.source
        left = source.num_remaining() if isinstance(source, SampleSource) else None
        if left is None or left == ENDLESS:
            return left
        return max(0, -(-(left - self.rank) // self.num_ranks))

    def _skip(self, n: int) -> None:
        skip_samples(self.source, n * self.num_ranks)
        self._drawn += n * self.num_ranks

    def _take(self, n: int) -> SampleBlock:
        with self.stats.waiting():
            block = draw_block(self.source, n * self.num_ranks, 0, self._drawn)
        self._drawn += len(block)
        return block.select(np.arange(self.rank, len(block), self.num_ranks, dtype=np.int64))
