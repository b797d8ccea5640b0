"""``dp_balanced``: Megatron's default, next-fit in arrival order, the same packs bit for bit."""

from __future__ import annotations

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.packs import fill_up, plan_of_rank_packs, static_cp_size
from tdp_megatron.schedule.plan import Plan, padded_seqlens
from tdp_megatron.schedule.problem import Problem, pack_token_cap

__all__ = ["dp_balanced"]


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
    layout = problem.layout
    cp_size = static_cp_size(problem, "dp_balanced")
    cap = pack_token_cap(layout, cp_size)
    padded = padded_seqlens(problem.seqlens, cp_size).tolist()

    packs: list[list[int]] = []
    tokens = cap + 1
    for sample_id, length in enumerate(padded):
        if tokens + length > cap or len(packs[-1]) == problem.max_sequences:
            packs.append([])
            tokens = 0
        packs[-1].append(sample_id)
        tokens += length

    num_blocks = layout.num_ranks // cp_size
    multiple = num_blocks * problem.limits.microbatches_multiple
    wanted = -(-len(packs) // multiple) * multiple
    first = 1 if strict else 0
    donor = len(packs) - 1
    while len(packs) < wanted:
        while donor >= first and len(packs[donor]) < 2:
            donor -= 1
        if donor >= first:
            packs.append([packs[donor].pop()])
        elif strict:
            raise ScheduleError(
                f"{len(packs)} packs cannot be made a multiple of {multiple} (dp {num_blocks} x "
                f"{problem.limits.microbatches_multiple}): no pack but the first has a second sequence to spare; "
                "strict=False splits the first one too and adds dummy packs"
            )
        else:
            packs.append([])
    by_rank = [packs[block::num_blocks] for block in range(num_blocks)]
    fill_up(problem, by_rank)
    return plan_of_rank_packs(problem, by_rank, cp_size, "dp_balanced")
