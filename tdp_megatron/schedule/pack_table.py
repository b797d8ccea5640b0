"""Where every token of a rank's microbatches comes from: a plan turned into spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tdp_megatron.types import Int64Array

if TYPE_CHECKING:
    from tdp_megatron.schedule.plan import Plan

__all__ = ["PackTable", "RankSpans", "build_pack_table", "build_rank_spans", "build_tables"]


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
    return _table(plan, ops, rank - plan.op_first_rank[ops])


@dataclass(frozen=True, slots=True)
class RankSpans:
    """The real tokens of all ranks' packs: what every rank wants of which sample, and where it goes."""

    rank: Int64Array
    """int64 [n], who wants it; never falling."""
    sample_ids: Int64Array
    """int64 [n]."""
    starts: Int64Array
    """int64 [n], tokens from the start of the sample."""
    lengths: Int64Array
    """int64 [n], tokens, at least 1."""
    destinations: Int64Array
    """int64 [n], in that rank's buffer."""
    held_rank: Int64Array
    """int64 [h], never falling."""
    held: Int64Array
    """int64 [h], the samples each rank holds, those of length 0 included."""

    @staticmethod
    def whole(samples_of_rank: Sequence[Int64Array], seqlens: Int64Array) -> RankSpans:
        """Whole samples, one after the other in each rank's buffer.

        Args:
            samples_of_rank: per rank, int64 sample numbers.
            seqlens: int64 [N], lengths of all samples, tokens.
        """
        counts = [len(ids) for ids in samples_of_rank]
        rank = np.repeat(np.arange(len(counts)), counts)
        ids = np.concatenate(samples_of_rank)
        lengths = seqlens[ids]
        destinations = [np.cumsum(seqlens[i]) - seqlens[i] for i in samples_of_rank]
        keep = lengths > 0
        return RankSpans(
            rank[keep],
            ids[keep],
            np.zeros(int(keep.sum()), dtype=np.int64),
            lengths[keep],
            np.concatenate(destinations)[keep],
            rank,
            ids,
        )


def build_rank_spans(plan: Plan) -> RankSpans:
    """What ``build_pack_table`` says for every rank, the pads left out, without a loop over ranks.

    Args:
        plan: any valid plan.
    """
    return build_tables(plan, 0)[1]


def build_tables(plan: Plan, rank: int) -> tuple[PackTable, RankSpans]:
    """``build_pack_table`` and ``build_rank_spans`` at once, for less than the two.

    Args:
        plan: any valid plan.
        rank: DP x CP rank of the pack table.
    """
    num_ranks = plan.layout.num_ranks
    counts = plan.num_microbatches_per_rank
    ops = np.concatenate([plan.rank_ops(r) for r in range(num_ranks)])
    rank_of_op = np.repeat(np.arange(num_ranks), counts)
    table = _table(plan, ops, rank_of_op - plan.op_first_rank[ops])
    first_op = np.append(0, np.cumsum(counts))
    # The table lays all ranks' buffers end to end; each rank's own begins at 0.
    begins = table.op_offsets[first_op]
    real = np.flatnonzero(table.lengths > 0)
    span_rank = np.searchsorted(begins, table.destinations, side="right") - 1
    wanted = span_rank[real]
    spans = RankSpans(
        wanted,
        table.sample_ids[real],
        table.starts[real],
        table.lengths[real],
        table.destinations[real] - begins[wanted],
        np.repeat(rank_of_op, plan.op_offsets[ops + 1] - plan.op_offsets[ops]),
        table.held,
    )
    mine = slice(int(first_op[rank]), int(first_op[rank + 1]))
    rows = slice(*np.searchsorted(span_rank, [rank, rank + 1]).tolist())
    held = slice(*np.searchsorted(spans.held_rank, [rank, rank + 1]).tolist())
    return (
        PackTable(
            ops=ops[mine],
            op_offsets=table.op_offsets[mine.start : mine.stop + 1] - begins[rank],
            cp_ranks=table.cp_ranks[mine],
            sample_ids=table.sample_ids[rows],
            starts=table.starts[rows],
            lengths=table.lengths[rows],
            widths=table.widths[rows],
            destinations=table.destinations[rows] - begins[rank],
            entries=table.entries[rows],
            held=table.held[held],
        ),
        spans,
    )


def _table(plan: Plan, ops: Int64Array, cp_rank: Int64Array) -> PackTable:
    """Spans of some ops, each as one rank of its block holds it, laid end to end."""
    cp_size = plan.op_cp_size[ops]
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
