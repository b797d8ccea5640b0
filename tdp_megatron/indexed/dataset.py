"""``IndexedDataset``: the sequences of a ``.bin``/``.idx`` pair, under Megatron's names."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron.indexed.expectations import Expectations, SequencesPerDataset
from tdp_megatron.indexed.layout import IndexArrays
from tdp_megatron.indexed.object_storage import ObjectStorageConfig, is_object_storage_path, object_exists
from tdp_megatron.indexed.opening import OpenedPair, check_storage, open_pair
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path

__all__ = ["IndexedDataset"]

Item: TypeAlias = "npt.NDArray[Any] | tuple[npt.NDArray[Any], np.int8]"

_FINGERPRINT_LENGTHS = 4096


class IndexedDataset:
    """Random access to the sequences of ``path_prefix.bin`` through ``path_prefix.idx``.

    Everything in the index is checked against both files before it is used, by default when the dataset is opened. A
    dataset pickles as its constructor arguments and keeps no file open by itself: maps and descriptors live in a
    bounded pool.

    Args:
        path_prefix: path without ``.bin`` or ``.idx``, or the URL of two objects, ``s3://BUCKET/KEY`` or
            ``msc://PROFILE/PATH``.
        multimodal: whether the index has a mode per sequence.
        mmap: read through a memory map; otherwise with positioned reads that are tried again. Must be False for
            objects.
        object_storage_config: how objects are read; None for the index in the user's cache folder.
        fast_cache_load: open the files at the first access instead of now, and make the checks then.
        sequences_per_dataset: ``{path_prefix: (sequence_count, document_count)}`` with document_count = documents + 1,
            or the pair alone, as `tdp sequences` writes them; the index must agree.
        dtype_code: header code the index must have.
        header_only: compare the header with the sizes of both files now, and check the arrays at their first use:
            opening takes as long for a large index as for a small one.

    Raises:
        FileNotFoundError: one of the two files is missing.
        FormatError: the files are not what the index says.
        ValueError: arguments that do not go together.
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: SequencesPerDataset | None = None,
        dtype_code: int | None = None,
        header_only: bool = False,
    ) -> None:
        self.path_prefix: str = os.fspath(path_prefix)
        self.multimodal = bool(multimodal)
        self.mmap = bool(mmap)
        self.object_storage_config = check_storage(self.path_prefix, self.mmap, object_storage_config)
        self._fast = bool(fast_cache_load)
        self._header_only = bool(header_only)
        self._expected = Expectations.of(self.path_prefix, sequences_per_dataset, dtype_code)
        self._opened: OpenedPair | None = None
        if not self._fast:
            self._opened = self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        expected = self._expected
        counts, code = expected.entry, expected.dtype_code
        return IndexedDataset, (
            *(self.path_prefix, self.multimodal, self.mmap, self.object_storage_config, self._fast),
            *(counts, code, self._header_only),
        )

    def __repr__(self) -> str:
        known = "not opened" if self._opened is None else f"sequences={len(self)}, dtype={self.dtype.name}"
        return f"IndexedDataset({self.path_prefix!r}, {known})"

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files of a prefix are there; of objects, the store is asked."""
        prefix = os.fspath(path_prefix)
        is_there = object_exists if is_object_storage_path(prefix) else os.path.isfile
        return is_there(get_idx_path(prefix)) and is_there(get_bin_path(prefix))

    def _open(self) -> OpenedPair:
        return open_pair(
            self.path_prefix,
            self.multimodal,
            self.mmap,
            self.object_storage_config,
            check=self._expected.check,
            header_only=self._header_only,
        )

    @property
    def _state(self) -> OpenedPair:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @property
    def index(self) -> IndexArrays:
        """The checked index; its arrays are read-only, unaligned views of the file."""
        return self._state.arrays()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the tokens."""
        known = self._expected.dtype if self._opened is None else None
        return self._state.reader.dtype if known is None else known

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        known = self._expected.num_tokens if self._opened is None else None
        return self._state.num_tokens if known is None else known

    @property
    def bin_nbytes(self) -> int:
        """Bytes in the ``.bin`` file."""
        return self._state.reader.identity.size

    @property
    def idx_nbytes(self) -> int:
        """Bytes in the ``.idx`` file."""
        return self._state.idx_identity.size

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """int32 [N], tokens per sequence; a read-only, unaligned view of the file."""
        return self.index.sequence_lengths

    @property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """int64 [N], byte offset of each sequence in the ``.bin`` file; a read-only, unaligned view."""
        return self.index.sequence_pointers

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """int64 [documents + 1], first sequence of each document, then N; a read-only, unaligned view."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> npt.NDArray[np.int8] | None:
        """int8 [N], mode of each sequence, or None unless multimodal."""
        return self.index.sequence_modes

    def __len__(self) -> int:
        known = self._expected.sequence_count if self._opened is None else None
        return self._state.sequence_count if known is None else known

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Any:
        """One sequence, or the list of a slice's sequences; with modes, a pair of that and the mode(s).

        An empty slice gives a list of one empty array, as Megatron's does.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has a step other than 1.
        """
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"sequences must be contiguous: the slice has step {step}, only 1 is allowed")
        index = self.index
        lengths = index.sequence_lengths[start:stop]
        first = int(index.sequence_pointers[start]) if len(lengths) else 0
        tokens = self._state.reader.read(first, int(lengths.sum(dtype=np.int64)))
        sequences = np.split(tokens, np.cumsum(lengths[:-1], dtype=np.int64)) if len(lengths) else [tokens]
        if index.sequence_modes is None:
            return sequences
        return sequences, index.sequence_modes[start:stop]

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> Item:
        """A part of one sequence.

        Args:
            idx: sequence; negative counts from the end.
            offset: first token, from the start of the sequence.
            length: tokens; all that follow when None.

        Returns:
            dtype [length], read-only with the mmap reader; with modes, a pair of that and the mode.

        Raises:
            IndexError: there is no such sequence, or the part reaches beyond it.
        """
        if isinstance(idx, (bool, np.bool_)):
            raise TypeError("a sequence is named by an int or a slice, not by a bool")
        try:
            i = operator.index(idx)
        except TypeError:
            raise TypeError(f"a sequence is named by an int or a slice, got {type(idx).__name__}") from None
        count = len(self)
        if not -count <= i < count:
            raise IndexError(f"{self.path_prefix}: no sequence {i}; there are {count}")
        i %= count
        index = self.index
        seqlen = int(index.sequence_lengths[i])
        wanted = seqlen - offset if length is None else length
        if not 0 <= offset <= seqlen or not 0 <= wanted <= seqlen - offset:
            raise IndexError(
                f"{self.path_prefix}: sequence {i} has {seqlen} tokens; offset {offset}, length {length} is "
                f"not inside it"
            )
        source = self._state.reader
        tokens = source.read(int(index.sequence_pointers[i]) + offset * source.dtype.itemsize, wanted)
        return tokens if index.sequence_modes is None else (tokens, index.sequence_modes[i])

    def bin_bytes(self) -> npt.NDArray[np.uint8] | None:
        """The whole ``.bin`` file as uint8 [size], a read-only map, or None with other readers."""
        return self._state.reader.bytes()

    def read_pieces(self, byte_offsets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Many token ranges of the ``.bin`` file, one after the other.

        Args:
            byte_offsets: int64 [p], multiples of the token size.
            counts: int64 [p], tokens.

        Returns:
            dtype [sum of counts].

        Raises:
            IndexError: a range is not inside the file.
        """
        return self._state.reader.read_pieces(byte_offsets, counts)

    def fingerprint(self) -> dict[str, int | str]:
        """What tells this data from other data without reading it all: counts, dtype, a CRC of some lengths."""
        lengths = self.sequence_lengths
        first, last = lengths[:_FINGERPRINT_LENGTHS], lengths[-_FINGERPRINT_LENGTHS:]
        crc = zlib.crc32(last.tobytes(), zlib.crc32(first.tobytes()))
        return {
            "sequences": len(lengths),
            "documents": len(self.document_indices) - 1,
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "lengths_crc32": crc,
        }
