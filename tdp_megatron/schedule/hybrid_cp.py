"""``balanced_hybrid_cp``: the groups that Megatron's hybrid context parallelism makes, and a plan that can be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem, pack_token_cap

__all__ = ["balanced_hybrid_cp", "hybrid_groups"]


@dataclass(slots=True)
class _Block:
    """Neighbouring ranks that run sequences one after the other, each a microbatch of its own."""

    cp_size: int
    work: float = 0.0
    sample_ids: list[int] = field(default_factory=list)


def balanced_hybrid_cp(problem: Problem, *, strict: bool = False) -> Plan:
    """Megatron's ``BalancedCPScheduler``: each sequence on the CP size that its length needs, no packing.

    The step falls into groups with a barrier after each (mode ``barrier``); in a group a block of ranks runs its
    sequences one by one. The work of a sequence is ``s^2 / cp``.

    Args:
        problem: what to schedule; the cost model and ``equal_count`` play no part.
        strict: raise where Megatron's blocks are no process groups. Otherwise blocks of one group are put in falling
            order of size, which aligns them, and ranks too few to double a block stay idle.

    Raises:
        ScheduleError: as ``strict`` says, or the counts that the limits ask for need another algorithm.
    """
    limits = problem.limits
    if problem.equal_count or limits.microbatches_multiple > 1:
        raise ScheduleError(
            "balanced_hybrid_cp gives ranks different numbers of microbatches; for equal counts or multiples use waves"
        )
    layout = problem.layout
    seqlens = problem.seqlens.tolist()
    if strict:
        needed = [_needed(seqlen, layout.tokens_per_rank_limit) for seqlen in seqlens]
    else:
        needed = [
            next(k for k in layout.cp_sizes if layout.padded_seqlen(seqlen, k) <= pack_token_cap(layout, k))
            for seqlen in seqlens
        ]
    ops: list[tuple[int, int, list[int]]] = []
    groups: list[int] = []
    allowed = None if strict else layout.cp_sizes
    for number, blocks in enumerate(_blocks_by_group(seqlens, needed, layout.num_ranks, allowed)):
        if not strict:
            blocks.sort(key=lambda block: -block.cp_size)
        first = 0
        for block in blocks:
            if block.cp_size not in layout.cp_sizes or first % block.cp_size:
                raise ScheduleError(
                    f"group {number} puts sequence {block.sample_ids[0]} on ranks {first} to "
                    f"{first + block.cp_size - 1}, which are no process group (CP sizes are {list(layout.cp_sizes)}, "
                    "aligned); strict=False moves the blocks"
                )
            ops.extend((first, block.cp_size, [sample_id]) for sample_id in block.sample_ids)
            groups.extend([number] * len(block.sample_ids))
            first += block.cp_size
    counts = np.zeros(layout.num_ranks, dtype=np.int64)
    for first, size, _ in ops:
        counts[first : first + size] += 1
    smallest = layout.cp_sizes[0]
    for first in range(0, layout.num_ranks, smallest):
        if counts[first] == 0:
            ops.append((first, smallest, []))
            groups.append(groups[-1] if groups else 0)
    return Plan.from_packs(
        layout,
        problem.seqlens,
        np.array([first for first, _, _ in ops], dtype=np.int64),
        np.array([size for _, size, _ in ops], dtype=np.int64),
        np.cumsum([0] + [len(ids) for _, _, ids in ops], dtype=np.int64),
        np.array([i for _, _, ids in ops for i in ids], dtype=np.int64),
        op_group=np.array(groups, dtype=np.int64),
        algorithm="balanced_hybrid_cp",
    )


def hybrid_groups(seqlens: Sequence[int], max_seqlen_per_rank: int, num_ranks: int) -> list[list[list[int]]]:
    """Sequences by group and rank exactly as Megatron returns them, runnable or not.

    Args:
        seqlens: tokens.
        max_seqlen_per_rank: tokens.
        num_ranks: DP x CP ranks.

    Raises:
        ScheduleError: a sequence needs more ranks than there are.
    """
    needed = [_needed(seqlen, max_seqlen_per_rank) for seqlen in seqlens]
    for sample_id, k in enumerate(needed):
        if k > num_ranks:
            raise ScheduleError(
                f"sequence {sample_id} has {seqlens[sample_id]} tokens and needs {k} ranks of {max_seqlen_per_rank}, "
                f"there are {num_ranks}"
            )
    return [
        [list(block.sample_ids) for block in blocks for _ in range(block.cp_size)]
        for blocks in _blocks_by_group(seqlens, needed, num_ranks, None)
    ]


def _needed(seqlen: int, max_seqlen_per_rank: int) -> int:
    """Smallest power of two of ranks that hold the sequence."""
    return 1 << max(-(-seqlen // max_seqlen_per_rank) - 1, 0).bit_length()


def _blocks_by_group(
    seqlens: Sequence[int], needed: list[int], num_ranks: int, allowed: tuple[int, ...] | None
) -> list[list[_Block]]:
    work = [float(seqlen) * seqlen / k for seqlen, k in zip(seqlens, needed, strict=True)]
    queue = sorted(range(len(seqlens)), key=lambda i: (-seqlens[i], i))
    groups = []
    while queue:
        blocks, waiting = _place(queue, needed, work, num_ranks)
        trimmed = _trim(blocks, work)
        _widen(blocks, num_ranks, allowed)
        groups.append(blocks)
        queue = waiting + trimmed
    return groups


def _place(queue: list[int], needed: list[int], work: list[float], num_ranks: int) -> tuple[list[_Block], list[int]]:
    """A new block while ranks are free, else the block of the same size with the least work, else wait."""
    blocks: list[_Block] = []
    waiting: list[int] = []
    free = num_ranks
    for i in queue:
        if needed[i] <= free:
            blocks.append(_Block(needed[i]))
            free -= needed[i]
            block = blocks[-1]
        else:
            same = [block for block in blocks if block.cp_size == needed[i]]
            if not same:
                waiting.append(i)
                continue
            block = min(same, key=lambda block: block.work)
        block.work += work[i]
        block.sample_ids.append(i)
    return blocks, waiting


def _trim(blocks: list[_Block], work: list[float]) -> list[int]:
    """Put off the last sequence of the busiest block as long as that brings busiest and idlest closer."""
    trimmed: list[int] = []
    while len(blocks) > 1:
        busiest = max(blocks, key=lambda block: block.work)
        if len(busiest.sample_ids) < 2:
            break
        spread = busiest.work - min(block.work for block in blocks)
        last = busiest.sample_ids[-1]
        busiest.work -= work[last]
        if max(block.work for block in blocks) - min(block.work for block in blocks) >= spread:
            break
        trimmed.append(busiest.sample_ids.pop())
    return trimmed


def _widen(blocks: list[_Block], num_ranks: int, allowed: tuple[int, ...] | None) -> None:
    """Give free ranks to the first of the smallest blocks, doubling it while it stays ``allowed``.

    Without ``allowed`` the last block gets what is left, doubled or not, as Megatron does.
    """
    free = num_ranks - sum(block.cp_size for block in blocks)
    while free:
        block = min(blocks, key=lambda block: block.cp_size)
        if allowed is not None and 2 * block.cp_size not in allowed:
            break
        if block.cp_size > free:
            block.cp_size += free if allowed is None else 0
            break
        free -= block.cp_size
        block.cp_size *= 2
