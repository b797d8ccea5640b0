"""Full checks of a pair of files, and of a file against a vocabulary."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.dataset import IndexedDataset
from tdp_megatron.indexed.dtypes import UINT16_VOCAB_LIMIT
from tdp_megatron.indexed.object_storage import is_object_storage_path
from tdp_megatron.indexed.paths import get_bin_path

__all__ = ["VerificationReport", "check_vocab", "verify"]

_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """What a pair of files holds; it exists only for pairs that passed."""

    path_prefix: str
    dtype: str
    """Element type of the tokens."""
    sequences: int
    documents: int
    tokens: int
    empty_sequences: int
    """Sequences of no token."""
    empty_documents: int
    """Documents of no sequence."""
    multimodal: bool
    """Whether each sequence has a mode."""
    min_token: int | float | None
    """Smallest value, None without tokens."""
    max_token: int | float | None
    """Largest value, None without tokens."""


def verify(
    path_prefix: str | os.PathLike[str], vocab_size: int | None = None, multimodal: bool = False
) -> VerificationReport:
    """Check a pair of files and read every token.

    Args:
        path_prefix: path without ``.bin`` or ``.idx``.
        vocab_size: when given, every token must be below it.
        multimodal: whether the index has a mode per sequence.

    Returns:
        What the files hold.

    Raises:
        FormatError: the files do not fit each other, the format or the vocabulary.
    """
    prefix = os.fspath(path_prefix)
    dataset = IndexedDataset(prefix, multimodal=multimodal, mmap=not is_object_storage_path(prefix))
    if vocab_size is not None:
        check_vocab(dataset, vocab_size)
    smallest, largest = _scan(dataset, vocab_size)
    return VerificationReport(
        path_prefix=dataset.path_prefix,
        dtype=dataset.dtype.name,
        sequences=len(dataset),
        documents=len(dataset.document_indices) - 1,
        tokens=dataset.num_tokens,
        empty_sequences=int((dataset.sequence_lengths == 0).sum()),
        empty_documents=int((np.diff(dataset.document_indices) == 0).sum()),
        multimodal=multimodal,
        min_token=smallest,
        max_token=largest,
    )


def check_vocab(dataset: IndexedDataset, vocab_size: int, scan: bool = False) -> None:
    """Check that a file can have been written for a vocabulary.

    Args:
        dataset: the file.
        vocab_size: ids are 0 to vocab_size - 1.
        scan: also read every token; otherwise only the dtype is looked at.

    Raises:
        FormatError: the dtype cannot hold every id of the vocabulary, or a token is outside it.
        ValueError: ``vocab_size`` is not positive.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    dtype = dataset.dtype
    if dtype.kind not in "iu":
        raise FormatError(f"{get_bin_path(dataset.path_prefix)}: holds {dtype.name} values, not token ids")
    holds = int(np.iinfo(dtype).max) + 1
    if vocab_size > holds:
        raise FormatError(
            f"{get_bin_path(dataset.path_prefix)}: {dtype.name} holds ids below {holds}, the vocabulary has "
            f"{vocab_size}; the file was written for another tokenizer (uint16 is used below {UINT16_VOCAB_LIMIT} ids)"
        )
    if scan:
        _scan(dataset, vocab_size)


def _scan(dataset: IndexedDataset, vocab_size: int | None) -> tuple[int | float | None, int | float | None]:
    smallest: int | float | None = None
    largest: int | float | None = None
    itemsize = dataset.dtype.itemsize
    for first in range(0, dataset.num_tokens, _SCAN_TOKENS):
        count = min(_SCAN_TOKENS, dataset.num_tokens - first)
        part = dataset.read_pieces(np.array([first * itemsize]), np.array([count]))
        low, high = part.min().item(), part.max().item()
        if vocab_size is not None and (low < 0 or high >= vocab_size):
            position = first + int(((part < 0) | (part >= vocab_size)).argmax())
            sequence = int(np.searchsorted(dataset.sequence_pointers, position * itemsize, side="right")) - 1
            raise FormatError(
                f"{get_bin_path(dataset.path_prefix)}: byte {position * itemsize}: token {part[position - first]} of "
                f"sequence {sequence} is outside the vocabulary of {vocab_size} ids"
            )
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
    return smallest, largest
