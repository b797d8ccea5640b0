"""Whether per-rank queues of microbatches can be executed, and in which order (constraint H4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tdp_megatron.errors import ScheduleError
from tdp_megatron.types import Int64Array

__all__ = ["execution_order"]


def execution_order(
    op_first_rank: Int64Array, op_cp_size: Int64Array, queues: Sequence[Sequence[int] | Int64Array]
) -> Int64Array:
    """One order of all ops in which every rank follows its own queue.

    Args:
        op_first_rank: int64 [m], first rank of each op's block.
        op_cp_size: int64 [m], ranks of the block.
        queues: for each rank, the numbers of its ops in the order in which it wants to run them.

    Returns:
        int64 [m], op numbers.

    Raises:
        ScheduleError: a rank's queue lacks or repeats an op, or ranks wait for each other in a circle; the message
            names the ranks and ops of the circle.
    """
    lists = [[int(op) for op in queue] for queue in queues]
    members: dict[int, set[int]] = {}
    for rank, queue in enumerate(lists):
        for op in queue:
            if not 0 <= op < len(op_first_rank):
                raise ScheduleError(f"rank {rank} queues op {op}, the plan has {len(op_first_rank)}")
            ranks = members.setdefault(op, set())
            if rank in ranks:
                raise ScheduleError(f"rank {rank} queues op {op} twice")
            ranks.add(rank)
    for op in range(len(op_first_rank)):
        first, size = int(op_first_rank[op]), int(op_cp_size[op])
        expected = set(range(first, first + size))
        found = members.get(op, set())
        if found != expected:
            rank = min(found ^ expected)
            verb = "does not run" if rank in expected else "runs"
            raise ScheduleError(f"op {op} belongs to ranks {first} to {first + size - 1}, but rank {rank} {verb} it")

    head = [0] * len(lists)
    arrived = [0] * len(op_first_rank)
    order: list[int] = []
    ready: list[int] = []

    def arrive(rank: int) -> None:
        if head[rank] < len(lists[rank]):
            op = lists[rank][head[rank]]
            arrived[op] += 1
            if arrived[op] == op_cp_size[op]:
                ready.append(op)

    for rank in range(len(lists)):
        arrive(rank)
    position = 0
    while position < len(ready):
        op = ready[position]
        position += 1
        order.append(op)
        first = int(op_first_rank[op])
        for rank in range(first, first + int(op_cp_size[op])):
            head[rank] += 1
            arrive(rank)
    if len(order) < len(op_first_rank):
        raise ScheduleError(_explain_cycle(op_first_rank, op_cp_size, lists, head))
    return np.array(order, dtype=np.int64)


def _explain_cycle(op_first_rank: Int64Array, op_cp_size: Int64Array, queues: list[list[int]], head: list[int]) -> str:
    """Each waiting rank waits for a member that is busy with another op: follow that until a rank repeats."""
    rank = next(r for r, queue in enumerate(queues) if head[r] < len(queue))
    seen: dict[int, int] = {}
    path: list[int] = []
    while rank not in seen:
        seen[rank] = len(path)
        path.append(rank)
        op = queues[rank][head[rank]]
        first = int(op_first_rank[op])
        rank = next(r for r in range(first, first + int(op_cp_size[op])) if queues[r][head[r]] != op)
    circle = path[seen[rank] :]
    parts = []
    for member in circle:
        op = queues[member][head[member]]
        first = int(op_first_rank[op])
        last = first + int(op_cp_size[op]) - 1
        parts.append(f"rank {member} waits in op {op} (ranks {first}-{last}, its microbatch {head[member]})")
    return f"deadlock: {', for '.join(parts)}, for rank {circle[0]}; order the ops alike on all ranks"
