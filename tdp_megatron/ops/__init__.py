"""From a plan and tokens to THD microbatches: pack tables, cu_seqlens, the CP partition."""

from __future__ import annotations

from tdp_megatron.ops.pack import PackBuffers, allocate_pack, packed_batches
from tdp_megatron.ops.pack_table import PackTable, build_pack_table
from tdp_megatron.ops.partition import cp_partition_indices

__all__ = [
    "PackBuffers",
    "PackTable",
    "allocate_pack",
    "build_pack_table",
    "cp_partition_indices",
    "packed_batches",
]
