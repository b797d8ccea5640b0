"""``lpt``, ``kk`` and ``best_fit``: static CP, sequences to ranks by cost, then best-fit into packs."""

from __future__ import annotations

import heapq

import numpy as np

from tdp_megatron import _C
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import best_fit_packs, plan_of_ops, plan_of_rank_packs, static_cp_size
from tdp_megatron.schedule.plan import Plan, padded_seqlens
from tdp_megatron.schedule.problem import Problem, pack_token_cap

__all__ = ["best_fit", "best_fit_reference", "kk", "kk_reference", "lpt", "lpt_reference"]


def lpt(problem: Problem) -> Plan:
    """Costliest sequence first, each to the DP rank with the least work; every rank then packs its own.

    Graham, "Bounds on multiprocessing timing anomalies" (1969). Ties go to the lower sample id and the lower rank. CP
    is static: all packs run on ``cp`` neighbouring ranks.
    """
    cp_size = static_cp_size(problem, "lpt")
    return plan_of_ops(problem, *_C.schedule_lpt(native_input(problem), cp_size), "lpt")


def lpt_reference(problem: Problem) -> Plan:
    """``lpt`` in plain Python; the native core gives the same plan."""
    cp_size = static_cp_size(problem, "lpt")
    costs = problem.cost.sequence_costs(problem.seqlens, cp_size)
    return _pack_and_plan(problem, _longest_first(costs.tolist(), problem.layout.num_ranks // cp_size), cp_size, "lpt")


def kk(problem: Problem) -> Plan:
    """Karmarkar and Karp's differencing instead of ``lpt``'s greedy choice: closer to equal work for few sequences.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), for many sets. CP is static.
    """
    cp_size = static_cp_size(problem, "kk")
    return plan_of_ops(problem, *_C.schedule_kk(native_input(problem), cp_size), "kk")


def kk_reference(problem: Problem) -> Plan:
    """``kk`` in plain Python; the native core gives the same plan."""
    cp_size = static_cp_size(problem, "kk")
    num_blocks = problem.layout.num_ranks // cp_size
    costs = problem.cost.sequence_costs(problem.seqlens, cp_size).tolist()
    # A node is a partial split: (spread, number, sums falling, members of each sum). Sets that are still empty are
    # not stored, so joining two nodes with few members costs little.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    nodes = [(-costs[i], number, [costs[i]], [[i]]) for number, i in enumerate(order)]
    heapq.heapify(nodes)
    number = len(nodes)
    while len(nodes) > 1:
        _, _, sums, members = heapq.heappop(nodes)
        _, _, other_sums, other_members = heapq.heappop(nodes)
        joined = _join(sums, members, other_sums, other_members, num_blocks)
        sums, members = [s for s, _ in joined], [m for _, m in joined]
        spread = sums[0] - (sums[-1] if len(sums) == num_blocks else 0.0)
        heapq.heappush(nodes, (-spread, number, sums, members))
        number += 1
    split = nodes[0][3] if nodes else []
    split = split + [[] for _ in range(num_blocks - len(split))]
    return _pack_and_plan(problem, split, cp_size, "kk")


def _join(
    sums: list[float],
    members: list[list[int]],
    other_sums: list[float],
    other_members: list[list[int]],
    num_blocks: int,
) -> list[tuple[float, list[int]]]:
    """Largest sums with smallest; what is not stored is zero and empty."""
    overlap = max(len(sums) + len(other_sums) - num_blocks, 0)
    keep = len(sums) - overlap
    joined = list(zip(sums[:keep], members[:keep], strict=True))
    for at in range(overlap):
        partner = len(other_sums) - 1 - at
        joined.append((sums[keep + at] + other_sums[partner], members[keep + at] + other_members[partner]))
    alone = len(other_sums) - overlap
    joined.extend(zip(other_sums[:alone], other_members[:alone], strict=True))
    joined.sort(key=lambda pair: -pair[0])
    if len(joined) == num_blocks:
        # Only differences matter; small numbers keep them exact.
        least = joined[-1][0]
        joined = [(total - least, ids) for total, ids in joined]
    return joined


def best_fit(problem: Problem) -> Plan:
    """Fewest packs, by tokens alone: best-fit by falling length, then packs to the DP rank with the least work."""
    cp_size = static_cp_size(problem, "best_fit")
    _, sizes, offsets, ids = _C.schedule_best_fit(native_input(problem), cp_size)
    packs = Plan.from_packs(problem.layout, problem.seqlens, np.zeros_like(sizes), sizes, offsets, ids)
    by_block = _longest_first(problem.cost.plan_costs(packs).tolist(), problem.layout.num_ranks // cp_size)
    places = sorted((microbatch, block) for block, numbers in enumerate(by_block) for microbatch in range(len(numbers)))
    order = np.array([by_block[block][microbatch] for microbatch, block in places], dtype=np.int64)
    first_rank = np.array([block * cp_size for _, block in places], dtype=np.int64)
    counts = np.diff(offsets)[order]
    ends = np.cumsum(counts)
    entries = np.arange(len(ids), dtype=np.int64) + np.repeat(offsets[:-1][order] - (ends - counts), counts)
    return plan_of_ops(problem, first_rank, sizes, np.append(0, ends), ids[entries], "best_fit")


def best_fit_reference(problem: Problem) -> Plan:
    """``best_fit`` in plain Python; the native core gives the same plan."""
    cp_size = static_cp_size(problem, "best_fit")
    num_blocks = problem.layout.num_ranks // cp_size
    padded = padded_seqlens(problem.seqlens, cp_size).tolist()
    order = sorted(range(len(padded)), key=lambda i: (-padded[i], i))
    packs = best_fit_packs(order, padded, pack_token_cap(problem.layout, cp_size), problem.max_sequences)
    costs = [problem.cost.microbatch_cost(problem.seqlens[pack], cp_size, problem.layout) for pack in packs]
    by_rank = [[packs[number] for number in numbers] for numbers in _longest_first(costs, num_blocks)]
    return plan_of_rank_packs(problem, by_rank, cp_size, "best_fit")


def _longest_first(costs: list[float], num_blocks: int) -> list[list[int]]:
    """Items of each block: costliest first to the block with the least, ties by number."""
    loads = [(0.0, block) for block in range(num_blocks)]
    split: list[list[int]] = [[] for _ in range(num_blocks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, block = loads[0]
        split[block].append(i)
        heapq.heapreplace(loads, (load + costs[i], block))
    return split


def _pack_and_plan(problem: Problem, split: list[list[int]], cp_size: int, algorithm: str) -> Plan:
    padded = padded_seqlens(problem.seqlens, cp_size).tolist()
    cap = pack_token_cap(problem.layout, cp_size)
    by_rank = []
    for ids in split:
        packs = best_fit_packs(sorted(ids, key=lambda i: (-padded[i], i)), padded, cap, problem.max_sequences)
        by_rank.append(packs)
    return plan_of_rank_packs(problem, by_rank, cp_size, algorithm)
