"""Megatron's packing scheduler classes, by its names and with its return values, on our algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.api import schedule
from tdp_megatron.schedule.hybrid_cp import falling, first_ranks, hybrid_blocks, ranks_needed
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import ParallelLayout

__all__ = ["BalancedCPScheduler", "BasePackingScheduler", "DefaultDynamicCPScheduler", "DpBalancedScheduler"]

#: What every sample needs on the wire.
_SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")


class BasePackingScheduler(ABC):
    """Groups samples of one global batch into microbatches of every rank.

    Megatron's ``run`` also moves the samples; here ``tdp_megatron.distributed`` does, and no scheduler has collectives.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        """Keep the layout.

        Args:
            max_seqlen_per_dp_cp_rank: most tokens of one rank and microbatch.
            cp_size: context-parallel size.
            dp_size: data-parallel size.
            microbatch_group_size_per_vp_stage: the number of microbatches is a multiple of this.
            max_num_seqs: most sequences of one microbatch; None means no limit.
        """
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs
        for name in ("microbatch_group_size_per_vp_stage", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be None or at least 1, got {value}")

    def get_required_sample_keys(self) -> list[str]:
        """Keys that a sample must have."""
        return list(_SAMPLE_KEYS)

    def check_require_sample_keys(self, batch: Sequence[Mapping[str, Any]]) -> bool:
        """Whether every sample of ``batch`` has the required keys."""
        return all(key in sample for sample in batch for key in _SAMPLE_KEYS)

    @abstractmethod
    def plan(self, seqlens: Sequence[int]) -> Plan:
        """The plan for padded lengths ``seqlens``, tokens."""

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Sample ids by microbatch and DP x CP rank.

        Args:
            sample_id_seqlens: (sample id, padded length in tokens) in order of arrival.

        Returns:
            For each microbatch and each of the ``dp * cp`` ranks, the ids that it works on; the ranks of one CP group
            have the same.
        """
        plan = self.plan([seqlen for _, seqlen in sample_id_seqlens])
        names = np.array([sample_id for sample_id, _ in sample_id_seqlens], dtype=np.int64)
        ops = plan.ops
        groups: list[list[list[int]]] = [
            [[] for _ in range(plan.layout.num_ranks)] for _ in range(int(plan.num_microbatches_per_rank.max()))
        ]
        for rank in range(plan.layout.num_ranks):
            for microbatch, op in enumerate(plan.rank_ops(rank).tolist()):
                groups[microbatch][rank] = names[list(ops[op].sample_ids)].tolist()
        return groups

    def _layout(self, cp_sizes: tuple[int, ...] = ()) -> ParallelLayout:
        return ParallelLayout(
            self.dp_size, self.cp_size, self.max_seqlen_per_dp_cp_rank, cp_sizes=cp_sizes, tail_multiple=1
        )


class DpBalancedScheduler(BasePackingScheduler):
    """``dp_balanced``: next-fit in arrival order, the number of packs a multiple of DP."""

    is_dynamic_cp = False

    @property
    def max_seq_len_all_ranks(self) -> int:
        """Most tokens of one microbatch on all ranks of its CP group."""
        return self.max_seqlen_per_dp_cp_rank * self.cp_size

    def plan(self, seqlens: Sequence[int]) -> Plan:
        """The plan for padded lengths ``seqlens``, tokens."""
        return schedule(
            seqlens,
            self._layout(),
            algorithm="dp_balanced",
            microbatches_multiple=self.microbatch_group_size_per_vp_stage or 1,
            max_sequences_per_microbatch=self.max_num_seqs or 0,
        )


class DefaultDynamicCPScheduler(DpBalancedScheduler):
    """``default_dynamic_cp``: tallest first, CP size by sequence."""

    is_dynamic_cp = True

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        max_num_seqs: int | None = None,
        *,
        min_cp_size: int = 1,
    ) -> None:
        """Keep the layout.

        Args:
            max_seqlen_per_dp_cp_rank: most tokens of one rank and microbatch.
            cp_size: context-parallel size, which with ``dp_size`` gives the number of ranks.
            dp_size: data-parallel size.
            microbatch_group_size_per_vp_stage: the number of microbatches is a multiple of this.
            max_num_seqs: most sequences of one microbatch; None means no limit.
            min_cp_size: no sequence runs on fewer ranks.
        """
        super().__init__(max_seqlen_per_dp_cp_rank, cp_size, dp_size, microbatch_group_size_per_vp_stage, max_num_seqs)
        self.max_seq_len_per_rank = max_seqlen_per_dp_cp_rank
        self.total_hdp_gpus = dp_size * cp_size
        self.min_cp_size = min_cp_size
        if not self._cp_sizes():
            raise ValueError(
                f"min_cp_size is {min_cp_size}, and no power of two of at least that divides the "
                f"{self.total_hdp_gpus} ranks"
            )

    def _cp_sizes(self) -> tuple[int, ...]:
        ranks = self.total_hdp_gpus
        powers = (1 << shift for shift in range(ranks.bit_length()))
        return tuple(size for size in powers if ranks % size == 0 and size >= self.min_cp_size)

    def plan(self, seqlens: Sequence[int]) -> Plan:
        """The plan for padded lengths ``seqlens``, tokens."""
        return schedule(
            seqlens,
            self._layout(self._cp_sizes()),
            algorithm="default_dynamic_cp",
            equal_count=True,
            microbatches_multiple=self.microbatch_group_size_per_vp_stage or 1,
            max_sequences_per_microbatch=self.max_num_seqs or 0,
        )


class _Sized(Protocol):
    def size(self) -> int: ...


class BalancedCPScheduler:
    """Hybrid CP: each sample on as many ranks as its length needs, in groups with a barrier after each.

    ``schedule(..., algorithm="balanced_hybrid_cp")`` makes the same groups, padded and checked against a layout.
    """

    def __init__(self, max_seq_len_per_rank: int, dp_cp_group: _Sized | int, *, strict: bool = False) -> None:
        """Keep the layout.

        Args:
            max_seq_len_per_rank: most tokens of one sample on one rank.
            dp_cp_group: the DP x CP process group, of which only ``size()`` is used, or its size.
            strict: raise where Megatron runs a sample on ranks that are no process group; otherwise the blocks of
                such a group are put in falling order of size, which aligns them.
        """
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.total_hdp_gpus = int(dp_cp_group) if isinstance(dp_cp_group, (int, np.integer)) else dp_cp_group.size()
        for name in ("max_seq_len_per_rank", "total_hdp_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.strict = strict

    def gpus_needed(self, seq_len: int) -> int:
        """The smallest power of two of ranks that hold ``seq_len`` tokens."""
        return ranks_needed(seq_len, self.max_seq_len_per_rank)

    def get_total_workload(self, seq_length: int, cp_size: int | None = None) -> float:
        """Work of a sample of ``seq_length`` tokens on each of ``cp_size`` ranks, by default as many as it needs."""
        return seq_length * seq_length / (self.gpus_needed(seq_length) if cp_size is None else cp_size)

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: object = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Lengths, and sample ids, by group and rank, in the order in which each rank runs them.

        Args:
            sample_id_seqlens: (sample id, length in tokens) in order of arrival.
            config: not used, as in Megatron.

        Raises:
            ScheduleError: a sample needs more ranks than there are, or has no token; the number of ranks is no power
                of two and some would have nothing to do; or as ``strict`` says.
        """
        names = [sample_id for sample_id, _ in sample_id_seqlens]
        # Fixed-width integers would overflow when squared.
        seqlens = [int(seqlen) for _, seqlen in sample_id_seqlens]
        groups: list[list[list[int]]] = []
        sample_id_groups: list[list[list[int]]] = []
        for number, blocks in enumerate(hybrid_blocks(seqlens, self.max_seq_len_per_rank, self.total_hdp_gpus)):
            odd = next(((first, block) for first, block in first_ranks(blocks) if first % block.cp_size), None)
            if odd is not None and self.strict:
                first, block = odd
                raise ScheduleError(
                    f"group {number} puts sample {names[block.sample_ids[0]]} on ranks {first} to "
                    f"{first + block.cp_size - 1}, which are no process group (they start at a multiple of "
                    f"{block.cp_size}); strict=False moves the blocks"
                )
            placed = blocks if odd is None else falling(blocks)
            ids_of_rank = [block.sample_ids for block in placed for _ in range(block.cp_size)]
            groups.append([[seqlens[i] for i in ids] for ids in ids_of_rank])
            sample_id_groups.append([[names[i] for i in ids] for ids in ids_of_rank])
        return groups, sample_id_groups
