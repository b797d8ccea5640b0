"""``IndexedDataset``: the sequences of a ``.bin``/``.idx`` pair, under Megatron's names."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.dtypes import DType
from tdp_megatron.indexed.layout import IndexArrays, read_layout
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path
from tdp_megatron.indexed.pool import OPEN_FILES
from tdp_megatron.indexed.readers import BinReader, FileBinReader, FileIdentity, MMapBinReader, map_file

__all__ = ["IndexedDataset"]

Item: TypeAlias = "npt.NDArray[Any] | tuple[npt.NDArray[Any], np.int8]"

_OBJECT_STORES = ("s3://", "msc://", "gs://", "az://", "http://", "https://")
_FINGERPRINT_LENGTHS = 4096


@dataclass(frozen=True, slots=True)
class _Opened:
    """What stays known of a dataset's files while the pool may close them."""

    reader: BinReader
    idx_identity: FileIdentity
    sequence_count: int
    num_tokens: int


class IndexedDataset:
    """Random access to the sequences of ``path_prefix.bin`` through ``path_prefix.idx``.

    Everything in the index is checked against both files when the dataset is opened. A dataset pickles as its
    constructor arguments and keeps no file open by itself: maps and descriptors live in a bounded pool.

    Args:
        path_prefix: path without ``.bin`` or ``.idx``.
        multimodal: whether the index has a mode per sequence.
        mmap: read through a memory map; otherwise with positioned reads that are tried again.
        object_storage_config: not supported yet.
        fast_cache_load: open the files at the first access instead of now.
        sequences_per_dataset: ``{path_prefix: (sequence_count, document_count)}`` with document_count = documents + 1;
            the index must agree.
        dtype_code: header code the index must have.

    Raises:
        FileNotFoundError: one of the two files is missing.
        FormatError: the files are not what the index says.
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: object | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: Mapping[str, Sequence[int]] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        self.path_prefix: str = os.fspath(path_prefix)
        if object_storage_config is not None or self.path_prefix.startswith(_OBJECT_STORES):
            raise NotImplementedError(
                f"{self.path_prefix}: object storage is not supported yet; copy the .bin and .idx files to a local or "
                f"shared file system and leave object_storage_config unset"
            )
        self.multimodal = bool(multimodal)
        self.mmap = bool(mmap)
        self._arguments = (
            self.path_prefix,
            self.multimodal,
            self.mmap,
            None,
            bool(fast_cache_load),
            sequences_per_dataset,
            dtype_code,
        )
        self._opened: _Opened | None = None
        if not fast_cache_load:
            self._opened = self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, self._arguments

    def __repr__(self) -> str:
        return f"IndexedDataset({self.path_prefix!r}, sequences={len(self)}, dtype={self.dtype.name})"

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files of a prefix are there."""
        prefix = os.fspath(path_prefix)
        return os.path.isfile(get_idx_path(prefix)) and os.path.isfile(get_bin_path(prefix))

    def _open(self) -> _Opened:
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        idx_identity, bin_identity = self._identify(idx_path), self._identify(bin_path)
        data = map_file(idx_identity)
        arrays = read_layout(idx_path, data, bin_path, bin_identity.size, self.multimodal)
        # A writer replaces first the data, then the index: the same index before and after means one pair.
        if self._identify(idx_path) != idx_identity:
            raise FormatError(f"{idx_path}: was replaced while it was being opened; open the dataset again")
        self._check_expectations(arrays)
        OPEN_FILES.get(("index", idx_identity, bin_identity), lambda: arrays)
        reader = MMapBinReader if self.mmap else FileBinReader
        return _Opened(
            reader(bin_identity, arrays.dtype), idx_identity, len(arrays.sequence_lengths), arrays.num_tokens
        )

    def _identify(self, path: str) -> FileIdentity:
        try:
            return FileIdentity.of(path)
        except FileNotFoundError:
            there = [p for p in (get_bin_path(self.path_prefix), get_idx_path(self.path_prefix)) if os.path.exists(p)]
            hint = f"only {there[0]} is there: its writing or copying was interrupted" if there else "nor its partner"
            if self.path_prefix.endswith((".bin", ".idx")):
                hint = f"path_prefix is given without {self.path_prefix[-4:]}"
            raise FileNotFoundError(f"{path} does not exist ({hint})") from None

    def _check_expectations(self, arrays: IndexArrays) -> None:
        *_, sequences_per_dataset, dtype_code = self._arguments
        idx_path = get_idx_path(self.path_prefix)
        if dtype_code is not None and DType.code_from_dtype(arrays.dtype) != dtype_code:
            raise FormatError(
                f"{idx_path}: byte 17: expected dtype code {dtype_code}, found "
                f"{DType.code_from_dtype(arrays.dtype)} ({arrays.dtype.name})"
            )
        if sequences_per_dataset is not None:
            if self.path_prefix not in sequences_per_dataset:
                raise ValueError(f"sequences_per_dataset has no entry for {self.path_prefix}")
            expected = tuple(int(count) for count in sequences_per_dataset[self.path_prefix])
            found = (len(arrays.sequence_lengths), len(arrays.document_indices))
            if expected != found:
                raise FormatError(
                    f"{idx_path}: byte 18: sequences_per_dataset says {expected} sequences and document indices, the "
                    f"index has {found}; build that file again"
                )

    @property
    def _state(self) -> _Opened:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @property
    def index(self) -> IndexArrays:
        """The checked index; its arrays are read-only, unaligned views of the file."""
        idx, bin_ = self._state.idx_identity, self._state.reader.identity
        arrays: IndexArrays = OPEN_FILES.get(
            ("index", idx, bin_), lambda: read_layout(idx.path, map_file(idx), bin_.path, bin_.size, self.multimodal)
        )
        return arrays

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the tokens."""
        return self._state.reader.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return self._state.num_tokens

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
        return self._state.sequence_count

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
        """The whole ``.bin`` file as uint8 [size], a read-only map, or None with the file reader."""
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
