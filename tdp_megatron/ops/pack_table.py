"""Where every token of a rank's microbatches comes from: a plan turned into spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array

__all__ = ["PackTable", "build_pack_table"]


@dataclass(frozen=True, slots=True)
class PackTable:
    """All microbatches of one rank, laid end to end in one buffer of T tokens.

    Row i of the span arrays: tokens ``[starts[i], starts[i] + lengths[i])`` of sequence ``sample_ids[i]`` go to
    ``[destinations[i], ...)`` of the buffer, followed by ``widths[i] - lengths[i]`` pads. With CP a sequence gives a
    rank two spans, without it one; the pads at the end of a pack are spans of no sample (-1).
    """

    ops: Int64Array
    """int64 [m], numbers of the plan's ops this rank runs, in order."""
    op_offsets: Int64Array
    """int64 [m + 1], where each microbatch begins in the buffer."""
    cp_ranks: Int64Array
    """int64 [m], this rank's place in each op's block."""
    sample_ids: Int64Array
    """int64 [n]."""
    starts: Int64Array
    """int64 [n], tokens from the start of the sequence."""
    lengths: Int64Array
    """int64 [n], real tokens."""
    widths: Int64Array
    """int64 [n], tokens of the buffer the span fills, pads included."""
    destinations: Int64Array
    """int64 [n]."""
    entries: Int64Array
    """int64 [n], number of the sequence in its pack; the tail is one more than the last."""

    held: Int64Array
    """int64 [h], the sequences of all packs in pack order, those of length 0 included."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the buffer."""
        return int(self.op_offsets[-1])


def build_pack_table(plan: Plan, rank: int) -> PackTable:
    """Spans of all microbatches of ``rank``; see ``cp_partition_indices`` for which chunks a CP rank takes.

    Args:
        plan: any valid plan.
        rank: DP x CP rank.
    """
    ops = plan.rank_ops(rank)
    cp_size = plan.op_cp_size[ops]
    cp_rank = rank - plan.op_first_rank[ops]
    op_offsets = np.zeros(len(ops) + 1, dtype=np.int64)
    np.cumsum(plan.op_tokens_per_rank[ops], out=op_offsets[1:])

    counts = plan.op_offsets[ops + 1] - plan.op_offsets[ops]
    # One entry per sequence, and one per pack for its tail.
    op_of = np.repeat(np.arange(len(ops)), counts + 1)
    first_entry = np.cumsum(counts + 1) - (counts + 1)
    entry = np.arange(len(op_of)) - first_entry[op_of]
    is_tail = entry == counts[op_of]
    sample_ids = np.full(len(op_of), -1, dtype=np.int64)
    padded = np.zeros(len(op_of), dtype=np.int64)
    source = (plan.op_offsets[ops][op_of] + entry)[~is_tail]
    sample_ids[~is_tail] = plan.sample_ids[source]
    padded[~is_tail] = plan.padded_lengths[source]
    seqlens = np.where(is_tail, 0, plan.seqlens[sample_ids]) if len(plan.seqlens) else np.zeros_like(padded)
    sequences = np.bincount(op_of, weights=padded, minlength=len(ops)).astype(np.int64)
    padded[is_tail] = plan.op_tokens_per_rank[ops] * cp_size - sequences

    k = cp_size[op_of]
    local = padded // k
    running = np.cumsum(local) - local
    begin = op_offsets[op_of] + running - running[first_entry[op_of]]

    # Chunk r of 2k, then chunk 2k - 1 - r; without CP the only chunk is the sequence.
    chunk = np.where(k > 1, padded // (2 * k), padded)
    r = cp_rank[op_of]
    start = np.stack([r * chunk, (2 * k - 1 - r) * chunk], axis=1)
    width = np.stack([chunk, np.where(k > 1, chunk, 0)], axis=1)
    destination = np.stack([begin, begin + chunk], axis=1)
    length = np.clip(seqlens[:, None] - start, 0, width)
    keep = width > 0
    both = np.broadcast_to

    def flat(values: Int64Array) -> Int64Array:
        return np.ascontiguousarray(values[keep])

    return PackTable(
        ops=ops,
        op_offsets=op_offsets,
        cp_ranks=cp_rank,
        sample_ids=flat(both(sample_ids[:, None], keep.shape)),
        starts=flat(start),
        lengths=flat(length),
        widths=flat(width),
        destinations=flat(destination),
        entries=flat(both(entry[:, None], keep.shape)),
        held=sample_ids[~is_tail],
    )
