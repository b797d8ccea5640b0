"""Megatron's small broadcast helpers, without its detour through float32, which holds integers only up to 2^24."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

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
    """The numbers of the group's first rank on all its ranks; integers stay exact.

    Args:
        values: as many on every rank; only the first rank's count. NumPy's and torch's numbers are numbers too.
        group: who takes part.
        dev: where the tensor lives, the current GPU for an NCCL group.

    Returns:
        The first rank's numbers, integers as int and others, truth values included, as float.

    Raises:
        ValueError, TypeError: the first rank has an integer that int64 does not hold, or no number; on all ranks.
    """
    source = dist.get_process_group_ranks(group)[0]
    rows = torch.zeros((len(values) + 1, 2), dtype=torch.int64)
    error: Exception | None = None
    if dist.get_rank() == source:
        for i, value in enumerate(values):
            try:
                rows[i] = _encoded(value)
            except (TypeError, ValueError) as failure:
                # The others wait for this rank: they are told which value it is.
                error = failure
                rows[-1] = torch.tensor([1, i])
                break
    rows = rows.to(dev)
    dist.broadcast(rows, source, group=group)
    rows = rows.cpu()
    if error is not None:
        raise error
    if rows[-1, 0]:
        raise ValueError(f"rank {source} cannot broadcast its value {int(rows[-1, 1])}; see its own error")
    rows = rows[:-1]
    floats = rows[:, 1].contiguous().view(torch.float64)
    return [int(n) if whole else float(x) for whole, n, x in zip(rows[:, 0], rows[:, 1], floats, strict=True)]


def _encoded(value: Any) -> torch.Tensor:
    """int64 [2]: whether it is an integer, and it or the bits of a float."""
    try:
        whole = not isinstance(value, bool) and operator.index(value)
    except TypeError:
        whole = False
    if whole is False:
        return torch.stack([torch.tensor(0), torch.tensor(float(value), dtype=torch.float64).view(torch.int64)])
    if not -(1 << 63) <= whole < 1 << 63:
        raise ValueError(f"{whole} is more than the 64 bits of an integer hold")
    return torch.tensor([1, whole])
