"""What a sample is: splits, fixed-length GPT samples, whole documents, blends, caches; under Megatron's names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdp_megatron.datasets.blend import blend_from_list
    from tdp_megatron.datasets.blended import BlendedDataset
    from tdp_megatron.datasets.builder import BlendedMegatronDatasetBuilder
    from tdp_megatron.datasets.config import BlendedMegatronDatasetConfig, GPTDatasetConfig
    from tdp_megatron.datasets.fim import GPTFIMDataset, GPTFIMDatasetConfig
    from tdp_megatron.datasets.gpt import GPTDataset
    from tdp_megatron.datasets.megatron_dataset import MegatronDataset
    from tdp_megatron.datasets.mock import MockGPTDataset
    from tdp_megatron.datasets.sft import SFTDataset, SFTDatasetConfig
    from tdp_megatron.datasets.splits import Split
    from tdp_megatron.datasets.tokenizer_spec import TokenizerSpec

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "GPTDataset",
    "GPTDatasetConfig",
    "GPTFIMDataset",
    "GPTFIMDatasetConfig",
    "MegatronDataset",
    "MockGPTDataset",
    "SFTDataset",
    "SFTDatasetConfig",
    "Split",
    "TokenizerSpec",
    "blend_from_list",
]

# Imported at the first use: commands that only look at files should not wait for torch.
_MODULES = {
    "BlendedDataset": "blended",
    "BlendedMegatronDatasetBuilder": "builder",
    "BlendedMegatronDatasetConfig": "config",
    "GPTDataset": "gpt",
    "GPTDatasetConfig": "config",
    "GPTFIMDataset": "fim",
    "GPTFIMDatasetConfig": "fim",
    "MegatronDataset": "megatron_dataset",
    "MockGPTDataset": "mock",
    "SFTDataset": "sft",
    "SFTDatasetConfig": "sft",
    "Split": "splits",
    "TokenizerSpec": "tokenizer_spec",
    "blend_from_list": "blend",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
