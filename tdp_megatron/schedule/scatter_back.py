"""What a model computed per packed token, put back to the samples; for any arrays that index like NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tdp_megatron.schedule.pack_table import build_pack_table
from tdp_megatron.types import Int64Array

if TYPE_CHECKING:
    from tdp_megatron.schedule.plan import Plan

__all__ = ["RankOutputs", "common_shapes", "scatter_back", "whole_spans"]


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """Outputs of one rank's packs, looked at but not yet read."""

    parts: tuple[Any, ...]
    """Tensors or arrays, each of so many tokens of the rank's buffer."""
    lengths: tuple[int, ...]
    """Tokens of each part."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that one token's entry may have: two where parts of one token can be read as [1, T, ...] and as [T, ...],
    in this order; none without parts."""

    @staticmethod
    def of(outputs: Any, lengths: Sequence[int], who: str) -> RankOutputs:
        """Outputs of microbatches, all in one or one by one.

        Args:
            outputs: [T, ...] or [1, T, ...] of the microbatches one after the other, or a list of such, one for each.
            lengths: tokens of each microbatch, pads included.
            who: what messages call the rank.

        Raises:
            TypeError: they are no arrays, or of several dtypes.
            ValueError: their number or shapes do not fit the microbatches.
        """
        if isinstance(outputs, (list, tuple)):
            if len(outputs) != len(lengths):
                raise ValueError(f"{who} has {len(outputs)} outputs, and {len(lengths)} microbatches")
            return RankOutputs.of_parts(outputs, lengths, who)
        return RankOutputs.of_parts([outputs], [sum(lengths)], who)

    @staticmethod
    def of_parts(parts: Sequence[Any], lengths: Sequence[int], who: str) -> RankOutputs:
        """One array for each run of tokens; errors as ``of`` has them."""
        for part in parts:
            if not hasattr(part, "shape") or not hasattr(part, "dtype"):
                raise TypeError(f"{who}: outputs must be tensors, or a list of one per microbatch, got {type(part)}")
            if part.dtype != parts[0].dtype:
                raise TypeError(f"{who}: outputs have the dtypes {parts[0].dtype} and {part.dtype}")
        readings: list[tuple[int, ...]] = []
        for ones in ((1,), ()):
            cut = len(ones) + 1
            if all(tuple(part.shape[:cut]) == (*ones, n) for part, n in zip(parts, lengths, strict=True)):
                entries = {tuple(part.shape[cut:]) for part in parts}
                if len(entries) == 1:
                    readings.append(entries.pop())
        if parts and not readings:
            shapes = [list(part.shape) for part in parts[:8]]
            raise ValueError(
                f"{who} has outputs of shapes {shapes}, the plan gives it {list(lengths)[:8]} tokens; outputs are "
                "[T, ...] or [1, T, ...], pads included, with the same further dimensions everywhere"
            )
        return RankOutputs(tuple(parts), tuple(lengths), tuple(readings))

    def flat(self, shape: tuple[int, ...]) -> list[Any]:
        """The parts as [T, *shape]."""
        return [part.reshape((n, *shape)) for part, n in zip(self.parts, self.lengths, strict=True)]


def common_shapes(shapes: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    """The shapes that all outputs may be read with; those without any parts go along."""
    given = [some for some in shapes if some]
    return tuple(shape for shape in given[0] if all(shape in some for some in given)) if given else ()


def whole_spans(begins: Int64Array, lengths: Int64Array) -> Int64Array:
    """The places of spans one after the other: ``begins[0]``, ``begins[0] + 1``, ..., int64 [sum of lengths]."""
    firsts = np.cumsum(lengths) - lengths
    places: Int64Array = np.arange(int(lengths.sum())) + np.repeat(begins - firsts, lengths)
    return places


def scatter_back(plan: Plan, outputs: Sequence[Any]) -> list[Any]:
    """See ``Plan.scatter_back``."""
    ranks = plan.layout.num_ranks
    if len(outputs) != ranks:
        raise ValueError(f"{len(outputs)} outputs for {ranks} ranks; give the outputs of every rank")
    given = [
        RankOutputs.of(of_rank, plan.op_tokens_per_rank[plan.rank_ops(rank)].tolist(), f"rank {rank}")
        for rank, of_rank in enumerate(outputs)
    ]
    first_rank = next((rank for rank in range(ranks) if given[rank].parts), -1)
    if first_rank < 0:
        raise ValueError("the plan has no microbatch, and so no outputs")
    first = given[first_rank].parts[0]
    shapes = given[first_rank].shapes
    for rank, of_rank in enumerate(given):
        shapes = common_shapes([shapes, of_rank.shapes])
        if of_rank.parts and (not shapes or of_rank.parts[0].dtype != first.dtype):
            part = of_rank.parts[0]
            raise ValueError(
                f"outputs of rank {rank} are {part.dtype} {list(part.shape)}, those of rank {first_rank} "
                f"{first.dtype} {list(first.shape)}: dtype and further dimensions must be the same"
            )
    ends = np.cumsum(plan.seqlens)
    whole = (int(plan.seqlens.sum()), *shapes[0])
    is_tensor = hasattr(first, "new_zeros")
    joined = first.new_zeros(whole) if is_tensor else np.zeros(whole, dtype=first.dtype)
    for rank, of_rank in enumerate(given):
        table = build_pack_table(plan, rank)
        real = np.flatnonzero(table.lengths > 0)
        begin = 0
        for part in of_rank.flat(shapes[0]):
            rows = real[slice(*np.searchsorted(table.destinations[real], [begin, begin + len(part)]))]
            ids, lengths = table.sample_ids[rows], table.lengths[rows]
            values = part[whole_spans(table.destinations[rows] - begin, lengths)]
            places = whole_spans(ends[ids] - plan.seqlens[ids] + table.starts[rows], lengths)
            joined[places] = values.to(joined.device) if is_tensor else values
            begin += len(part)
    return [joined[end - n : end] for end, n in zip(ends.tolist(), plan.seqlens.tolist(), strict=True)]
