"""``default_dynamic_cp``: the packing scheduler of Megatron's development branch, as published in words."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, plan_of_ops, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem

__all__ = ["default_dynamic_cp", "default_dynamic_cp_reference", "dynamic_cp_within"]

#: A group may take this much more work than the one of the tallest sequence.
_WORK_SLACK = 1.05


@dataclass(slots=True)
class _Group:
    cp_size: int
    tokens: int = 0
    work: float = 0.0
    members: list[int] = field(default_factory=list)


def default_dynamic_cp(problem: Problem, *, pad: str = "after") -> Plan:
    """One microbatch of all ranks after the other, each led by the tallest sequence left.

    The work of a sequence is ``s^2 / cp`` and nothing else. The tallest takes the smallest CP size that holds it; every
    other goes, longest first, where the largest work stays least: a group that exists or a new one, under the
    token cap and 1.05 times the work of the tallest. Ranks that stay empty are given away by doubling groups.

    Args:
        problem: what to schedule; the cost model plays no part.
        pad: ``"after"`` the CP size is known (2 * cp), or ``"before"``, as Megatron does (2 * ranks * sp).

    Raises:
        ScheduleError: padding before scheduling makes a sequence too long.
    """
    unit = _unit(problem, pad)
    plan = plan_of_ops(problem, *_C.schedule_dynamic_cp(native_input(problem), unit), "default_dynamic_cp")
    return _padded_before(plan, unit)


def dynamic_cp_within(problem: Problem, seconds: float) -> Plan | None:
    """The plan of ``default_dynamic_cp``, or None as soon as it is certain that its step takes longer than ``seconds``.

    For comparisons: most microbatches need not be made to see that another plan is better.
    """
    mode = problem.mode
    ops = _C.schedule_dynamic_cp_within(
        native_input(problem),
        seconds,
        mode.name == "lockstep",
        mode.name == "pipeline",
        (mode.stages - 1) / mode.virtual_stages,
    )
    return None if ops is None else plan_of_ops(problem, *ops, "default_dynamic_cp")


def default_dynamic_cp_reference(problem: Problem, *, pad: str = "after") -> Plan:
    """``default_dynamic_cp`` in plain Python; the native core gives the same plan."""
    layout = problem.layout
    unit = _unit(problem, pad)
    lengths = (-(-problem.seqlens // unit) * unit).tolist()
    alive = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ops: list[PlacedOp] = []
    while alive:
        groups, alive = _fill_microbatch(problem, lengths, alive)
        _give_away(problem, lengths, groups)
        first = 0
        for group in sorted(groups, key=lambda group: -group.cp_size):
            ops.append((first, group.cp_size, group.members))
            first += group.cp_size
        smallest = layout.cp_sizes[0]
        ops.extend((rank, smallest, []) for rank in range(first, layout.num_ranks, smallest))
    return _padded_before(plan_of_placed_ops(problem, ops, "default_dynamic_cp"), unit)


def _unit(problem: Problem, pad: str) -> int:
    """Tokens to whose multiple sequences are padded before scheduling; refuses a sequence that then fits nowhere."""
    if pad not in ("after", "before"):
        raise ValueError(f"pad must be 'after' or 'before', got {pad!r}")
    layout = problem.layout
    unit = 2 * layout.num_ranks * layout.sp if pad == "before" else 1
    limit = layout.tokens_per_rank_limit * max(layout.cp_sizes)
    padded = -(-problem.seqlens // unit) * unit
    if pad == "before" and len(padded) and int(padded.max()) > limit:
        sample_id = int(np.argmax(padded))
        raise ScheduleError(
            f"sequence {sample_id} has {int(problem.seqlens[sample_id])} tokens, {int(padded[sample_id])} when padded "
            f"to a multiple of {unit}; the limit is {limit}: use pad='after'"
        )
    return unit


def _padded_before(plan: Plan, unit: int) -> Plan:
    if unit == 1:
        return plan
    padded = (-(-plan.seqlens // unit) * unit)[plan.sample_ids]
    return Plan(
        plan.layout,
        plan.seqlens,
        plan.op_first_rank,
        plan.op_cp_size,
        plan.op_offsets,
        plan.sample_ids,
        padded,
        algorithm=plan.algorithm,
    )


def _fill_microbatch(problem: Problem, lengths: list[int], alive: list[int]) -> tuple[list[_Group], list[int]]:
    layout = problem.layout
    limit = layout.tokens_per_rank_limit
    free = layout.num_ranks
    cap = float("inf")
    groups: list[_Group] = []
    #: For each CP size, groups by work; those too full for the present length wait apart, by the room they have.
    open_groups: dict[int, list[tuple[float, int]]] = {k: [] for k in layout.cp_sizes}
    full: dict[int, list[tuple[int, int]]] = {k: [] for k in layout.cp_sizes}
    left: list[int] = []
    for i in alive:
        length = lengths[i]
        best_work, best_group, best_size = cap, -1, 0
        for k in layout.cp_sizes:
            padded = layout.padded_seqlen(length, k)
            if padded > limit * k:
                continue
            added = float(length) * length / k
            if best_size == 0 and free >= k and added <= best_work:
                best_work, best_group, best_size = added, -1, k
            heap, waiting = open_groups[k], full[k]
            while waiting and -waiting[0][0] >= padded:
                _, number = heapq.heappop(waiting)
                heapq.heappush(heap, (groups[number].work, number))
            while heap and groups[heap[0][1]].tokens + padded > limit * k:
                _, number = heapq.heappop(heap)
                heapq.heappush(waiting, (groups[number].tokens - limit * k, number))
            if heap and heap[0][0] + added <= cap and (best_size == 0 or heap[0][0] + added < best_work):
                best_work, best_group, best_size = heap[0][0] + added, heap[0][1], k
        if best_size == 0:
            left.append(i)
            continue
        if best_group < 0:
            best_group = len(groups)
            groups.append(_Group(best_size))
            free -= best_size
        else:
            heapq.heappop(open_groups[best_size])
        group = groups[best_group]
        group.tokens += layout.padded_seqlen(length, best_size)
        group.work = best_work
        group.members.append(i)
        if len(group.members) < problem.max_sequences:
            heapq.heappush(open_groups[best_size], (group.work, best_group))
        if len(groups) == 1 and len(group.members) == 1:
            cap = _WORK_SLACK * group.work
    return groups, left


def _give_away(problem: Problem, lengths: list[int], groups: list[_Group]) -> None:
    """Double the groups with the most work while ranks are free."""
    layout = problem.layout
    free = layout.num_ranks - sum(group.cp_size for group in groups)
    heap = [(-group.work, number) for number, group in enumerate(groups)]
    heapq.heapify(heap)
    while free and heap:
        _, number = heapq.heappop(heap)
        group = groups[number]
        doubled = 2 * group.cp_size
        if group.cp_size <= free and doubled in layout.cp_sizes:
            tokens = sum(layout.padded_seqlen(lengths[i], doubled) for i in group.members)
            if tokens <= layout.tokens_per_rank_limit * doubled:
                free -= group.cp_size
                group.cp_size, group.tokens, group.work = doubled, tokens, group.work / 2
                heapq.heappush(heap, (-group.work, number))
