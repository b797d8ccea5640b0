"""Megatron's ``.bin``/``.idx`` format: reading, writing, checking."""

from __future__ import annotations

from tdp_megatron.indexed.builder import IndexedDatasetBuilder
from tdp_megatron.indexed.dataset import IndexedDataset
from tdp_megatron.indexed.dtypes import DType
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path
from tdp_megatron.indexed.verification import VerificationReport, check_vocab, verify

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "VerificationReport",
    "check_vocab",
    "get_bin_path",
    "get_idx_path",
    "verify",
]
