"""Process groups of a DP x CP layout: one for the data runtime itself, one per block of ranks that share a pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.ordered_group import new_ordered_group
from tdp_megatron.types import ParallelLayout

__all__ = ["DpCpGroups"]


class DpCpGroups:
    """This process's place in the layout and the groups it belongs to. Build with ``create``."""

    def __init__(
        self, layout: ParallelLayout, data: HostGroup, cp_groups: dict[tuple[int, int], dist.ProcessGroup]
    ) -> None:
        self.layout = layout
        self.data = data
        """gloo group of all DP x CP ranks, in their order, used by the data runtime alone."""
        self._cp_groups = cp_groups

    @property
    def rank(self) -> int:
        """DP x CP rank of this process."""
        return self.data.rank

    @classmethod
    def create(
        cls, layout: ParallelLayout, *, global_ranks: Sequence[int] | None = None, timeout_s: float = 600.0
    ) -> DpCpGroups:
        """Make the groups; all ``global_ranks`` must call it with the same arguments.

        Args:
            layout: DP and CP sizes, allowed CP sizes.
            global_ranks: torch.distributed ranks in DP x CP order (CP neighbours side by side), in any numbering;
                None for 0..R-1.
            timeout_s: deadline of the data runtime's collectives, seconds.

        Raises:
            ValueError: the ranks do not fit the layout.
            RuntimeError: torch.distributed is not initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError("call torch.distributed.init_process_group before DpCpGroups.create")
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
        data = HostGroup(ranks, timeout_s)
        cp_groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for cp_size in layout.cp_sizes:
            if cp_size == 1:
                continue
            first = data.rank // cp_size * cp_size
            cp_groups[first, cp_size] = new_ordered_group(ranks[first : first + cp_size])
        return cls(layout, data, cp_groups)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, layout: ParallelLayout, *, dp: str = "dp", cp: str = "cp", timeout_s: float = 600.0
    ) -> DpCpGroups:
        """Make the groups from a ``DeviceMesh`` with named axes, whatever the order of its ranks.

        Args:
            mesh: has the axes ``dp`` and ``cp``; others (TP, PP) may be there.
            layout: its dp and cp must be the mesh's.
            dp: name of the data-parallel axis.
            cp: name of the context-parallel axis; it may be missing from the mesh when layout.cp is 1.
            timeout_s: deadline of the data runtime's collectives, seconds.

        Raises:
            ValueError: the mesh lacks an axis, or its sizes are not the layout's.
        """
        names = mesh.mesh_dim_names or ()
        axes = [dp, cp] if cp in names else [dp]
        if dp not in names or (layout.cp > 1 and cp not in names):
            wanted = f"{dp!r} and {cp!r}" if layout.cp > 1 else repr(dp)
            raise ValueError(f"the mesh has the axes {names}; it needs {wanted}")
        here = mesh.get_coordinate()
        if here is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
        # This process's plane of the mesh, with DP first whatever the order of the axes (a slice keeps the mesh's).
        plane = tuple(slice(None) if name in axes else here[i] for i, name in enumerate(names))
        ranks = mesh.mesh[plane]
        if len(axes) == 2 and names.index(cp) < names.index(dp):
            ranks = ranks.T
        ranks = ranks.reshape(len(ranks), -1)
        if tuple(ranks.shape) != (layout.dp, layout.cp):
            raise ValueError(
                f"the mesh has dp x cp = {ranks.shape[0]} x {ranks.shape[1]}, the layout {layout.dp} x {layout.cp}"
            )
        return cls.create(layout, global_ranks=ranks.reshape(-1).tolist(), timeout_s=timeout_s)

    def close(self) -> None:
        """Tell the other ranks that this one ends of its own accord; needed before ``os._exit``, and harmless else."""
        self.data.close()

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
