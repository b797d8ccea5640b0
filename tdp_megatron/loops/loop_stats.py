"""What a loop's data runtime has done, in the form of ``Loader.stats``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdp_megatron.loops.ahead import Ahead
from tdp_megatron.schedule import CostModel, Plan, imbalance, padding
from tdp_megatron.schedule.api import DEFAULT_COST
from tdp_megatron.stats import NodeStats

__all__ = ["LoopStats"]


class LoopStats:
    """Counters of the steps made, and of those that the loop has waited for.

    Args:
        name: of what makes the steps.
        cost: what a sequence costs; None for the default model.
    """

    def __init__(self, name: str, cost: CostModel | None = None) -> None:
        self._name = name
        self._cost = DEFAULT_COST if cost is None else cost
        self.made = NodeStats()
        self.handed_out = NodeStats()

    def count(self, plan: Plan, tokens: int) -> None:
        """Count a step that has been made.

        Args:
            plan: of all ranks.
            tokens: that this rank holds.
        """
        self.made.items += 1
        self.made.tokens += tokens
        self.made.observe("imbalance", imbalance(plan, self._cost))
        self.made.observe("padding", padding(plan))

    def wait_for(self, ahead: Ahead[Any]) -> None:
        """Wait for a step in the making, on behalf of the loop."""
        if not ahead.is_awaited:
            self.handed_out.queue_depth = int(ahead.is_done)
        with self.handed_out.waiting():
            ahead.wait()

    def as_dict(self, source: Any) -> dict[str, Any]:
        """Per part its counters; those of the data iterator's nodes, where it tells them, behind them.

        Args:
            source: the data iterator, or None.
        """
        stats: dict[str, Any] = {self._name: self.made.as_dict()}
        if self.handed_out.items:
            stats = {"ReadAhead": self.handed_out.as_dict(), **stats}
        tell = getattr(source, "stats", None)
        of_source = tell() if callable(tell) else None
        return {**stats, **of_source} if isinstance(of_source, Mapping) else stats
