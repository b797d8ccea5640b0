"""Step times that no plan can beat: ``lower_bound`` in any execution mode, ``lockstep_bound`` in lockstep."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.problem import check_fits, check_seqlens, pack_token_cap
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["lockstep_bound", "lower_bound"]


def lower_bound(seqlens: npt.ArrayLike, layout: ParallelLayout, cost: CostModel) -> float:
    """Seconds: all work spread evenly over the ranks, or the longest sequence alone, whichever takes longer.

    Padding and communication are left out, so it is a bound for every mode, and not always reachable.

    Args:
        seqlens: integers [n], real lengths, tokens.
        layout: how the ranks are arranged, and the cap.
        cost: what a microbatch costs.

    Raises:
        ScheduleError: a sequence is too long for the layout.
    """
    lengths = check_seqlens(seqlens)
    check_fits(lengths, layout, layout.cp_sizes)
    # On average a rank runs at least total / capacity microbatches, and each at least
    # one, since an idle rank runs a dummy pack; rounding the average up would be no bound where counts may differ.
    total = _exact_sum(lengths)
    capacity = layout.num_ranks * layout.tokens_per_rank_limit
    squares = float(np.cumsum(np.append(0.0, cost.squares(lengths)))[-1])
    work = cost.a * total + cost.b * squares
    area: float = work / layout.num_ranks + cost.c0 * max(total / capacity, 1.0)
    if len(lengths) == 0:
        return area
    longest = int(lengths.max())
    work_of_longest = cost.a * longest + cost.b * float(cost.squares(np.array([longest]))[0])
    most = max(k for k in layout.cp_sizes if longest <= pack_token_cap(layout, k))
    alone: float = cost.c0 + work_of_longest / most
    return max(area, alone)


def _exact_sum(lengths: Int64Array) -> int:
    longest = int(lengths.max(initial=0))
    if longest * len(lengths) <= np.iinfo(np.int64).max:
        return int(lengths.sum())
    return sum(lengths.tolist())


def lockstep_bound(seqlens: npt.ArrayLike, layout: ParallelLayout, cost: CostModel) -> float:
    """Seconds that no plan can beat where all ranks wait for each other at every microbatch; above ``lower_bound``.

    The wave with the longest sequence takes at least as long as that sequence alone, communication included, and
    holds no more than the token cap of every rank; the other waves share the rest. Where long sequences are few, ranks
    run out of tokens in that wave long before it ends, and no packing helps.

    Args:
        seqlens: integers [n], real lengths, tokens.
        layout: how the ranks are arranged, and the cap.
        cost: what a microbatch costs.

    Raises:
        ScheduleError: a sequence is too long for the layout.
    """
    bound = lower_bound(seqlens, layout, cost)
    lengths: Int64Array = np.sort(check_seqlens(seqlens))[::-1]
    if len(lengths) == 0:
        return bound
    longest = int(lengths[0])
    alone = min(
        cost.microbatch_cost([longest], k, layout) for k in layout.cp_sizes if longest <= pack_token_cap(layout, k)
    )
    ends = np.cumsum(lengths)
    capacity = layout.num_ranks * layout.tokens_per_rank_limit
    waves = max(-(-int(ends[-1]) // capacity), 1)
    # Work per token rises with the length, so a wave holds most work when it holds the longest sequences.
    outside = np.clip((ends - capacity) / np.maximum(lengths, 1), 0.0, 1.0)
    work = cost.a * lengths + cost.b * cost.squares(lengths)
    others = float(np.cumsum(work * outside)[-1]) / layout.num_ranks + cost.c0 * (waves - 1)
    evenly = float(np.cumsum(work)[-1]) / layout.num_ranks + cost.c0 * waves
    return max(bound, evenly, alone + others)
