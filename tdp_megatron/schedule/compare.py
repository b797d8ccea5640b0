"""``compare``: several algorithms on one global batch, Megatron's as they run in Megatron."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.api import schedule
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Mode, check_seqlens, pack_token_cap
from tdp_megatron.schedule.simulate import Simulation, simulate
from tdp_megatron.schedule.validation import validate
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["Compared", "compare", "plan_as_run"]


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """One algorithm on one global batch."""

    algorithm: str
    """Name it was asked for by; ``simulation.plan.algorithm`` is what ``auto`` chose."""
    plan_seconds: float
    """How long planning took."""
    simulation: Simulation | None
    """The simulated step; None where the algorithm has no plan for the batch."""
    cp_bytes: float = 0.0
    """Bytes of K and V that all ranks send."""
    reason: str = ""
    """Why it has none, or why the step would never end."""


def compare(
    seqlens: npt.ArrayLike,
    layout: ParallelLayout,
    cost: CostModel,
    mode: str | Mode,
    algorithms: Sequence[str],
    **limits: Any,
) -> list[Compared]:
    """Plan, check and simulate with each of ``algorithms``.

    Args:
        seqlens: integers [n], real lengths, tokens.
        layout: how the ranks are arranged, and the cap.
        cost: what a microbatch costs.
        mode: how ranks wait for each other.
        algorithms: names that ``schedule`` knows.
        limits: fields of ``Limits``.
    """
    mode = Mode.parse(mode)
    lengths = check_seqlens(seqlens)
    return [_compared(algorithm, lengths, layout, cost, mode, limits) for algorithm in algorithms]


def _compared(
    algorithm: str,
    seqlens: Int64Array,
    layout: ParallelLayout,
    cost: CostModel,
    mode: Mode,
    limits: Mapping[str, Any],
) -> Compared:
    seconds = 0.0
    # Hybrid CP has a barrier after each of its groups, whatever the rest of the training does.
    own_mode = Mode("barrier") if algorithm == "balanced_hybrid_cp" and mode.name == "free" else mode
    try:
        started = time.perf_counter()
        plan = plan_as_run(algorithm, seqlens, layout, cost, mode, **limits)
        seconds = time.perf_counter() - started
        validate(plan, equal_count=mode.needs_equal_count or bool(limits.get("equal_count", False)))
        simulation = simulate(plan, cost, own_mode)
        return Compared(algorithm, seconds, simulation, simulation.cp_bytes(cost))
    except ScheduleError as error:
        return Compared(algorithm, seconds, None, reason=str(error))


def plan_as_run(
    algorithm: str, seqlens: Int64Array, layout: ParallelLayout, cost: CostModel, mode: Mode, **limits: Any
) -> Plan:
    """``schedule``, with the padding that Megatron adds before it schedules where the algorithm is one of its own.

    Megatron pads to a multiple of ``2 * cp * sp`` for ``dp_balanced`` and of ``2 * ranks * sp`` for
    ``default_dynamic_cp``; ``schedule`` alone pads less, and after the CP size is known.
    """
    if algorithm == "default_dynamic_cp":
        return schedule(seqlens, layout, cost, mode, algorithm, pad="before", **limits)
    if algorithm != "dp_balanced":
        return schedule(seqlens, layout, cost, mode, algorithm, **limits)
    unit = layout.pad_multiple(layout.cp) * layout.sp
    # A sequence that only fits without the padding is not what is compared here.
    padded = np.minimum(-(-seqlens // unit) * unit, np.maximum(pack_token_cap(layout, layout.cp), seqlens))
    plan = schedule(padded, layout, cost, mode, algorithm, **limits)
    return Plan(
        layout,
        seqlens,
        plan.op_first_rank,
        plan.op_cp_size,
        plan.op_offsets,
        plan.sample_ids,
        plan.padded_lengths,
        plan.op_group,
        plan.algorithm,
    )
