"""The stages as ``torchdata.nodes``: IndexedRead -> GPTSample | DocumentSample -> Blend -> Pack -> Reroute."""

from __future__ import annotations

from tdp_megatron.nodes.base import Node, SampleSource
from tdp_megatron.nodes.batch import Batch
from tdp_megatron.nodes.blend import Blend
from tdp_megatron.nodes.document_sample import DocumentSample
from tdp_megatron.nodes.gpt_sample import GPTSample
from tdp_megatron.nodes.indexed_read import IndexedRead
from tdp_megatron.nodes.loader import Loader
from tdp_megatron.nodes.look_ahead import LookAhead
from tdp_megatron.nodes.pack import GlobalBatch, Pack
from tdp_megatron.nodes.prefetch import Prefetch
from tdp_megatron.nodes.reroute import Reroute
from tdp_megatron.nodes.shard import Shard
from tdp_megatron.nodes.stream_pack import StreamPack

__all__ = [
    "Batch",
    "Blend",
    "DocumentSample",
    "GPTSample",
    "GlobalBatch",
    "IndexedRead",
    "Loader",
    "LookAhead",
    "Node",
    "Pack",
    "Prefetch",
    "Reroute",
    "SampleSource",
    "Shard",
    "StreamPack",
]
