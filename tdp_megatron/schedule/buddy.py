"""``buddy``: dynamic CP for ranks that run free, by aligned blocks that halve; nobody waits for a partner."""

from __future__ import annotations

import heapq
import math

from tdp_megatron import _C
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.dynamic import Level, Scratch
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, best_fit_packs, plan_of_ops, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem
from tdp_megatron.schedule.tails import fill_tails, fill_tails_reference

__all__ = ["buddy", "buddy_reference"]

#: Longest time of a sequence alone, as a share of the step's lower bound; each is one candidate.
THETAS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
#: A step this close to the lower bound ends the search.
GOOD_ENOUGH = 1.002
#: Candidates in a row that bring nothing before the search ends.
PATIENCE = 2


def buddy(problem: Problem) -> Plan:
    """Every sequence on the smallest CP size that keeps it under a share of the step; largest CP size first.

    Level by level, from the largest CP size down, sequences go to the aligned block with the least work and are packed
    there. All ranks of a block have run the same ops before, so none of them waits: the step takes the largest sum
    of a rank. The share is the one, of a few, whose step is shortest.
    """
    bound = lower_bound(problem.seqlens, problem.layout, problem.cost)
    ops = _C.schedule_buddy(native_input(problem), bound)
    return plan_of_ops(problem, *fill_tails(problem, *ops), "buddy")


def buddy_reference(problem: Problem) -> Plan:
    """``buddy`` in plain Python; the native core gives the same plan."""
    scratch = Scratch(problem)
    bound = lower_bound(problem.seqlens, problem.layout, problem.cost)
    best_seconds, best_ops = math.inf, None
    worse = 0
    seen = set()
    for theta in THETAS:
        levels = scratch.choose_levels(theta * bound)
        key = tuple(levels)
        if key in seen:
            continue
        seen.add(key)
        seconds, ops = _place(scratch, levels)
        if seconds < best_seconds:
            best_seconds, best_ops = seconds, ops
            worse = 0
        else:
            worse += 1
        if best_seconds <= bound * GOOD_ENOUGH or worse >= PATIENCE:
            break
    return plan_of_placed_ops(problem, fill_tails_reference(problem, best_ops or []), "buddy")


def _place(scratch: Scratch, levels: list[int]) -> tuple[float, list[PlacedOp]]:
    """Place every sequence on its level; returns the largest work of a rank, seconds, and the ops in order."""
    loads = [0.0] * scratch.num_ranks
    ops: list[PlacedOp] = []
    by_level: list[list[int]] = [[] for _ in scratch.levels]
    for i, number in enumerate(levels):
        by_level[number].append(i)
    for level, members in zip(reversed(scratch.levels), reversed(by_level), strict=True):
        k = level.cp_size
        heap = [(loads[first], first) for first in range(0, scratch.num_ranks, k)]
        heapq.heapify(heap)
        in_block: dict[int, list[int]] = {}
        a, b = scratch.cost.a, scratch.cost.b
        for i in members:
            load, first = heap[0]
            in_block.setdefault(first, []).append(i)
            heapq.heapreplace(heap, (load + (a * level.padded[i] + b * level.squares[i]) / k, first))
        for first in sorted(in_block):
            load = loads[first]
            for pack in best_fit_packs(in_block[first], level.padded, level.token_cap, scratch.max_sequences):
                load += _seconds(scratch, level, pack)
                ops.append((first, k, [scratch.sample_ids[i] for i in pack]))
            loads[first : first + k] = [load] * k
    return max(loads), ops


def _seconds(scratch: Scratch, level: Level, pack: list[int]) -> float:
    tokens, squares = 0, 0.0
    for i in pack:
        tokens += level.padded[i]
        squares += level.squares[i]
    return scratch.seconds(tokens, squares, level.cp_size)
