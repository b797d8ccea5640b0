"""Data runtime for LLM training: Megatron's sample order, DP x CP packing, exact resume.

The names below are loaded at their first use, so that ``import tdp_megatron`` costs next to nothing; everything else
is imported by its module path (``tdp_megatron.nodes``, ``tdp_megatron.schedule``, ...).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdp_megatron.datasets import BlendedDataset as BlendedDataset
    from tdp_megatron.datasets import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
    from tdp_megatron.datasets import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
    from tdp_megatron.datasets import GPTDataset as GPTDataset
    from tdp_megatron.datasets import GPTDatasetConfig as GPTDatasetConfig
    from tdp_megatron.datasets import MockGPTDataset as MockGPTDataset
    from tdp_megatron.distributed import DpCpGroups as DpCpGroups
    from tdp_megatron.distributed import Exchange as Exchange
    from tdp_megatron.errors import TdpError as TdpError
    from tdp_megatron.indexed import IndexedDataset as IndexedDataset
    from tdp_megatron.indexed import IndexedDatasetBuilder as IndexedDatasetBuilder
    from tdp_megatron.loops import HybridCPDataLoaderWrapper as HybridCPDataLoaderWrapper
    from tdp_megatron.loops import (
        get_batch_on_this_rank_for_sequence_packing as get_batch_on_this_rank_for_sequence_packing,
    )
    from tdp_megatron.loops import wrap_data_iterator as wrap_data_iterator
    from tdp_megatron.schedule import CostModel as CostModel
    from tdp_megatron.schedule import Plan as Plan
    from tdp_megatron.types import PackedBatch as PackedBatch
    from tdp_megatron.types import ParallelLayout as ParallelLayout
    from tdp_megatron.types import Sample as Sample
    from tdp_megatron.types import Step as Step

__version__ = "0.1.0"

_MODULES = {
    "BlendedDataset": "datasets",
    "BlendedMegatronDatasetBuilder": "datasets",
    "BlendedMegatronDatasetConfig": "datasets",
    "CostModel": "schedule",
    "DpCpGroups": "distributed",
    "Exchange": "distributed",
    "GPTDataset": "datasets",
    "GPTDatasetConfig": "datasets",
    "HybridCPDataLoaderWrapper": "loops",
    "IndexedDataset": "indexed",
    "IndexedDatasetBuilder": "indexed",
    "MockGPTDataset": "datasets",
    "PackedBatch": "types",
    "ParallelLayout": "types",
    "Plan": "schedule",
    "Sample": "types",
    "Step": "types",
    "TdpError": "errors",
    "get_batch_on_this_rank_for_sequence_packing": "loops",
    "wrap_data_iterator": "loops",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tdp_megatron.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'tdp_megatron' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
