"""Process groups of a DP x CP layout: one for the data runtime itself, one per block of ranks that share a pack."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tdp_megatron.types import ParallelLayout

__all__ = ["DpCpGroups"]


class DpCpGroups:
    """This process's place in the layout and the groups it belongs to. Build with ``create``."""

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        global_ranks: Sequence[int],
        data_group: dist.ProcessGroup,
        cp_groups: dict[tuple[int, int], dist.ProcessGroup],
        timeout_s: float,
    ) -> None:
        self.layout = layout
        self.rank = rank
        """DP x CP rank of this process."""
        self.global_ranks = tuple(global_ranks)
        """torch.distributed rank of every DP x CP rank."""
        self.data_group = data_group
        """gloo group of all DP x CP ranks, used by the data runtime alone, from one thread."""
        self.timeout_s = timeout_s
        """Deadline of each of the data runtime's collectives, seconds."""
        self._cp_groups = cp_groups

    @classmethod
    def create(
        cls, layout: ParallelLayout, *, global_ranks: Sequence[int] | None = None, timeout_s: float = 600.0
    ) -> DpCpGroups:
        """Make the groups; every process of the default group must call it with the same arguments.

        Args:
            layout: DP and CP sizes, allowed CP sizes.
            global_ranks: torch.distributed ranks in DP x CP order (CP neighbours side by side); None for 0..R-1.
            timeout_s: deadline of the data runtime's collectives, seconds.

        Raises:
            ValueError: the ranks do not fit the layout.
            RuntimeError: torch.distributed is not initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError("call torch.distributed.init_process_group before DpCpGroups.create")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        world = dist.get_world_size()
        ranks = tuple(range(world)) if global_ranks is None else tuple(int(r) for r in global_ranks)
        if len(ranks) != layout.num_ranks or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"{len(ranks)} ranks do not make dp {layout.dp} x cp {layout.cp} = {layout.num_ranks}; "
                f"start {layout.num_ranks} processes or change dp and cp"
            )
        me = dist.get_rank()
        if me not in ranks:
            raise ValueError(f"rank {me} is not among the DP x CP ranks {ranks}")
        # Token bytes are host data: gloo whatever the default backend is, and a group of its own so that a
        # background thread's collectives never mix with the training loop's.
        data_group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
        cp_groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for cp_size in layout.cp_sizes:
            if cp_size == 1:
                continue
            for first in range(0, layout.num_ranks, cp_size):
                members = list(ranks[first : first + cp_size])
                group = dist.new_group(members)
                if me in members:
                    cp_groups[first, cp_size] = group
        return cls(layout, ranks.index(me), ranks, data_group, cp_groups, timeout_s)

    def cp_group(self, first_rank: int, cp_size: int) -> dist.ProcessGroup | None:
        """Group of the block of ``cp_size`` ranks from ``first_rank``; None for a single rank."""
        if cp_size == 1:
            return None
        try:
            return self._cp_groups[first_rank, cp_size]
        except KeyError:
            raise ValueError(
                f"rank {self.rank} has no group of {cp_size} ranks from rank {first_rank}; "
                f"the layout allows the sizes {self.layout.cp_sizes}"
            ) from None
