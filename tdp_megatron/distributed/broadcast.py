"""Megatron's small broadcast helpers, without its detour through float32, which holds integers only up to 2^24."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["broadcast_scalars", "broadcast_tensor"]


def broadcast_tensor(item: torch.Tensor | None, src_rank: int, group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the values of ``src_rank``, in place; nothing where ``item`` is None.

    Args:
        item: same shape and dtype on all ranks, or None on all ranks.
        src_rank: torch.distributed rank of the source.
        group: who takes part.
    """
    if item is not None:
        dist.broadcast(item, src_rank, group=group)


def broadcast_scalars(
    values: Sequence[float], group: dist.ProcessGroup, dev: torch.device | str = "cpu"
) -> list[int | float]:
    """The numbers of the group's first rank on all its ranks; integers stay exact up to 2^63.

    Args:
        values: as many on every rank; only the first rank's count.
        group: who takes part.
        dev: where the tensor lives, the current GPU for an NCCL group.

    Returns:
        The first rank's numbers, integers as int and others as float.
    """
    source = dist.get_process_group_ranks(group)[0]
    rows = torch.zeros((len(values), 2), dtype=torch.int64)
    if dist.get_rank() == source:
        for i, value in enumerate(values):
            whole = isinstance(value, int) and not isinstance(value, bool)
            rows[i, 0] = int(whole)
            # A float travels as its bits.
            rows[i, 1] = value if whole else torch.tensor(float(value), dtype=torch.float64).view(torch.int64)
    rows = rows.to(dev)
    dist.broadcast(rows, source, group=group)
    rows = rows.cpu()
    floats = rows[:, 1].contiguous().view(torch.float64)
    return [int(n) if whole else float(x) for whole, n, x in zip(rows[:, 0], rows[:, 1], floats, strict=True)]
