"""Made-up GPT data, the same as Megatron's, for runs without files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.datasets.gpt import GPTDataset
from tdp_megatron.types import Int64Array

__all__ = ["MockGPTDataset", "MockGPTLowLevelDataset"]


class MockGPTLowLevelDataset:
    """100,000 sequences 1, 2, 3, ... modulo the vocabulary, each ended by the end-of-document token.

    Args:
        tokenizer: gives ``vocab_size`` and ``eod``.
    """

    seed = 0
    size = 100_000
    max_sequence_length = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = int(tokenizer.vocab_size)
        self.eod_token = int(tokenizer.eod)
        self.sequence_lengths: npt.NDArray[np.int32] = np.random.default_rng(self.seed).integers(
            1, self.max_sequence_length, self.size, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> Int64Array:
        """int64 [length], one sequence."""
        sequence = np.arange(1, int(self.sequence_lengths[idx]) + 1, dtype=np.int64) % self.vocab_size
        sequence[-1] = self.eod_token
        return sequence

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Int64Array:
        """A part of one sequence."""
        sequence = self[idx]
        return sequence[offset:] if length is None else sequence[offset : offset + length]


class MockGPTDataset(GPTDataset):
    """``GPTDataset`` over ``MockGPTLowLevelDataset``; the config has no blend."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        if not config.mock:
            raise ValueError("the config has a blend, and MockGPTDataset reads no files; use GPTDataset")
        return MockGPTLowLevelDataset(config.tokenizer)

    def _read(self, documents: npt.NDArray[np.int32], begin: int, end: int, row: int) -> tuple[Int64Array, Int64Array]:
        parts = [self.dataset[int(document)] for document in documents]
        parts[-1] = parts[-1][:end]
        parts[0] = parts[0][begin:]
        return np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64)
