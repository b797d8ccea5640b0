"""From a plan and tokens to THD microbatches: gather, pack tables, cu_seqlens, the CP partition, and views."""

from __future__ import annotations

from tdp_megatron.ops.batch_buffers import BatchBuffers, RowBuffers, row_specs
from tdp_megatron.ops.buffers import PackBuffers, PackedTensors, allocate_pack, packed_batches
from tdp_megatron.ops.gather import gather_pack, pack
from tdp_megatron.ops.metadata import LossSpans, PackMetadata
from tdp_megatron.ops.pads import DEFAULT_PADS, MEGATRON_PADS, PadRules
from tdp_megatron.ops.partition import cp_partition_indices
from tdp_megatron.ops.raw_tokens import pack_raw_tokens
from tdp_megatron.ops.views import PackedSeqParams
from tdp_megatron.schedule.pack_table import PackTable, RankSpans, build_pack_table, build_rank_spans, build_tables

__all__ = [
    "DEFAULT_PADS",
    "MEGATRON_PADS",
    "BatchBuffers",
    "LossSpans",
    "PackBuffers",
    "PackMetadata",
    "PackTable",
    "PackedSeqParams",
    "PackedTensors",
    "PadRules",
    "RankSpans",
    "RowBuffers",
    "allocate_pack",
    "build_pack_table",
    "build_rank_spans",
    "build_tables",
    "cp_partition_indices",
    "gather_pack",
    "pack",
    "pack_raw_tokens",
    "packed_batches",
    "row_specs",
]
