"""``dp_balanced``: Megatron's default, next-fit in arrival order, the same packs bit for bit."""

from __future__ import annotations

import numpy as np

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import plan_of_ops, static_cp_size
from tdp_megatron.schedule.plan import Plan, padded_seqlens
from tdp_megatron.schedule.problem import Problem, pack_token_cap
from tdp_megatron.types import Int64Array

__all__ = ["dp_balanced", "dp_balanced_reference"]


def dp_balanced(problem: Problem, *, strict: bool = False) -> Plan:
    """Next-fit in arrival order; pack i goes to DP rank ``i % dp``.

    When the packs are no multiple of ``dp * microbatches_multiple``, the last sequence of the last pack that can spare
    one becomes a pack of its own, until they are.

    Args:
        problem: what to schedule; the cost model plays no part. CP is static.
        strict: raise where Megatron asserts that no sample can be moved. Otherwise pack 0, which Megatron
            never splits, is split too, and dummy packs fill the rest.

    Raises:
        ScheduleError: as ``strict`` says.
    """
    cp_size = static_cp_size(problem, "dp_balanced")
    _, _, offsets, _ = _C.schedule_next_fit(native_input(problem), cp_size)
    return _deal_out(problem, cp_size, np.diff(offsets), strict)


def dp_balanced_reference(problem: Problem, *, strict: bool = False) -> Plan:
    """``dp_balanced`` in plain Python; the native core gives the same plan."""
    cp_size = static_cp_size(problem, "dp_balanced")
    cap = pack_token_cap(problem.layout, cp_size)
    sizes: list[int] = []
    tokens = 0
    for length in padded_seqlens(problem.seqlens, cp_size).tolist():
        if not sizes or tokens + length > cap or sizes[-1] == problem.max_sequences:
            sizes.append(0)
            tokens = 0
        sizes[-1] += 1
        tokens += length
    return _deal_out(problem, cp_size, np.array(sizes, dtype=np.int64), strict)


def _deal_out(problem: Problem, cp_size: int, sizes: Int64Array, strict: bool) -> Plan:
    """Packs of ``sizes`` consecutive sequences, split until their number is right, to blocks in turn."""
    num_blocks = problem.layout.num_ranks // cp_size
    multiple = num_blocks * problem.limits.microbatches_multiple
    wanted = -(-len(sizes) // multiple) * multiple
    left = sizes.tolist()
    starts = (np.cumsum(sizes) - sizes).tolist()
    alone: list[int] = []
    first = 1 if strict else 0
    donor = len(left) - 1
    while len(left) + len(alone) < wanted:
        while donor >= first and left[donor] < 2:
            donor -= 1
        if donor < first:
            break
        left[donor] -= 1
        alone.append(starts[donor] + left[donor])
    count = len(left) + len(alone)
    if strict and count < wanted:
        raise ScheduleError(
            f"{count} packs cannot be made a multiple of {multiple} (dp {num_blocks} x "
            f"{problem.limits.microbatches_multiple}): no pack but the first has a second sequence to spare; "
            "strict=False splits the first one too and adds dummy packs"
        )
    moved = np.array(alone, dtype=np.int64)
    stays = np.ones(len(problem.seqlens), dtype=np.bool_)
    stays[moved] = False
    ids = np.concatenate([np.flatnonzero(stays), moved])
    counts = np.array(left + [1] * len(alone) + [0] * (wanted - count), dtype=np.int64)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    first_rank = np.arange(len(counts), dtype=np.int64) % num_blocks * cp_size
    sizes_of_ops = np.full(len(counts), cp_size, dtype=np.int64)
    return plan_of_ops(problem, first_rank, sizes_of_ops, offsets, ids, "dp_balanced")
