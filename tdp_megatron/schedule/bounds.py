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

    The longest wave holds no more than the token cap of every rank; the other waves share the rest. How long it is
    decides on how many ranks each long sequence may run: on few it takes longer than the wave, on many the exchange of
    K and V outlasts its attention and costs all of them time. Whatever the length, one of the two is lost.

    Args:
        seqlens: integers [n], real lengths, tokens.
        layout: how the ranks are arranged, and the cap.
        cost: what a microbatch costs.

    Raises:
        ScheduleError: a sequence is too long for the layout.
    """
    bound = lower_bound(seqlens, layout, cost)
    lengths: Int64Array = np.sort(check_seqlens(seqlens))[::-1]
    lengths = lengths[lengths > 0]
    if len(lengths) == 0:
        return bound
    sequences = _Sequences(lengths, layout, cost)
    shortest = sequences.shortest_wave
    if shortest <= 0:  # a cost model without costs
        return bound
    starts = np.unique(np.append(np.geomspace(shortest, max(1.6 * bound, shortest), _WAVES), sequences.alone[:, 0]))
    starts = starts[(starts >= shortest) & np.isfinite(starts)]
    least = np.inf
    for start, end in zip(starts, np.append(starts[1:], np.inf), strict=True):
        # Longer waves can only be worse once this one is.
        if start >= least:
            break
        least = min(least, max(bound, *(sequences.step_seconds(start, end, share) for share in _SHARES)))
    return float(least)


#: Lengths of the longest wave tried, between the shortest possible and what cannot be best.
_WAVES = 32
#: Shares of the attention that counts, the rest being exchange, in CP groups beyond a node: any share gives a bound.
_SHARES = (1.0, 0.5, 0.0)


class _Sequences:
    """What sequences cost at least, by CP size."""

    def __init__(self, lengths: Int64Array, layout: ParallelLayout, cost: CostModel) -> None:
        self.lengths = lengths
        self.cost = cost
        self.num_ranks = layout.num_ranks
        self.capacity = layout.num_ranks * layout.tokens_per_rank_limit
        self.waves = max(-(-_exact_sum(lengths) // self.capacity), 1)
        sizes = np.array(layout.cp_sizes, dtype=np.int64)[:, None]
        self.beyond_node = sizes > cost.node_ranks
        caps = np.array([[pack_token_cap(layout, k)] for k in layout.cp_sizes])
        #: Of all ranks together, float64 [cp_sizes, n] and [n], seconds.
        per_token = cost.comm(sizes, np.array([[1]])) - cost.comm(sizes, np.array([[0]]))
        self.exchange = per_token * lengths
        self.attention = cost.b * cost.squares(lengths)
        self.linear = cost.a * lengths
        alone = cost.c0 + self.linear / sizes
        alone = alone + np.maximum(self.attention / sizes, self.exchange / sizes + cost.comm(sizes, np.array([[0]])))
        #: Of a microbatch with that sequence alone, without padding, float64 [cp_sizes, n], seconds; inf if too long.
        self.alone = np.where(lengths <= caps, alone, np.inf)
        self.shortest_wave = float(self.alone.min(axis=0).max())

    def step_seconds(self, start: float, end: float, share: float) -> float:
        """Seconds of a step whose longest wave takes from ``start`` to less than ``end``, at least."""
        possible = (self.alone < end) | (self.alone <= start)
        attention = np.where(self.beyond_node, share, 1.0) * self.attention
        exchange = np.where(self.beyond_node, 1.0 - share, 0.0) * self.exchange
        work = self.linear + np.where(possible, attention + exchange, np.inf).min(axis=0)
        evenly = float(work.sum()) / self.num_ranks + self.cost.c0 * self.waves
        # The longest wave takes the most from the others if it holds the sequences with most work per token.
        order = np.argsort(-work / self.lengths, kind="stable")
        lengths = self.lengths[order]
        outside = np.clip((np.cumsum(lengths) - self.capacity) / lengths, 0.0, 1.0)
        others = float((work[order] * outside).sum()) / self.num_ranks + self.cost.c0 * (self.waves - 1)
        return max(evenly, start + others)
