"""``lower_bound``: a step time that no plan can beat, in any execution mode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.problem import check_fits, check_seqlens, pack_token_cap
from tdp_megatron.types import ParallelLayout

__all__ = ["lower_bound"]


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
    # Python's sums of int are exact. On average a rank runs at least total / capacity microbatches, and each at least
    # one, since an idle rank runs a dummy pack; rounding the average up would be no bound where counts may differ.
    total: int = sum(lengths.tolist())
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
