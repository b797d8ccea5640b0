"""``simulate``: how long a step takes under a cost model and an execution mode, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.execution import execution_order
from tdp_megatron.schedule.native import native_cost
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Mode
from tdp_megatron.types import Int64Array

__all__ = ["Simulation", "simulate", "step_seconds"]

Float64Array = npt.NDArray[np.float64]

#: Bytes that one token takes on the wire in Megatron's layout: tokens, labels, position ids int64, loss mask float32
#: and the alignment of the latter.
REROUTE_BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """One simulated step."""

    plan: Plan
    """What was simulated."""
    mode: Mode
    """How ranks wait for each other."""
    step_seconds: float
    """From the first start to the last end."""
    lower_bound: float
    """Seconds that no plan can beat."""
    op_start: Float64Array
    """float64 [m], seconds; in ``pipeline`` mode of the first stage, without its bubbles."""
    op_seconds: Float64Array
    """float64 [m], how long each op computes."""
    busy: Float64Array
    """float64 [R], seconds each rank computes."""

    @property
    def ratio(self) -> float:
        """Step over lower bound; 1.0 is perfect."""
        return self.step_seconds / self.lower_bound if self.lower_bound > 0 else 1.0

    @property
    def idle(self) -> Float64Array:
        """Seconds each rank waits, float64 [R]."""
        waiting: Float64Array = np.maximum(self.step_seconds - self.busy, 0.0)
        return waiting

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean."""
        mean = float(np.cumsum(self.busy)[-1]) / len(self.busy)
        return max(float(self.busy.max()) / mean, 1.0) if mean > 0 else 1.0

    @property
    def padding(self) -> float:
        """Share of the tokens held by ranks that are padding, dummy packs left out."""
        plan = self.plan
        real = np.diff(plan.op_offsets) > 0
        held = int((plan.op_tokens_per_rank * plan.op_cp_size)[real].sum())
        return 1.0 - int(plan.seqlens.sum()) / held if held else 0.0

    @property
    def peak_tokens(self) -> int:
        """Most tokens a rank holds at once."""
        return int(self.plan.op_tokens_per_rank.max(initial=0))

    @property
    def reroute_bytes(self) -> int:
        """Bytes that ranks send each other when sequence i is read by rank i modulo R, in Megatron's layout."""
        plan = self.plan
        op_of_entry = np.repeat(np.arange(plan.num_ops), np.diff(plan.op_offsets))
        first, size = plan.op_first_rank[op_of_entry], plan.op_cp_size[op_of_entry]
        source = plan.sample_ids % plan.layout.num_ranks
        at_home = (source >= first) & (source < first + size)
        return int((plan.padded_lengths // size * (size - at_home)).sum()) * REROUTE_BYTES_PER_TOKEN

    def cp_bytes(self, cost: CostModel) -> float:
        """Bytes of K and V that all ranks send in the ring exchange."""
        sizes = self.plan.op_cp_size
        return float(
            np.cumsum(3.0 * cost.layers * cost.kv_bytes * sizes * (sizes - 1) * self.plan.op_tokens_per_rank)[-1]
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The step as a Chrome trace: one row per rank, one event per microbatch."""
        plan = self.plan
        events = [
            {
                "name": "dummy" if op.is_dummy else f"{len(op.sample_ids)} sequences",
                "cat": f"cp{op.cp_size}",
                "ph": "X",
                "ts": float(self.op_start[number]) * 1e6,
                "dur": float(self.op_seconds[number]) * 1e6,
                "pid": 0,
                "tid": rank,
                "args": {"op": number, "cp_size": op.cp_size, "tokens": int(plan.op_tokens_per_rank[number])},
            }
            for number, op in enumerate(plan.ops)
            for rank in op.ranks
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def simulate(
    plan: Plan,
    cost: CostModel,
    mode: str | Mode = "free",
    noise: float = 0.0,
    *,
    seed: int = 0,
    queues: Sequence[Sequence[int] | Int64Array] | None = None,
) -> Simulation:
    """Run ``plan`` on paper.

    Args:
        plan: what to run.
        cost: what each microbatch takes.
        mode: how ranks wait for each other, see ``Mode``.
        noise: sigma of a lognormal factor of mean 1 on every op; 0 for none.
        seed: of the noise.
        queues: for each rank, its op numbers in another order than the plan's.

    Raises:
        ScheduleError: the step would never end: ranks wait in a circle, or wait in lockstep for a microbatch that
            another rank does not have. The message names ranks and ops.
        ValueError: bad noise or mode.
    """
    mode = Mode.parse(mode)
    if not noise >= 0.0 or noise == float("inf"):
        raise ValueError(f"noise must be finite and not negative, got {noise}")
    seconds = cost.plan_costs(plan)
    if noise:
        factors = np.random.default_rng(seed).standard_normal(len(seconds))
        seconds = seconds * np.exp(noise * factors - 0.5 * noise * noise)
    order = np.arange(plan.num_ops, dtype=np.int64)
    if queues is not None:
        order = execution_order(plan.op_first_rank, plan.op_cp_size, queues)
    step, start, busy = _run(plan, seconds, mode, order)
    return Simulation(plan, mode, step, lower_bound(plan.seqlens, plan.layout, cost), start, seconds, busy)


def step_seconds(plan: Plan, cost: CostModel, mode: Mode) -> float:
    """Only the step time of ``simulate``, for algorithms that compare candidates."""
    seconds = _C.schedule_step(
        plan.op_first_rank,
        plan.op_cp_size,
        plan.op_offsets,
        plan.padded_lengths,
        plan.op_tokens_per_rank,
        plan.op_group,
        plan.layout.num_ranks,
        native_cost(cost),
        mode.name,
        (mode.stages - 1) / mode.virtual_stages,
    )
    # Where ranks in lockstep do not meet, the simulation says which.
    return seconds if seconds >= 0.0 else simulate(plan, cost, mode).step_seconds


def _run(plan: Plan, seconds: Float64Array, mode: Mode, order: Int64Array) -> tuple[float, Float64Array, Float64Array]:
    num_ranks = plan.layout.num_ranks
    busy = np.zeros(num_ranks)
    ready = np.zeros(num_ranks)
    start = np.zeros(plan.num_ops)
    first, size = plan.op_first_rank.tolist(), plan.op_cp_size.tolist()
    if mode.name == "lockstep":
        step, start = _lockstep(plan, seconds, order)
    group, group_end = 0, 0.0
    for op in order.tolist():
        block = slice(first[op], first[op] + size[op])
        busy[block] += seconds[op]
        if mode.name == "lockstep":
            continue
        if mode.name == "barrier" and plan.op_group[op] != group:
            group, group_end = int(plan.op_group[op]), float(ready.max())
            ready[:] = group_end
        begin = float(ready[block].max())
        start[op] = begin
        ready[block] = begin + seconds[op]
    if mode.name == "pipeline":
        slowest = np.zeros(num_ranks)
        for op in order.tolist():
            block = slice(first[op], first[op] + size[op])
            np.maximum(slowest[block], seconds[op], out=slowest[block])
        step = float((busy + (mode.stages - 1) / mode.virtual_stages * slowest).max())
    elif mode.name != "lockstep":
        step = float(ready.max(initial=0.0))
    return step, start, busy


def _lockstep(plan: Plan, seconds: Float64Array, order: Int64Array) -> tuple[float, Float64Array]:
    """All ranks start microbatch i together, so each op must have the same number on all of its ranks."""
    wave_of_rank = np.zeros(plan.layout.num_ranks, dtype=np.int64)
    wave = np.zeros(plan.num_ops, dtype=np.int64)
    for op in order.tolist():
        first, size = int(plan.op_first_rank[op]), int(plan.op_cp_size[op])
        numbers = wave_of_rank[first : first + size]
        if int(numbers.min()) != int(numbers.max()):
            early, late = first + int(numbers.argmax()), first + int(numbers.argmin())
            raise ScheduleError(
                f"deadlock in lockstep: op {op} is microbatch {int(numbers.max())} of rank {early} and "
                f"{int(numbers.min())} of rank {late}; use the algorithm waves, or equal_count=True"
            )
        wave[op] = numbers[0]
        wave_of_rank[first : first + size] += 1
    if int(wave_of_rank.min()) != int(wave_of_rank.max()):
        most, least = int(wave_of_rank.argmax()), int(wave_of_rank.argmin())
        raise ScheduleError(
            f"deadlock in lockstep: rank {most} has {int(wave_of_rank[most])} microbatches and waits in the last for "
            f"rank {least}, which has {int(wave_of_rank[least])}; schedule with equal_count=True"
        )
    longest = np.zeros(int(wave_of_rank[0]))
    np.maximum.at(longest, wave, seconds)
    ends = np.cumsum(longest)
    return float(ends[-1]) if len(ends) else 0.0, (ends - longest)[wave]
