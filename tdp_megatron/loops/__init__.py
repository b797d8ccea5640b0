"""Adapters for training loops that exist already, under Megatron's names."""

from __future__ import annotations

from tdp_megatron.distributed.broadcast import broadcast_scalars, broadcast_tensor
from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.loops.hybrid_cp import HybridCPDataLoaderWrapper
from tdp_megatron.loops.session import PackingSession
from tdp_megatron.loops.wrap import (
    PackedIterator,
    get_batch_on_this_rank_for_sequence_packing,
    packing_session,
    wrap_data_iterator,
)

__all__ = [
    "HybridCPDataLoaderWrapper",
    "LoopConfig",
    "LoopGroups",
    "PackedIterator",
    "PackingSession",
    "broadcast_scalars",
    "broadcast_tensor",
    "get_batch_on_this_rank_for_sequence_packing",
    "packing_session",
    "wrap_data_iterator",
]
