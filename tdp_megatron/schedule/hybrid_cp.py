"""``balanced_hybrid_cp``: the groups that Megatron's hybrid context parallelism makes, and a plan that can be run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.packs import PlacedOp, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem, pack_token_cap
from tdp_megatron.types import ParallelLayout

__all__ = ["Block", "balanced_hybrid_cp", "falling", "first_ranks", "hybrid_blocks", "hybrid_groups", "ranks_needed"]

#: A group is balanced when busiest and idlest rank differ by at most this share of the busiest one's work.
_SLACK = 0.05
#: A queue may hold this much more than an even share of the work.
_QUEUE_SLACK = 1.1


@dataclass(slots=True)
class Block:
    """Neighbouring ranks that run sequences one after the other, each a microbatch of its own."""

    cp_size: int
    """Ranks of the block."""
    work: float = 0.0
    """Sum of ``s^2 / cp`` of its sequences, before it was widened."""
    sample_ids: list[int] = field(default_factory=list)
    """Its sequences in order."""


def balanced_hybrid_cp(problem: Problem, *, strict: bool = False) -> Plan:
    """Megatron's ``BalancedCPScheduler``: each sequence on the CP size that its length needs, no packing.

    The step falls into groups with a barrier after each (``Plan.op_group``, mode ``barrier``); in a group a block of
    ranks runs its sequences one by one. The cap therefore holds for each sequence; all that a rank runs in a group may
    be far more. The work of a sequence is ``s^2 / cp``.

    Where Megatron's plan can be run on the layout, this is that plan, sequence by sequence and rank by rank. Where
    it cannot, the first that can of these two: the same groups with their blocks in falling order of size, which
    aligns them; the same algorithm with the layout's CP sizes instead of all powers of two, where ranks that
    no block can take in stay idle. Dummy packs at the end give every rank as many microbatches as the limits ask for.

    Args:
        problem: what to schedule; the cost model plays no part.
        strict: raise where Megatron's plan fails, has a block that is no process group, or exceeds the cap once
            padded.

    Raises:
        ScheduleError: as ``strict`` says; names sequence, ranks and limit.
    """
    layout = problem.layout
    seqlens = problem.seqlens.tolist()
    try:
        groups = hybrid_blocks(seqlens, layout.max_seqlen_per_dp_cp_rank, layout.num_ranks)
        reason = _obstacle(layout, seqlens, groups)
    except ScheduleError as error:
        if strict:
            raise
        groups, reason = [], str(error)
    if reason and strict:
        raise ScheduleError(f"{reason}; strict=False moves the blocks, or takes other CP sizes")
    if reason:
        groups = [falling(blocks) for blocks in groups]
    if reason and (not groups or _obstacle(layout, seqlens, groups)):
        groups = [falling(blocks) for blocks in _blocks_of_layout(layout, seqlens)]
    ops: list[PlacedOp] = []
    op_group: list[int] = []
    for number, blocks in enumerate(groups):
        for first, block in first_ranks(blocks):
            ops.extend((first, block.cp_size, [sample_id]) for sample_id in block.sample_ids)
            op_group.extend([number] * len(block.sample_ids))
    return plan_of_placed_ops(problem, ops, "balanced_hybrid_cp", op_group)


def hybrid_groups(seqlens: Sequence[int], max_seqlen_per_rank: int, num_ranks: int) -> list[list[list[int]]]:
    """Sequences by group and rank exactly as Megatron returns them, whether process groups have the ranks or not.

    Args:
        seqlens: tokens.
        max_seqlen_per_rank: tokens.
        num_ranks: DP x CP ranks.

    Raises:
        ScheduleError: as ``hybrid_blocks``.
    """
    return [
        [list(block.sample_ids) for block in blocks for _ in range(block.cp_size)]
        for blocks in hybrid_blocks(seqlens, max_seqlen_per_rank, num_ranks)
    ]


def hybrid_blocks(seqlens: Sequence[int], max_seqlen_per_rank: int, num_ranks: int) -> list[list[Block]]:
    """The blocks of every group in rank order, as Megatron places them.

    Args:
        seqlens: tokens.
        max_seqlen_per_rank: tokens.
        num_ranks: DP x CP ranks.

    Raises:
        ScheduleError: where Megatron fails: a sequence is empty or needs more ranks than there are, or ranks are left
            that do not suffice to double a block (their number is no power of two).
    """
    needed = [ranks_needed(seqlen, max_seqlen_per_rank) for seqlen in seqlens]
    for sample_id, k in enumerate(needed):
        if seqlens[sample_id] < 1:
            raise ScheduleError(f"sequence {sample_id} has {seqlens[sample_id]} tokens, Megatron needs at least 1")
        if k > num_ranks:
            raise ScheduleError(
                f"sequence {sample_id} has {seqlens[sample_id]} tokens and needs {k} ranks of {max_seqlen_per_rank}, "
                f"there are {num_ranks}"
            )
    return _blocks_by_group(seqlens, needed, num_ranks, None)


def ranks_needed(seqlen: int, max_seqlen_per_rank: int) -> int:
    """The smallest power of two of ranks that hold a sequence of ``seqlen`` tokens."""
    return 1 << max(-(-seqlen // max_seqlen_per_rank) - 1, 0).bit_length()


def falling(blocks: Sequence[Block]) -> list[Block]:
    """The blocks by falling size: where sizes divide each other and the ranks, all are aligned."""
    return sorted(blocks, key=lambda block: -block.cp_size)


def first_ranks(blocks: Sequence[Block]) -> Iterator[tuple[int, Block]]:
    """Each block with its first rank, the first block at rank 0."""
    first = 0
    for block in blocks:
        yield first, block
        first += block.cp_size


def _obstacle(layout: ParallelLayout, seqlens: Sequence[int], groups: list[list[Block]]) -> str:
    """Why the groups cannot be run, or nothing."""
    limit = layout.tokens_per_rank_limit
    for number, blocks in enumerate(groups):
        for first, block in first_ranks(blocks):
            k = block.cp_size
            where = f"on ranks {first} to {first + k - 1}" if k > 1 else f"on rank {first}"
            if k not in layout.cp_sizes or first % k:
                return (
                    f"group {number} puts sequence {block.sample_ids[0]} {where}, which are no process group "
                    f"(CP sizes are {list(layout.cp_sizes)}, aligned)"
                )
            for sample_id in block.sample_ids:
                held = layout.tokens_per_rank(layout.padded_seqlen(seqlens[sample_id], k), k)
                if held > limit:
                    return (
                        f"group {number} puts sequence {sample_id} of {seqlens[sample_id]} tokens {where}: {held} "
                        f"tokens per rank when padded, the limit is {limit}"
                    )
    return ""


def _blocks_of_layout(layout: ParallelLayout, seqlens: Sequence[int]) -> list[list[Block]]:
    """The same algorithm with the CP sizes of the layout, and padding counted."""
    # Two chunks per rank do not fit under a cap of one token.
    sizes = tuple(k for k in layout.cp_sizes if pack_token_cap(layout, k)) or layout.cp_sizes[-1:]
    needed = [
        next((k for k in sizes if layout.padded_seqlen(seqlen, k) <= pack_token_cap(layout, k)), sizes[-1])
        for seqlen in seqlens
    ]
    return _blocks_by_group(seqlens, needed, layout.num_ranks, sizes)


def _blocks_by_group(
    seqlens: Sequence[int], needed: Sequence[int], num_ranks: int, sizes: tuple[int, ...] | None
) -> list[list[Block]]:
    work = [seqlen * seqlen / k for seqlen, k in zip(seqlens, needed, strict=True)]
    order = sorted(range(len(seqlens)), key=lambda i: -seqlens[i])
    groups = []
    while order:
        queues = _queues(order, needed, work)
        blocks, free = _place(queues, needed, work, num_ranks)
        # What was put off goes behind shorter ones: the order falls only in the first group.
        order = [i for queue in queues for i in queue]
        if free:
            _widen(blocks, free, num_ranks, sizes)
        else:
            order.extend(_put_off(blocks, work))
        groups.append(blocks)
    return groups


def _queues(order: Sequence[int], needed: Sequence[int], work: Sequence[float]) -> list[deque[int]]:
    """``order`` cut into stretches of about equal work, about as many as there are CP sizes."""
    num_sizes = len({needed[i] for i in order})
    most = sum(work[i] for i in order) / num_sizes * _QUEUE_SLACK
    queues: list[deque[int]] = [deque()]
    held = 0.0
    for at, i in enumerate(order):
        # Each cut counts twice here, which is why there can be fewer stretches than sizes.
        few_left = len(order) - at <= num_sizes - 2 * (len(queues) - 1)
        if queues[-1] and (few_left or held + work[i] > most):
            queues.append(deque())
            held = 0.0
        queues[-1].append(i)
        held += work[i]
    return queues


def _place(
    queues: Sequence[deque[int]], needed: Sequence[int], work: Sequence[float], num_ranks: int
) -> tuple[list[Block], int]:
    """Take sequences from the queues into a new group until none fits or the group is balanced.

    The first queue whose head fits is served: a new block while ranks are free, else the block of its size with the
    least work.

    Returns:
        The blocks, and how many ranks are in none.
    """
    blocks: list[Block] = []
    free = num_ranks
    #: For each CP size its blocks by work, then by age.
    by_work: dict[int, list[tuple[float, int]]] = {}
    busiest = 0.0
    past_first_size = False
    while True:
        queue = next((q for q in queues if q and (needed[q[0]] <= free or needed[q[0]] in by_work)), None)
        if queue is None:
            return blocks, free
        i = queue.popleft()
        k = needed[i]
        heap = by_work.setdefault(k, [])
        if k <= free:
            free -= k
            blocks.append(Block(k, work[i], [i]))
            heapq.heappush(heap, (work[i], len(blocks) - 1))
            block = blocks[-1]
        else:
            number = heap[0][1]
            block = blocks[number]
            block.work += work[i]
            block.sample_ids.append(i)
            heapq.heapreplace(heap, (block.work, number))
        busiest = max(busiest, block.work)
        past_first_size = past_first_size or k < blocks[0].cp_size
        if past_first_size and not free:
            idlest = min(heap[0][0] for heap in by_work.values())
            if busiest - idlest <= _SLACK * busiest:
                return blocks, free


def _put_off(blocks: Sequence[Block], work: Sequence[float]) -> list[int]:
    """Take the last sequence from the busiest block as long as that brings busiest and idlest closer."""
    heap = [(-block.work, number) for number, block in enumerate(blocks)]
    heapq.heapify(heap)
    idlest = min(block.work for block in blocks)
    taken: list[int] = []
    while True:
        busiest, number = -heap[0][0], heap[0][1]
        block = blocks[number]
        spread = busiest - idlest
        if spread <= _SLACK * busiest or len(block.sample_ids) == 1:
            return taken
        left = busiest - work[block.sample_ids[-1]]
        heapq.heapreplace(heap, (-left, number))
        if -heap[0][0] - min(idlest, left) >= spread:
            return taken
        idlest = min(idlest, left)
        block.work = left
        taken.append(block.sample_ids.pop())


def _widen(blocks: Sequence[Block], free: int, num_ranks: int, sizes: tuple[int, ...] | None) -> None:
    """Give the free ranks away: the first of the smallest blocks becomes as wide as the next CP size, and again.

    Without ``sizes`` the next is the double, or all ranks, as in Megatron, and ranks that remain are an error.
    """
    while free:
        block = min(blocks, key=lambda block: block.cp_size)
        k = block.cp_size
        wider = min(2 * k, num_ranks) if sizes is None else next((size for size in sizes if size > k), num_ranks + k)
        if wider - k > free:
            if sizes is None:
                raise ScheduleError(
                    f"sequence {block.sample_ids[0]} runs on {k} ranks, {free} of {num_ranks} have nothing to do, "
                    f"and {wider} would be needed to share it among more: use a power of two of ranks"
                )
            return
        block.cp_size = wider
        free -= wider - k
