"""What is known of a pair of files before they are opened, and the comparison when they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.dtypes import DType
from tdp_megatron.indexed.header import Header
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path

__all__ = ["Expectations", "SequencesPerDataset"]

#: Of one prefix: (sequence_count, document_count), or with (dtype_code, bin_bytes, idx_bytes) after them;
#: document_count = documents + 1.
Entry: TypeAlias = "Sequence[int]"

#: ``{path_prefix: entry}``, or the entry itself, as Megatron hands it over.
SequencesPerDataset: TypeAlias = "Mapping[str, Entry] | Entry"

_ENTRY_LENGTHS = (2, 5)


@dataclass(frozen=True, slots=True)
class Expectations:
    """Facts about a pair of files; None where nothing is known."""

    sequence_count: int | None = None
    document_index_count: int | None = None
    dtype_code: int | None = None
    bin_bytes: int | None = None
    idx_bytes: int | None = None

    @classmethod
    def of(cls, path_prefix: str, counts: SequencesPerDataset | None, dtype_code: int | None) -> Expectations:
        """What two constructor arguments of ``IndexedDataset`` say about a prefix.

        Raises:
            ValueError: no entry for the prefix, an entry of another form, an unknown dtype code, or two of them.
        """
        if dtype_code is not None:
            DType.dtype_from_code(dtype_code)
        if counts is None:
            return cls(dtype_code=dtype_code)
        if isinstance(counts, Mapping):
            if path_prefix not in counts:
                raise ValueError(f"sequences_per_dataset has no entry for {path_prefix}; `tdp sequences` writes it")
            counts = counts[path_prefix]
        if (
            not isinstance(counts, Sequence)
            or len(counts) not in _ENTRY_LENGTHS
            or not all(isinstance(value, (int, np.integer)) and value >= 0 for value in counts)
        ):
            raise ValueError(
                f"{path_prefix}: sequences_per_dataset must give [sequence_count, document_count], or these and "
                f"[dtype_code, bin_bytes, idx_bytes], all of them 0 or more; got {counts!r}"
            )
        known = cls(*(int(value) for value in counts))
        if known.dtype_code is None:
            return cls(known.sequence_count, known.document_index_count, dtype_code)
        DType.dtype_from_code(known.dtype_code)
        if dtype_code is not None and dtype_code != known.dtype_code:
            raise ValueError(
                f"{path_prefix}: dtype_code is {dtype_code}, sequences_per_dataset says {known.dtype_code}"
            )
        return known

    @property
    def entry(self) -> tuple[int, ...] | None:
        """The entry of ``sequences_per_dataset`` that says this."""
        if self.sequence_count is None or self.document_index_count is None:
            return None
        counts = (self.sequence_count, self.document_index_count)
        if self.dtype_code is None or self.bin_bytes is None or self.idx_bytes is None:
            return counts
        return (*counts, self.dtype_code, self.bin_bytes, self.idx_bytes)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Element type."""
        return None if self.dtype_code is None else DType.dtype_from_code(self.dtype_code)

    @property
    def num_tokens(self) -> int | None:
        """Tokens in the ``.bin`` file."""
        dtype = self.dtype
        return None if self.bin_bytes is None or dtype is None else self.bin_bytes // dtype.itemsize

    def check(self, path_prefix: str, header: Header, bin_bytes: int, idx_bytes: int) -> None:
        """Compare with what was found.

        Raises:
            FormatError: something differs.
        """
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        if self.dtype is not None and header.dtype != self.dtype:
            code = DType.code_from_dtype(header.dtype)
            raise FormatError(
                f"{idx_path}: byte 17: expected dtype code {self.dtype_code}, found {code} ({header.dtype.name})"
            )
        expected = (self.sequence_count, self.document_index_count)
        found = (header.sequence_count, header.document_index_count)
        if expected not in ((None, None), found):
            raise FormatError(
                f"{idx_path}: byte 18: sequences_per_dataset says {expected} sequences and document indices, the "
                f"index has {found}; write it again with `tdp sequences`"
            )
        for path, wanted, size in ((bin_path, self.bin_bytes, bin_bytes), (idx_path, self.idx_bytes, idx_bytes)):
            if wanted is not None and wanted != size:
                raise FormatError(
                    f"{path}: sequences_per_dataset says {wanted} bytes, the file has {size}; write it again with "
                    "`tdp sequences`"
                )
