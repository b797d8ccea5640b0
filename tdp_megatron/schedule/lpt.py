"""``lpt``: static CP, longest processing time first, then best-fit into packs."""

from __future__ import annotations

import heapq

import numpy as np

from tdp_megatron.schedule.packs import best_fit_packs, fill_up, plan_of_rank_packs, static_cp_size
from tdp_megatron.schedule.plan import Plan, padded_seqlens
from tdp_megatron.schedule.problem import Problem, pack_token_cap

__all__ = ["lpt"]


def lpt(problem: Problem) -> Plan:
    """Costliest sequence first, each to the DP rank with the least work; every rank then packs its own.

    Graham, "Bounds on multiprocessing timing anomalies" (1969). Ties go to the lower sample id and the lower rank. CP
    is static: all packs run on ``cp`` neighbouring ranks.
    """
    cp_size = static_cp_size(problem, "lpt")
    costs = problem.cost.sequence_costs(problem.seqlens, cp_size)
    order = np.argsort(-costs, kind="stable").tolist()
    cost_of = costs.tolist()
    num_blocks = problem.layout.num_ranks // cp_size
    loads = [(0.0, block) for block in range(num_blocks)]
    samples: list[list[int]] = [[] for _ in range(num_blocks)]
    for sample_id in order:
        load, block = loads[0]
        samples[block].append(sample_id)
        heapq.heapreplace(loads, (load + cost_of[sample_id], block))

    padded = padded_seqlens(problem.seqlens, cp_size).tolist()
    cap = pack_token_cap(problem.layout, cp_size)
    by_rank = []
    for ids in samples:
        ids.sort(key=lambda i: (-padded[i], i))
        by_rank.append(best_fit_packs(ids, padded, cap, problem.max_sequences))
    fill_up(problem, by_rank)
    return plan_of_rank_packs(problem, by_rank, cp_size, "lpt")
