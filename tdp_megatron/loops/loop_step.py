"""What a packing session hands out: one global batch on this rank."""

from __future__ import annotations

import dataclasses

from tdp_megatron.schedule import Plan
from tdp_megatron.types import Int64Array, PackedBatch

__all__ = ["LoopStep"]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStep:
    """One global batch on this rank."""

    batches: tuple[PackedBatch, ...]
    """Packed microbatches in execution order; without tokens on a middle pipeline stage."""
    has_tokens: bool
    """Whether this pipeline stage got tokens and labels."""
    seqlen_sum: int
    """Sum of real lengths over the global batch, tokens."""
    seqlen_squared_sum: int
    """Sum of their squares."""
    number: int
    """Number of the step."""
    plan: Plan
    """Who runs what, the same on every rank."""
    refs: Int64Array
    """int64 [N, 2], (dp_rank that read the sample, its number there) of each sample of the plan."""
    consumed_samples: int
    """Number of the item behind the step."""
    data_at: int
    """Number of the item at which the data iterators stand in the state for there."""
