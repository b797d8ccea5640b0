"""The arguments that the native core takes for a problem."""

from __future__ import annotations

from tdp_megatron import _C
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.problem import Problem

__all__ = ["native_cost", "native_input"]


def native_input(problem: Problem) -> _C.ScheduleInput:
    """``problem`` as the native core wants it."""
    layout, cost = problem.layout, problem.cost
    return _C.ScheduleInput(
        problem.seqlens,
        list(layout.cp_sizes),
        layout.num_ranks,
        layout.tokens_per_rank_limit,
        layout.tail_multiple,
        problem.max_sequences,
        problem.limits.microbatches_multiple,
        native_cost(cost),
    )


def native_cost(cost: CostModel) -> list[float]:
    """``cost`` as the native core wants it."""
    return [
        cost.a,
        cost.b,
        cost.c0,
        cost.window,
        cost.layers,
        cost.kv_bytes,
        cost.latency,
        cost.node_ranks,
        cost.bandwidth,
        cost.internode_bandwidth,
    ]
