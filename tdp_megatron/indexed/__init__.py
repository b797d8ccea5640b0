"""Megatron's ``.bin``/``.idx`` format: reading, writing, checking."""

from __future__ import annotations

from tdp_megatron.indexed.builder import IndexedDatasetBuilder
from tdp_megatron.indexed.dataset import IndexedDataset
from tdp_megatron.indexed.dtypes import DType
from tdp_megatron.indexed.object_storage import ObjectStorageConfig, is_object_storage_path
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path
from tdp_megatron.indexed.verification import VerificationReport, check_vocab, verify

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "ObjectStorageConfig",
    "VerificationReport",
    "check_vocab",
    "get_bin_path",
    "get_idx_path",
    "is_object_storage_path",
    "verify",
]
