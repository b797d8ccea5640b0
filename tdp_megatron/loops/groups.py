"""This process's place in TP x PP x DP x CP, and the host groups the adapters talk over."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.distributed import DpCpGroups, HostGroup
from tdp_megatron.distributed.collectives import all_gather_rows
from tdp_megatron.types import ParallelLayout

if TYPE_CHECKING:
    from tdp_megatron.loops.scatter_back import ReturnGroups
    from tdp_megatron.loops.session import PackingSession

__all__ = ["LoopGroups", "known_groups", "membership"]


class LoopGroups:
    """Who reads, who receives. TP rank 0 of the first and the last pipeline stage read; the others receive.

    All processes of the job make it at the same time, because process groups are made.

    Args:
        tp_ranks: torch.distributed ranks of this process's tensor-parallel group, in order.
        pp_ranks: of its pipeline-parallel group, first stage first.
        dp_cp_ranks: of its DP x CP group, CP neighbours side by side.
        layout: DP and CP sizes, and the cap.
        timeout_s: deadline of each collective, seconds.
        cp_group: the loop's own CP group, reused for packs of that size.
    """

    def __init__(
        self,
        tp_ranks: list[int],
        pp_ranks: list[int],
        dp_cp_ranks: list[int],
        layout: ParallelLayout,
        *,
        timeout_s: float,
        cp_group: dist.ProcessGroup | None = None,
    ) -> None:
        me = dist.get_rank()
        self.tp_rank, self.tp_size = tp_ranks.index(me), len(tp_ranks)
        self.pp_rank, self.pp_size = pp_ranks.index(me), len(pp_ranks)
        self.layout = layout
        self.dp_cp = DpCpGroups.create(layout, global_ranks=dp_cp_ranks, timeout_s=timeout_s)
        self.tp = HostGroup(tp_ranks, timeout_s) if self.tp_size > 1 else None
        self.pp = HostGroup(pp_ranks, timeout_s) if self.pp_size > 1 else None
        self._cp_group = cp_group
        self.sessions: list[PackingSession] = []
        """Sessions that use these groups, numbered alike on all ranks; one at a time works, in the same order."""
        self.returns: ReturnGroups | None = None
        """Groups for outputs, made when some are first sent back."""

    @property
    def rank(self) -> int:
        """DP x CP rank."""
        return self.dp_cp.rank

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""
        return self.rank // self.layout.cp

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank."""
        return self.rank % self.layout.cp

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reads(self) -> bool:
        """Whether this process reads its data iterator."""
        return self.tp_rank == 0 and (self.is_first_stage or self.is_last_stage)

    def cp_group(self, first_rank: int, cp_size: int) -> dist.ProcessGroup | None:
        """Group of the ranks that share a pack; None for a single rank."""
        if self._cp_group is not None and cp_size == self.layout.cp > 1:
            return self._cp_group
        return self.dp_cp.cp_group(first_rank, cp_size)

    @classmethod
    def of(
        cls, pg_collection: Any, *, max_seqlen_per_dp_cp_rank: int, sequence_parallel: bool, timeout_s: float
    ) -> LoopGroups:
        """From what a loop has: Megatron's process group collection, a ``DeviceMesh``, or nothing.

        Args:
            pg_collection: an object with process groups ``dp_cp`` and, where they exist, ``tp``, ``pp``, ``dp``,
                ``cp``; a mesh with axes of these names (``dp`` and, where they exist, the others); None for
                Megatron's own groups where they are set up, else for data parallelism over all processes.
            max_seqlen_per_dp_cp_rank: the cap, tokens.
            sequence_parallel: whether a pack's tokens must divide by the TP size.
            timeout_s: deadline of each collective, seconds.

        Raises:
            ValueError: the groups do not fit together.
        """
        cp_group: dist.ProcessGroup | None = None
        pg_collection = known_groups(pg_collection)
        if isinstance(pg_collection, DeviceMesh):
            tp_ranks, pp_ranks, dp_cp_ranks, cp_size = _from_mesh(pg_collection)
        else:
            tp_ranks = _ranks(pg_collection, "tp")
            pp_ranks = _ranks(pg_collection, "pp")
            cp_group = getattr(pg_collection, "cp", None)
            cp_size = len(_ranks(pg_collection, "cp"))
            members = list(range(dist.get_world_size())) if pg_collection is None else _ranks(pg_collection, "dp_cp")
            dp_cp_ranks = _ordered(members, _ranks(pg_collection, "cp"), timeout_s)
        if len(dp_cp_ranks) % cp_size:
            raise ValueError(f"{len(dp_cp_ranks)} DP x CP ranks are not a multiple of the {cp_size} CP ranks")
        layout = ParallelLayout(
            dp=len(dp_cp_ranks) // cp_size,
            cp=cp_size,
            max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank,
            tail_multiple=len(tp_ranks) if sequence_parallel else 1,
        )
        return cls(tp_ranks, pp_ranks, dp_cp_ranks, layout, timeout_s=timeout_s, cp_group=cp_group)


def known_groups(pg_collection: Any) -> Any:
    """The collection itself; Megatron's own groups where there is none and Megatron has set them up."""
    if pg_collection is not None:
        return pg_collection
    # Whoever has set them up has imported Megatron already.
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return SimpleNamespace(
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
    )


def membership(pg_collection: Any) -> Any:
    """What tells collections apart: who belongs to their groups. Some loops make a new object at every step."""
    pg_collection = known_groups(pg_collection)
    if pg_collection is None:
        return None
    if isinstance(pg_collection, DeviceMesh):
        mesh = pg_collection.mesh
        return pg_collection.mesh_dim_names, tuple(mesh.shape), tuple(mesh.flatten().tolist())
    return tuple(tuple(_ranks(pg_collection, name)) for name in ("tp", "pp", "cp", "dp_cp"))


def _ranks(pg_collection: Any, name: str) -> list[int]:
    """Ranks of a group of the collection; this process alone where there is none."""
    group = getattr(pg_collection, name, None)
    if group is None:
        if name == "dp_cp" and pg_collection is not None:
            raise ValueError("pg_collection has no group dp_cp (data parallel with context parallel)")
        return [dist.get_rank()]
    return list(dist.get_process_group_ranks(group))


def _ordered(members: list[int], cp_ranks: list[int], timeout_s: float) -> list[int]:
    """DP x CP ranks with CP neighbours side by side, whatever order the loop's groups have."""
    if len(cp_ranks) == 1:
        return members
    place = cp_ranks.index(dist.get_rank())
    host = HostGroup(members, timeout_s)
    # Each member says which CP group it is in, by the group's first rank, and its place there.
    rows = all_gather_rows(host, np.array([cp_ranks[0], place, dist.get_rank()]), "learning the order of the ranks")
    position = {rank: i for i, rank in enumerate(members)}
    keys = [(position.get(int(first), -1), int(where)) for first, where, _ in rows]
    order = sorted(range(len(rows)), key=lambda i: keys[i])
    return [int(rows[i, 2]) for i in order]


def _from_mesh(mesh: DeviceMesh) -> tuple[list[int], list[int], list[int], int]:
    names = mesh.mesh_dim_names or ()
    if "dp" not in names or not set(names) <= {"tp", "pp", "dp", "cp"}:
        raise ValueError(f"the mesh has the axes {names}; it needs 'dp' and may have 'tp', 'pp', 'cp'")
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh")

    def plane(*axes: str) -> torch.Tensor:
        return mesh.mesh[tuple(slice(None) if name in axes else here[i] for i, name in enumerate(names))]

    def line(axis: str) -> list[int]:
        return [int(r) for r in plane(axis).reshape(-1)] if axis in names else [dist.get_rank()]

    square = plane("dp", "cp")
    if "cp" in names and names.index("cp") < names.index("dp"):
        square = square.T
    return line("tp"), line("pp"), [int(r) for r in square.reshape(-1)], len(line("cp"))
