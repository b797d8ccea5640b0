"""The 34-byte header of an ``.idx`` file, and what a file is that does not start with one."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.dtypes import DType

__all__ = ["HEADER_SIZE", "MAGIC", "Header", "describe_foreign", "parse_header"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_STRUCT = struct.Struct("<9sQBQQ")
HEADER_SIZE = _STRUCT.size

_SIGNATURES = (
    (b"TNTIDX\x00\x00", "fairseq's older lazy/cached index; rebuild the data with `tdp preprocess`"),
    (b"\x1f\x8b", "a gzip file; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; decompress it first"),
    (b"\x93NUMPY", "a NumPy .npy array"),
    (b"PK\x03\x04", "a zip archive (.npz or a torch checkpoint)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the real file with `git lfs pull`"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
)


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an index says: nothing here has been checked against the arrays that follow."""

    dtype: np.dtype[Any]
    """Element type of the ``.bin`` file."""
    sequence_count: int
    """N, the number of sequences."""
    document_index_count: int
    """M, the length of ``document_indices``: documents + 1."""

    def pack(self) -> bytes:
        """The 34 bytes of the file."""
        code = DType.code_from_dtype(self.dtype)
        return _STRUCT.pack(MAGIC, VERSION, code, self.sequence_count, self.document_index_count)


def describe_foreign(head: bytes, size: int) -> str:
    """Say in words what a file looks like that is not an index.

    Args:
        head: its first bytes, up to 64.
        size: bytes in the file.
    """
    if size == 0:
        return "an empty file"
    for signature, meaning in _SIGNATURES:
        if head.startswith(signature):
            return f"{meaning} (first bytes {head[:8]!r})"
    if not any(head):
        return f"{len(head)} zero bytes, as an interrupted copy leaves them"
    if head[:1] in (b"{", b"[") or head.lstrip()[:1] in (b"{", b"["):
        return f"JSON text ({head[:24]!r})"
    if all(32 <= byte < 127 or byte in (9, 10, 13) for byte in head):
        return f"plain text ({head[:24]!r})"
    if len(head) >= 8:
        count, dimension = struct.unpack_from("<ii", head)
        for width in (4, 8):
            if count > 0 and dimension > 0 and size - 8 in (count * width, (count + 1) * width):
                return (
                    f"an index of another layout: int32 count {count}, int32 dimension {dimension}, then "
                    f"{(size - 8) // width} offsets of {width} bytes; rebuild it with `tdp preprocess`"
                )
    words = struct.unpack_from(f"<{min(len(head) // 4, 4)}i", head)
    return f"an unknown layout: first bytes {head[:16].hex(' ')}, as int32 {list(words)}"


def parse_header(path: str, head: bytes, size: int) -> Header:
    """Read the header of an index.

    Args:
        path: the file, for messages.
        head: its first bytes, at least ``HEADER_SIZE`` of them where the file has as many.
        size: bytes in the file.

    Returns:
        The header; its counts have not been compared with ``size``.

    Raises:
        FormatError: the magic, the version or the dtype code is wrong, or the file ends inside the header.
    """
    if not head.startswith(MAGIC):
        if head and MAGIC.startswith(head[: len(MAGIC)]):
            raise FormatError(f"{path}: ends inside the header: {size} bytes, the header alone needs {HEADER_SIZE}")
        raise FormatError(
            f"{path}: byte 0: expected the magic {MAGIC!r}; the file looks like {describe_foreign(head[:64], size)}"
        )
    if size < HEADER_SIZE or len(head) < HEADER_SIZE:
        raise FormatError(f"{path}: ends inside the header: {size} bytes, the header alone needs {HEADER_SIZE}")
    _, version, code, sequence_count, document_index_count = _STRUCT.unpack_from(head)
    if version != VERSION:
        raise FormatError(f"{path}: byte 9: expected version {VERSION}, found {version}")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError as error:
        raise FormatError(f"{path}: byte 17: {error}") from None
    return Header(dtype, sequence_count, document_index_count)
