"""A simulated step as blocks on ranks, for pictures and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.schedule import Simulation
from tdp_megatron.types import Int64Array

__all__ = ["DUMMY_COLOUR", "IDLE_COLOUR", "Timeline", "chrome_trace", "cp_colour"]

#: From CP 1 up, cold to hot to dark, so that neighbours differ and the order shows.
_COLOURS = (
    "#3d6fb5",
    "#35a7c9",
    "#41ab5d",
    "#d3c62f",
    "#f08c2e",
    "#d7301f",
    "#a1307a",
    "#5e3192",
    "#33215e",
    "#141b2e",
    "#000000",
)
IDLE_COLOUR = "#f4e3df"
DUMMY_COLOUR = "#b5b5b5"


def cp_colour(cp_size: int) -> str:
    """Colour of a CP size, ``#rrggbb``."""
    return _COLOURS[min(max(cp_size, 1).bit_length() - 1, len(_COLOURS) - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What one panel of a picture shows."""

    name: str
    """The algorithm, and what it chose."""
    caption: str
    """Figures of the step."""
    num_ranks: int
    step_ms: float
    lower_bound_ms: float
    first_rank: Int64Array
    """int64 [m], first rank of each block."""
    cp_size: Int64Array
    """int64 [m], ranks of each block."""
    start_ms: npt.NDArray[np.float64]
    """float64 [m], milliseconds."""
    ms: npt.NDArray[np.float64]
    """float64 [m], milliseconds."""
    tokens: Int64Array
    """int64 [m], tokens per rank."""
    sequences: Int64Array
    """int64 [m], sequences of each block; 0 for a dummy."""
    longest: Int64Array
    """int64 [m], longest real sequence of each block, tokens."""

    @staticmethod
    def of(algorithm: str, simulation: Simulation) -> Timeline:
        """The timeline of a simulated step."""
        plan = simulation.plan
        sequences = np.diff(plan.op_offsets)
        longest = np.zeros(plan.num_ops, dtype=np.int64)
        np.maximum.at(longest, np.repeat(np.arange(plan.num_ops), sequences), plan.seqlens[plan.sample_ids])
        chosen = "" if plan.algorithm == algorithm else f" ({plan.algorithm})"
        idle = float(simulation.idle.sum()) / (simulation.step_seconds * plan.layout.num_ranks or 1.0)
        caption = (
            f"step {simulation.step_seconds * 1e3:,.0f} ms = {simulation.ratio:.3f} x lower bound, "
            f"ranks idle {idle:.1%}, max/mean {simulation.imbalance:.3f}"
        )
        if simulation.mode.name == "pipeline":
            caption += ", first stage without its bubbles"
        return Timeline(
            algorithm + chosen,
            caption,
            plan.layout.num_ranks,
            simulation.step_seconds * 1e3,
            simulation.lower_bound * 1e3,
            plan.op_first_rank,
            plan.op_cp_size,
            simulation.op_start * 1e3,
            simulation.op_seconds * 1e3,
            plan.op_tokens_per_rank,
            sequences,
            longest,
        )

    def __len__(self) -> int:
        return len(self.first_rank)

    def colours(self) -> list[str]:
        """Colour of every block."""
        return [
            cp_colour(k) if n else DUMMY_COLOUR
            for k, n in zip(self.cp_size.tolist(), self.sequences.tolist(), strict=True)
        ]

    def cp_sizes(self) -> list[int]:
        """CP sizes of blocks that are no dummies, rising."""
        return [int(k) for k in np.unique(self.cp_size[self.sequences > 0])]


def chrome_trace(simulations: Sequence[tuple[str, Simulation]]) -> dict[str, Any]:
    """The steps as one Chrome trace: a process per algorithm, a thread per rank."""
    events: list[dict[str, Any]] = []
    for number, (algorithm, simulation) in enumerate(simulations):
        named = {"ph": "M", "pid": number}
        events.append({**named, "name": "process_name", "args": {"name": algorithm}})
        events.append({**named, "name": "process_sort_index", "args": {"sort_index": number}})
        for rank in range(simulation.plan.layout.num_ranks):
            events.append({**named, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.extend({**event, "pid": number} for event in simulation.chrome_trace()["traceEvents"])
    return {"traceEvents": events, "displayTimeUnit": "ms"}
