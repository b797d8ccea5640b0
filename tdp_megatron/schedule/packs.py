"""Packs under a token cap on a static CP group, and the plan that a list of packs or ops makes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem, check_fits
from tdp_megatron.types import Int64Array

__all__ = [
    "PlacedOp",
    "best_fit_packs",
    "plan_of_ops",
    "plan_of_placed_ops",
    "plan_of_rank_packs",
    "static_cp_size",
]

#: First rank, CP size, sample ids in pack order.
PlacedOp = tuple[int, int, list[int]]


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


def plan_of_rank_packs(problem: Problem, by_rank: Sequence[Sequence[list[int]]], cp_size: int, algorithm: str) -> Plan:
    """The plan in which block d of ``cp_size`` ranks runs packs ``by_rank[d]`` in order; an empty one is a dummy."""
    return plan_of_placed_ops(
        problem,
        [
            (block * cp_size, cp_size, by_rank[block][microbatch])
            for microbatch in range(max(map(len, by_rank), default=0))
            for block in range(len(by_rank))
            if microbatch < len(by_rank[block])
        ],
        algorithm,
    )


def plan_of_placed_ops(problem: Problem, ops: Sequence[PlacedOp], algorithm: str, op_group: npt.ArrayLike = ()) -> Plan:
    """``plan_of_ops`` for lists."""
    return plan_of_ops(
        problem,
        np.array([first for first, _, _ in ops], dtype=np.int64),
        np.array([size for _, size, _ in ops], dtype=np.int64),
        np.cumsum([0] + [len(ids) for _, _, ids in ops], dtype=np.int64),
        np.array([i for _, _, ids in ops for i in ids], dtype=np.int64),
        algorithm,
        op_group,
    )


def plan_of_ops(
    problem: Problem,
    first_rank: Int64Array,
    cp_size: Int64Array,
    offsets: Int64Array,
    sample_ids: Int64Array,
    algorithm: str,
    op_group: npt.ArrayLike = (),
) -> Plan:
    """The plan of ops in order, with dummy packs at the end where ranks have too few microbatches for the limits.

    Args:
        problem: layout and limits.
        first_rank, cp_size: int64 [m].
        offsets: int64 [m + 1] into ``sample_ids``.
        sample_ids: int64 [n], by op.
        algorithm: name of what made the ops.
        op_group: barrier group of the first ops, int [at most m]; later ones and dummy packs join the last group.
    """
    num_ranks = problem.layout.num_ranks
    starts_and_ends = np.zeros(num_ranks + 1, dtype=np.int64)
    np.add.at(starts_and_ends, first_rank, 1)
    np.add.at(starts_and_ends, first_rank + cp_size, -1)
    counts = np.cumsum(starts_and_ends[:num_ranks])
    multiple = problem.limits.microbatches_multiple
    wanted = np.maximum(-(-counts // multiple), 1) * multiple
    if problem.equal_count:
        wanted[:] = wanted.max()
    # All ranks of a smallest block run the same ops, so its first rank speaks for it.
    smallest = problem.layout.cp_sizes[0]
    firsts = np.arange(0, num_ranks, smallest, dtype=np.int64)
    dummies = np.repeat(firsts, (wanted - counts)[firsts])
    groups = np.array(op_group, dtype=np.int64)
    if len(groups):
        groups = np.pad(groups, (0, len(first_rank) + len(dummies) - len(groups)), mode="edge")
    return Plan.from_packs(
        problem.layout,
        problem.seqlens,
        np.concatenate([first_rank, dummies]),
        np.concatenate([cp_size, np.full(len(dummies), smallest, dtype=np.int64)]),
        np.concatenate([offsets, np.full(len(dummies), offsets[-1], dtype=np.int64)]),
        sample_ids,
        op_group=groups,
        algorithm=algorithm,
    )
