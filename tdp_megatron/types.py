"""What flows between the stages: ``ParallelLayout``, ``Sample``, ``SampleBlock``, ``PackedBatch``, ``Step``.

Nothing here imports torch when it runs: the scheduler, which is pure, imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tdp_megatron.sample import (
    UNKNOWN_LOSS_TOKENS,
    Int64Array,
    RawTokenReader,
    Sample,
    SampleBlock,
    SampleReader,
    SampleRef,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.nn.attention.flex_attention import BlockMask

    from tdp_megatron.schedule.plan import Plan

__all__ = [
    "UNKNOWN_LOSS_TOKENS",
    "Int64Array",
    "PackedBatch",
    "ParallelLayout",
    "RawTokenReader",
    "Sample",
    "SampleBlock",
    "SampleReader",
    "SampleRef",
    "Step",
]

Lengths: TypeAlias = Literal["padded", "real"]

#: Label of a position that has no target; torch's cross entropy ignores it by default.
IGNORE_LABEL = -100


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How ranks share one global batch. A rank here is one TP x PP column; rank = dp_rank * cp + cp_rank."""

    dp: int
    """Data-parallel size."""
    cp: int = 1
    """Context-parallel size: how many neighbouring ranks share one sequence by default."""
    max_seqlen_per_dp_cp_rank: int = 8192
    """Most tokens, padding included, that one rank holds in one microbatch."""
    cp_sizes: tuple[int, ...] = field(default=(), kw_only=True)
    """CP sizes a scheduler may choose from; empty means only ``cp`` (static CP)."""
    sp: int = field(default=1, kw_only=True)
    """Sequence-parallel (tensor-parallel) size: each rank's tokens are divided by it."""
    fp8_multiple: int = field(default=1, kw_only=True)
    """Tokens per rank must be a multiple of this (16 or 32 for FP8 recipes)."""
    tail_multiple: int = field(default=0, kw_only=True)
    """Tokens per rank and microbatch are padded to a multiple of this; 0 means lcm(16 * sp, fp8_multiple)."""

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "max_seqlen_per_dp_cp_rank", "sp", "fp8_multiple", "tail_multiple"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
            least = 0 if name == "tail_multiple" else 1
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
            object.__setattr__(self, name, int(value))
        if self.tail_multiple == 0:
            object.__setattr__(self, "tail_multiple", math.lcm(16 * self.sp, self.fp8_multiple))
        given: Any = self.cp_sizes
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"cp_sizes must be a sequence of ints, got {given!r}")
        given = tuple(given)
        for k in given:
            if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
                raise TypeError(f"cp_sizes must hold ints, got {k!r} of type {type(k).__name__}")
        sizes = tuple(sorted({int(k) for k in given})) or (self.cp,)
        for k in sizes:
            if k < 1 or self.num_ranks % k:
                raise ValueError(
                    f"cp_sizes: {k} does not divide the {self.num_ranks} ranks (dp {self.dp} x cp {self.cp})"
                )
            if len(sizes) > 1 and k & (k - 1):
                raise ValueError(f"cp_sizes: {k} is not a power of two; dynamic CP needs aligned, nested blocks")
        object.__setattr__(self, "cp_sizes", sizes)
        if sizes[-1] > 1 and self.tail_multiple % 2 and self.tail_multiple > 1:
            raise ValueError(
                f"tail_multiple {self.tail_multiple} is odd: with CP every pack is cut into two chunks per rank; "
                "use an even one"
            )
        if self.tokens_per_rank_limit == 0:
            raise ValueError(
                f"max_seqlen_per_dp_cp_rank {self.max_seqlen_per_dp_cp_rank} is below the tail multiple "
                f"{self.tail_multiple} (lcm of 16 * sp and fp8_multiple unless tail_multiple says otherwise)"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that share the global batch: dp * cp."""
        return self.dp * self.cp

    @property
    def tokens_per_rank_limit(self) -> int:
        """The cap in whole tail multiples: what a microbatch may really hold per rank."""
        return self.max_seqlen_per_dp_cp_rank // self.tail_multiple * self.tail_multiple

    @staticmethod
    def pad_multiple(cp_size: int) -> int:
        """A sequence on ``cp_size`` ranks is padded to a multiple of this: 2 * cp_size, or 1 without CP."""
        return 2 * cp_size if cp_size > 1 else 1

    def padded_seqlen(self, seqlen: int, cp_size: int) -> int:
        """``seqlen`` rounded up to the pad multiple of ``cp_size``, tokens."""
        multiple = self.pad_multiple(cp_size)
        return -(-seqlen // multiple) * multiple

    def tokens_per_rank(self, padded_total: int, cp_size: int) -> int:
        """Tokens each of ``cp_size`` ranks holds of sequences of ``padded_total`` tokens, tail included.

        With CP the result is even: the tail, too, is cut into two chunks per rank.
        """
        multiple = math.lcm(self.tail_multiple, 2) if cp_size > 1 else self.tail_multiple
        per_rank = -(-padded_total // cp_size)
        return max(-(-per_rank // multiple), 1) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One THD microbatch of one rank. T is the tokens this rank holds, T * local_cp_size those of the pack."""

    tokens: torch.Tensor
    """int64 [T]; pads hold the pad id."""
    labels: torch.Tensor
    """int64 [T]; -100 where there is no target."""
    loss_mask: torch.Tensor
    """float32 [T]; 0 at pads and where there is no target."""
    position_ids: torch.Tensor
    """int64 [T]; restart at each sequence and run on through its padding."""
    padding_mask: torch.Tensor
    """bool [T]; True at pads."""
    document_id: torch.Tensor
    """int32 [T]; number of the sequence in the pack, the tail pad being one of its own."""
    cu_seqlens: torch.Tensor
    """int32 [n + 1], cumulative real lengths over the whole CP group's pack."""
    cu_seqlens_padded: torch.Tensor
    """int32 [n + 1], with the holes; the same object as ``cu_seqlens`` when there are none between sequences."""
    max_seqlen: int
    """Longest padded sequence, tokens."""
    local_cp_size: int
    """Ranks that share this pack."""
    cp_rank: int
    """This rank's place among them."""
    first_rank: int
    """First rank of the block that shares this pack."""
    sample_ids: tuple[int, ...]
    """Numbers of the packed samples in the global batch, in pack order; empty for a dummy pack."""
    refs: tuple[SampleRef, ...]
    """(dataset_id, sample_id) of the packed samples, in pack order."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """User keys: per token, a tensor [T, ...]; per sample, a tuple in pack order."""
    cp_group: dist.ProcessGroup | None = None
    """Process group of the ranks that share this pack; None when there is one rank or no torch.distributed."""

    @property
    def num_tokens(self) -> int:
        """Tokens this rank holds, padding included."""
        return int(self.tokens.numel())

    @property
    def is_dummy(self) -> bool:
        """Whether this pack only keeps the ranks in step and carries no sample."""
        return not self.sample_ids

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on ``device``; the cu_seqlens identity rule is kept."""
        import torch

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple):
                return tuple(move(v) for v in value)
            return value

        moved = {
            name: move(getattr(self, name))
            for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "document_id", "cu_seqlens")
        }
        same = self.cu_seqlens_padded is self.cu_seqlens
        moved["cu_seqlens_padded"] = moved["cu_seqlens"] if same else move(self.cu_seqlens_padded)
        moved["extras"] = {key: move(value) for key, value in self.extras.items()}
        return replace(self, **moved)

    def to_megatron(self, *, lengths: Lengths = "padded") -> Any:
        """``PackedSeqParams``, see ``ops.views.megatron_params``."""
        from tdp_megatron.ops.views import megatron_params  # when called: ops needs torch, and this module

        return megatron_params(self, lengths=lengths)

    def to_flash_attn(self) -> dict[str, Any]:
        """Arguments of ``flash_attn_varlen_func``, see ``ops.views.flash_attn_args``."""
        from tdp_megatron.ops.views import flash_attn_args

        return flash_attn_args(self)

    def to_varlen_attn(self) -> dict[str, Any]:
        """Arguments of ``torch.nn.attention.varlen.varlen_attn``, see ``ops.views.varlen_attn_args``."""
        from tdp_megatron.ops.views import varlen_attn_args

        return varlen_attn_args(self)

    def to_flex_attention(self, *, block_size: int = 128) -> BlockMask:
        """FlexAttention's block mask, see ``ops.block_mask.flex_block_mask``."""
        from tdp_megatron.ops.block_mask import flex_block_mask

        return flex_block_mask(self, block_size=block_size)

    def to_nested(self, values: torch.Tensor | None = None, *, lengths: Lengths = "padded") -> torch.Tensor:
        """A jagged nested tensor over per-token values, see ``ops.views.nested``."""
        from tdp_megatron.ops.views import nested

        return nested(self, values, lengths=lengths)

    def to_hf(self) -> dict[str, Any]:
        """Arguments of a Hugging Face model's ``forward``, see ``ops.views.hf_args``."""
        from tdp_megatron.ops.views import hf_args

        return hf_args(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One global batch as one rank sees it: its microbatches, and the facts all ranks share."""

    index: int
    """Number of the global batch since the start of the data, from 0."""
    rank: int
    """The DP x CP rank this is for."""
    batches: tuple[PackedBatch, ...]
    """This rank's microbatches in execution order."""
    plan: Plan
    """Who runs what, the same on every rank."""
    num_samples_global: int
    """Samples in the global batch."""
    num_loss_tokens_global: int
    """Positions with a loss in the global batch: the denominator of the loss."""
    seqlen_sum: int
    """Sum of real lengths over the global batch, tokens."""
    seqlen_squared_sum: int
    """Sum of squared real lengths over the global batch."""
    source_counts: Mapping[int, int]
    """Samples drawn from each dataset_id in this global batch."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank."""
        return len(self.batches)

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
