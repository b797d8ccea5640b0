"""Packs under a token cap on a static CP group, and the plan that lists of packs per DP rank make."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem, check_fits

__all__ = ["best_fit_packs", "fill_up", "plan_of_rank_packs", "static_cp_size"]


def static_cp_size(problem: Problem, algorithm: str) -> int:
    """The CP size that ``algorithm`` gives to every sequence: the only one allowed, or else ``layout.cp``.

    Raises:
        ScheduleError: ``layout.cp`` is not allowed, or a sequence is too long for it.
    """
    layout = problem.layout
    cp_size = layout.cp_sizes[0] if len(layout.cp_sizes) == 1 else layout.cp
    if cp_size not in layout.cp_sizes:
        raise ScheduleError(
            f"{algorithm} gives every sequence the same CP size, and cp {cp_size} is not among cp_sizes "
            f"{list(layout.cp_sizes)}; add it, or use an algorithm for dynamic CP"
        )
    check_fits(problem.seqlens, layout, (cp_size,))
    return cp_size


def best_fit_packs(sample_ids: Sequence[int], padded: Sequence[int], cap: int, max_sequences: int) -> list[list[int]]:
    """Each sequence, in the order given, into the fullest pack that still holds it.

    Args:
        sample_ids: sequences of one rank; falling length packs best.
        padded: padded length by sample id, tokens, none above ``cap``.
        cap: most tokens of a pack.
        max_sequences: most sequences of a pack.

    Returns:
        Packs in the order in which they were opened.
    """
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []
    for sample_id in sample_ids:
        length = padded[sample_id]
        at = bisect_left(open_packs, (length, -1))
        if at == len(open_packs):
            number, room = len(packs), cap
            packs.append([])
        else:
            room, number = open_packs.pop(at)
        packs[number].append(sample_id)
        if len(packs[number]) < max_sequences:
            insort(open_packs, (room - length, number))
    return packs


def fill_up(problem: Problem, by_rank: list[list[list[int]]]) -> None:
    """Add dummy packs until every rank has a count that the limits allow, at least one."""
    multiple = problem.limits.microbatches_multiple
    counts = [max(-(-len(packs) // multiple), 1) * multiple for packs in by_rank]
    most = max(counts)
    for packs, count in zip(by_rank, counts, strict=True):
        wanted = most if problem.equal_count else count
        packs.extend([] for _ in range(wanted - len(packs)))


def plan_of_rank_packs(
    problem: Problem, by_rank: Sequence[Sequence[Sequence[int]]], cp_size: int, algorithm: str
) -> Plan:
    """The plan in which block d of ``cp_size`` ranks runs packs ``by_rank[d]`` in order; an empty one is a dummy."""
    order = [
        (microbatch, block)
        for microbatch in range(max(map(len, by_rank), default=0))
        for block in range(len(by_rank))
        if microbatch < len(by_rank[block])
    ]
    packs = [by_rank[block][microbatch] for microbatch, block in order]
    return Plan.from_packs(
        problem.layout,
        problem.seqlens,
        np.array([block * cp_size for _, block in order], dtype=np.int64),
        np.full(len(order), cp_size, dtype=np.int64),
        np.cumsum([0] + [len(pack) for pack in packs], dtype=np.int64),
        np.array([i for pack in packs for i in pack], dtype=np.int64),
        algorithm=algorithm,
    )
