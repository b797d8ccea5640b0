"""Where the arrays of an ``.idx`` file lie, and the checks that make them trustworthy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.header import HEADER_SIZE, Header, parse_header

__all__ = [
    "HEAD_SIZE",
    "MAX_SEQUENCE_LENGTH",
    "IndexArrays",
    "iter_pointers",
    "last_sequence_at",
    "read_header",
    "read_layout",
    "wrong_bin_size",
]

#: Bytes from the start of a file that say what it is.
HEAD_SIZE = 64

#: Lengths are stored as int32.
MAX_SEQUENCE_LENGTH = 2**31 - 1

# Small enough for the temporaries of a chunk to stay in the cache, large enough to hide numpy's call overhead.
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class IndexArrays:
    """The checked content of an index.

    The arrays are read-only views of the file. The 34-byte header leaves them unaligned; indexing them with an
    array, or ``np.require(a, requirements="A")``, gives an aligned copy.
    """

    dtype: np.dtype[Any]
    """Element type of the ``.bin`` file."""
    sequence_lengths: npt.NDArray[np.int32]
    """int32 [N], tokens."""
    sequence_pointers: npt.NDArray[np.int64]
    """int64 [N], byte offset of each sequence in the ``.bin`` file."""
    document_indices: npt.NDArray[np.int64]
    """int64 [M], first sequence of each document, then N."""
    sequence_modes: npt.NDArray[np.int8] | None
    """int8 [N] for multimodal data, else None."""
    num_tokens: int
    """Sum of the lengths."""

    @property
    def header(self) -> Header:
        """What the header says."""
        return Header(self.dtype, len(self.sequence_lengths), len(self.document_indices))


def iter_pointers(lengths: npt.NDArray[np.int32], itemsize: int, start: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Byte pointers of consecutive sequences, in chunks: the exclusive prefix sum of length * itemsize.

    Args:
        lengths: int32 [N], tokens.
        itemsize: bytes per token.
        start: pointer of the first sequence, bytes.
    """
    for first in range(0, len(lengths), _CHUNK):
        ends = np.cumsum(lengths[first : first + _CHUNK], dtype=np.int64)
        ends *= itemsize
        ends += start
        pointers = np.empty_like(ends)
        pointers[0] = start
        pointers[1:] = ends[:-1]
        start = int(ends[-1])
        yield pointers


def read_header(path: str, head: bytes, size: int, multimodal: bool) -> Header:
    """The header of an index, checked against the size of the file.

    Args:
        path: the index file, for messages.
        head: its first ``HEAD_SIZE`` bytes.
        size: bytes in it.
        multimodal: whether an int8 mode per sequence follows the arrays; the header does not say.

    Raises:
        FormatError: a count, the dtype code or the size does not fit.
    """
    header = parse_header(path, head, size)
    _check_size(path, size, header, multimodal)
    return header


def last_sequence_at(header: Header) -> tuple[int, int] | None:
    """Where an index has the length and the pointer of its last sequence, byte offsets; None when there is none."""
    n = header.sequence_count
    return (HEADER_SIZE + 4 * (n - 1), HEADER_SIZE + 4 * n + 8 * (n - 1)) if n else None


def wrong_bin_size(bin_path: str, found: int, needed: int, header: Header) -> FormatError:
    """The error for a data file that is not as long as its index says, bytes."""
    return FormatError(
        f"{bin_path}: bin has {found} bytes, index needs {needed} ({header.sequence_count} sequences, "
        f"{header.dtype.itemsize} bytes per token); the file {'is cut' if found < needed else 'is too long'}, or "
        "belongs to another index or dtype"
    )


def read_layout(
    path: str,
    data: npt.NDArray[np.uint8],
    bin_path: str,
    bin_size: int,
    multimodal: bool,
    *,
    known: bool = False,
) -> IndexArrays:
    """Check an index against its own size and against its ``.bin`` file.

    Args:
        path: the index file, for messages.
        data: uint8, the whole index file.
        bin_path: the data file, for messages.
        bin_size: bytes in the data file.
        multimodal: whether an int8 mode per sequence follows the arrays; the header does not say.
        known: whether these very versions of both files have passed before; the arrays are then not read again.

    Returns:
        Views into ``data``.

    Raises:
        FormatError: any count, code, offset or length does not fit; the message has the byte offset, what was
            expected and what was found.
    """
    header = read_header(path, data[:HEAD_SIZE].tobytes(), len(data), multimodal)
    n, m = header.sequence_count, header.document_index_count
    pointers_at = HEADER_SIZE + 4 * n
    documents_at = pointers_at + 8 * n
    modes_at = documents_at + 8 * m
    lengths = data[HEADER_SIZE:pointers_at].view(np.int32)
    pointers = data[pointers_at:documents_at].view(np.int64)
    documents = data[documents_at:modes_at].view(np.int64)
    if not known:
        _check_documents(path, documents, documents_at, n)
        _check_sequences(path, lengths, pointers, pointers_at, header, bin_path, bin_size)
    modes = data[modes_at:].view(np.int8) if multimodal else None
    return IndexArrays(header.dtype, lengths, pointers, documents, modes, bin_size // header.dtype.itemsize)


def _check_size(path: str, size: int, header: Header, multimodal: bool) -> None:
    # Python integers: counts near 2**64 must not wrap into something that fits.
    n, m = header.sequence_count, header.document_index_count
    plain = HEADER_SIZE + 12 * n + 8 * m
    if size == (plain + n if multimodal else plain):
        if m == 0:
            raise FormatError(f"{path}: byte 26: expected at least 1 document index, found 0")
        return
    if size == (plain if multimodal else plain + n):
        flag = "multimodal=False (without --multimodal)" if multimodal else "multimodal=True (--multimodal)"
        has = "has no" if multimodal else "has a"
        raise FormatError(f"{path}: {size} bytes: the index {has} mode per sequence; open it with {flag}")
    raise FormatError(
        f"{path}: byte 18: {n} sequences and {m} document indices need {plain + n if multimodal else plain} bytes, "
        f"the file has {size}"
    )


def _check_documents(path: str, documents: npt.NDArray[np.int64], offset: int, sequence_count: int) -> None:
    if documents[0] != 0:
        raise FormatError(f"{path}: byte {offset}: document_indices[0] must be 0, found {documents[0]}")
    if documents[-1] != sequence_count:
        raise FormatError(
            f"{path}: byte {offset + 8 * (len(documents) - 1)}: the last document index must be the number of "
            f"sequences {sequence_count}, found {documents[-1]}"
        )
    for first in range(0, len(documents) - 1, _CHUNK):
        # An aligned copy first: numpy's comparisons of unaligned data are several times slower.
        part = documents[first : first + _CHUNK + 1].copy()
        falls = part[1:] < part[:-1]
        if falls.any():
            i = first + int(falls.argmax()) + 1
            raise FormatError(
                f"{path}: byte {offset + 8 * i}: document_indices must not decrease, but [{i}] is {documents[i]} "
                f"after {documents[i - 1]}"
            )


def _check_sequences(
    path: str,
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    pointers_at: int,
    header: Header,
    bin_path: str,
    bin_size: int,
) -> None:
    itemsize = header.dtype.itemsize
    start = 0
    for first in range(0, len(lengths), _CHUNK):
        part = lengths[first : first + _CHUNK].copy()
        if part.min() < 0:
            i = first + int((part < 0).argmax())
            raise FormatError(f"{path}: byte {HEADER_SIZE + 4 * i}: length of sequence {i} is negative: {lengths[i]}")
        expected = next(iter_pointers(part, itemsize, start))
        wrong = pointers[first : first + _CHUNK].copy() != expected
        if wrong.any():
            k = int(wrong.argmax())
            raise FormatError(
                f"{path}: byte {pointers_at + 8 * (first + k)}: pointers must be the prefix sum of the lengths; "
                f"sequence {first + k} should start at byte {expected[k]}, found {pointers[first + k]}"
            )
        # Stops before a sum of hostile lengths could pass 2**63.
        start = int(expected[-1]) + int(part[-1]) * itemsize
        if start > bin_size:
            break
    if start != bin_size:
        raise wrong_bin_size(bin_path, bin_size, int(lengths.sum(dtype=np.int64)) * itemsize, header)
