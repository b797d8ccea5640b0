"""One document = one sample of its own length; longer ones are split, truncated, dropped or refused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tdp_megatron import _C
from tdp_megatron.indexed import IndexedDataset
from tdp_megatron.types import Int64Array

__all__ = ["DocumentTable", "Overflow", "build_document_table", "epoch_order"]

#: What happens to a document that is longer than the limit.
Overflow = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """The samples of some documents in file order, and what became of the documents."""

    byte_offsets: Int64Array
    """int64 [n], where each sample begins in the ``.bin``."""
    seqlens: Int64Array
    """int64 [n], tokens of each sample."""
    available: Int64Array
    """int64 [n], tokens of the document from the sample's start on."""
    documents: Int64Array
    """int64 [n], the document each sample comes from."""
    num_documents: int
    num_empty: int
    """Documents without a token; they give no sample."""
    num_overlong: int
    """Documents longer than the limit."""
    num_dropped_tokens: int
    """Tokens that no sample holds."""

    def __len__(self) -> int:
        return len(self.seqlens)

    @property
    def num_loss_tokens(self) -> Int64Array:
        """int64 [n]: a sample that ends with its document has no target for the last token."""
        known: Int64Array = self.seqlens - (self.seqlens == self.available)
        return known


def _document_runs(dataset: IndexedDataset, begin: int, end: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Number, byte offset and token count of the documents whose first sequence is in [begin, end)."""
    boundaries = np.array(dataset.document_indices, dtype=np.int64)
    itemsize = dataset.dtype.itemsize
    pointers = np.append(np.array(dataset.sequence_pointers, dtype=np.int64), dataset.num_tokens * itemsize)
    first = boundaries[:-1]
    # An empty last document begins at N, one past the last sequence: it belongs to the split that ends there.
    inside = (first >= begin) & ((first < end) | (first == end) & (end == len(dataset)))
    numbers = np.flatnonzero(inside).astype(np.int64)
    offsets = pointers[boundaries[numbers]]
    tokens = (pointers[boundaries[numbers + 1]] - offsets) // itemsize
    return numbers, offsets, tokens


def build_document_table(
    dataset: IndexedDataset, begin: int, end: int, *, max_seqlen: int, overflow: Overflow
) -> DocumentTable:
    """Samples of the documents that begin in the sequences [begin, end).

    Args:
        dataset: the file.
        begin: first sequence.
        end: one past the last sequence.
        max_seqlen: most tokens of one sample.
        overflow: ``split`` into runs of max_seqlen, ``truncate`` to the first max_seqlen, ``drop``, or ``error``.

    Raises:
        ValueError: a bad argument, or an overlong document under ``error``.
    """
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen must be at least 1, got {max_seqlen}")
    if overflow not in get_args(Overflow):
        raise ValueError(f"overflow must be one of {', '.join(get_args(Overflow))}, got {overflow!r}")
    numbers, offsets, tokens = _document_runs(dataset, begin, end)
    overlong = tokens > max_seqlen
    num_overlong = int(overlong.sum())
    if overflow == "error" and num_overlong:
        worst = int(np.argmax(tokens))
        raise ValueError(
            f"{dataset.path_prefix}: {num_overlong} documents are longer than max_seqlen {max_seqlen}; document "
            f"{int(numbers[worst])} has {int(tokens[worst])} tokens. Raise max_seqlen, or choose overflow='split', "
            "'truncate' or 'drop'"
        )
    dropped = 0
    keep = tokens > 0
    if overflow == "drop":
        dropped = int(tokens[overlong].sum())
        keep &= ~overlong
    elif overflow == "truncate":
        dropped = int((tokens[overlong] - max_seqlen).sum())
    num_empty = int((tokens == 0).sum())
    numbers_all = len(numbers)
    numbers, offsets, tokens = numbers[keep], offsets[keep], tokens[keep]
    pieces = -(-tokens // max_seqlen) if overflow == "split" else np.ones(len(tokens), dtype=np.int64)
    document = np.repeat(np.arange(len(tokens)), pieces)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_seqlen
    available = tokens[document] - start
    return DocumentTable(
        byte_offsets=offsets[document] + start * dataset.dtype.itemsize,
        seqlens=np.minimum(available, max_seqlen),
        available=available,
        documents=numbers[document],
        num_documents=numbers_all,
        num_empty=num_empty,
        num_overlong=num_overlong,
        num_dropped_tokens=dropped,
    )


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> Int64Array:
    """The order of one epoch, a pure function of its arguments, the same in every NumPy version.

    The epoch's seed is a hash, so that the epochs of neighbouring seeds do not repeat each other.
    """
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        digest = hashlib.sha256(f"tdp_megatron:documents:{seed}:{epoch}".encode()).digest()
        _C.LegacyRandom(np.frombuffer(digest, dtype="<u4").astype(np.uint32)).shuffle(order)
    return order
