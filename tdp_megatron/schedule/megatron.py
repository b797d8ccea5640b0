"""Megatron's packing scheduler classes, by its names and with its return values, on our algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdp_megatron.schedule.api import schedule
from tdp_megatron.schedule.hybrid_cp import hybrid_groups
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import ParallelLayout

__all__ = ["BalancedCPScheduler", "BasePackingScheduler", "DefaultDynamicCPScheduler", "DpBalancedScheduler"]

#: What every sample needs on the wire.
_SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")


class BasePackingScheduler(ABC):
    """Groups samples of one global batch into microbatches of every rank."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
    ) -> None:
        """Keep the layout.

        Args:
            max_seqlen_per_dp_cp_rank: most tokens of one rank and microbatch.
            cp_size: context-parallel size.
            dp_size: data-parallel size.
            microbatch_group_size_per_vp_stage: the number of microbatches is a multiple of this.
        """
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage

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

    def plan(self, seqlens: Sequence[int]) -> Plan:
        """The plan for padded lengths ``seqlens``, tokens."""
        return schedule(
            seqlens,
            self._layout(),
            algorithm="dp_balanced",
            microbatches_multiple=self.microbatch_group_size_per_vp_stage or 1,
        )


class DefaultDynamicCPScheduler(BasePackingScheduler):
    """``default_dynamic_cp``: tallest first, CP size by sequence."""

    def plan(self, seqlens: Sequence[int]) -> Plan:
        """The plan for padded lengths ``seqlens``, tokens."""
        num_ranks = self.dp_size * self.cp_size
        sizes = tuple(1 << shift for shift in range(num_ranks.bit_length()) if num_ranks % (1 << shift) == 0)
        return schedule(
            seqlens,
            self._layout(sizes),
            algorithm="default_dynamic_cp",
            equal_count=True,
            microbatches_multiple=self.microbatch_group_size_per_vp_stage or 1,
        )


class BalancedCPScheduler:
    """Hybrid CP: each sample on as many ranks as its length needs, in groups with a barrier after each."""

    def __init__(self, max_seqlen_per_rank: int, num_ranks: int) -> None:
        """Keep the layout.

        Args:
            max_seqlen_per_rank: most tokens of one sample on one rank.
            num_ranks: DP x CP ranks.
        """
        for name, value in (("max_seqlen_per_rank", max_seqlen_per_rank), ("num_ranks", num_ranks)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_seqlen_per_rank = max_seqlen_per_rank
        self.num_ranks = num_ranks

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Lengths, and sample ids, by group and rank, in the order in which each rank runs them.

        They equal Megatron's also where no process group has the ranks of a sample; ``balanced_hybrid_cp`` gives a
        plan that can be run.

        Args:
            sample_id_seqlens: (sample id, length in tokens) in order of arrival.
        """
        seqlens = [seqlen for _, seqlen in sample_id_seqlens]
        groups = hybrid_groups(seqlens, self.max_seqlen_per_rank, self.num_ranks)
        return (
            [[[seqlens[i] for i in rank] for rank in group] for group in groups],
            [[[sample_id_seqlens[i][0] for i in rank] for rank in group] for group in groups],
        )
