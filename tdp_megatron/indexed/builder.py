"""``IndexedDatasetBuilder``: writes a ``.bin``/``.idx`` pair that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.indexed.casting import cast_tokens
from tdp_megatron.indexed.dataset import IndexedDataset
from tdp_megatron.indexed.dtypes import DType
from tdp_megatron.indexed.header import Header
from tdp_megatron.indexed.layout import MAX_SEQUENCE_LENGTH, iter_pointers
from tdp_megatron.indexed.paths import fsync_folder, get_bin_path, locked_folder
from tdp_megatron.indexed.spool import Spool

__all__ = ["IndexedDatasetBuilder"]

_COPY_BYTES = 1 << 22
_COPY_ITEMS = 1 << 19


class IndexedDatasetBuilder:
    """Writes documents, each of any number of sequences, in Megatron's format.

    Data goes to temporary names; ``finalize`` makes both files durable and renames them. Used as a context manager
    it discards everything when the block raises. Memory is bounded by the largest document.

    Args:
        bin_path: the ``.bin`` file to be.
        dtype: element type; see ``DType.optimal_dtype``.
        multimodal: whether a mode per sequence is stored.
    """

    def __init__(
        self, bin_path: str | os.PathLike[str], dtype: npt.DTypeLike = np.int32, multimodal: bool = False
    ) -> None:
        self.dtype = np.dtype(dtype)
        DType.code_from_dtype(self.dtype)
        self.multimodal = bool(multimodal)
        self._bin_path = os.fspath(bin_path)
        folder = os.path.dirname(self._bin_path) or "."
        self._lengths = Spool(np.int32, folder)
        self._documents = Spool(np.int64, folder)
        self._modes = Spool(np.int8, folder)
        self._documents.extend(np.zeros(1, dtype=np.int64))
        self._open_items: list[npt.NDArray[Any]] = []
        self._open_modes: list[int] = []
        self._num_tokens = 0
        self._closed = False
        self._output = TemporaryOutput(self._bin_path)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def num_sequences(self) -> int:
        """Sequences of finished documents."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Finished documents."""
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of finished documents."""
        return self._num_tokens

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Add one sequence to the open document, which stays in memory until ``end_document``.

        Args:
            tensor: tokens, any array-like.
            mode: the sequence's mode; must be 0 unless multimodal.

        Raises:
            ValueError: a token does not fit the dtype. The open document is dropped, nothing of it is written.
        """
        self._check_open()
        try:
            self._check_modes([mode])
            self._open_items.append(cast_tokens(tensor, self.dtype, self.num_documents))
        except Exception:
            self._drop_open_document()
            raise
        self._open_modes.append(mode)

    def end_document(self) -> None:
        """End the open document; without items since the last one it is a document of zero sequences."""
        self._check_open()
        lengths = np.array([len(item) for item in self._open_items], dtype=np.int64)
        flat = np.concatenate(self._open_items) if self._open_items else np.empty(0, dtype=self.dtype)
        modes = np.array(self._open_modes, dtype=np.int8)
        self._drop_open_document()
        self._append(flat, lengths, np.array([len(lengths)]), modes)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Add a whole document.

        Args:
            tensor: tokens of all its sequences.
            lengths: tokens of each sequence; their sum is the size of ``tensor``.
            modes: mode of each sequence, zeros when None.

        Raises:
            ValueError: a token does not fit the dtype, or the lengths do not add up. Nothing is written.
        """
        self.add_sequences(tensor, lengths, [len(lengths)], modes)

    def add_documents(
        self, jagged: Any, modes: Sequence[int] | None = None, eod_token: int | None = None, chunk_size: int = 1_000_000
    ) -> None:
        """Add many documents of one sequence each.

        Args:
            jagged: an awkward array, or any sequence of token arrays.
            modes: mode of each document, zeros when None.
            eod_token: put after every document.
            chunk_size: documents converted at a time.

        Raises:
            ValueError: a token does not fit the dtype. Nothing of the chunk it is in is written.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if modes is not None and len(modes) != len(jagged):
            raise ValueError(f"{len(modes)} modes were given for {len(jagged)} documents")
        for first in range(0, len(jagged), chunk_size):
            chunk = jagged[first : first + chunk_size]
            flat, lengths = self._flatten(chunk)
            if eod_token is not None:
                eod = cast_tokens([eod_token], self.dtype, self.num_documents)[0]
                flat = np.insert(flat, np.cumsum(lengths), eod)
                lengths = lengths + 1
            chunk_modes = None if modes is None else modes[first : first + chunk_size]
            self.add_sequences(flat, lengths, np.ones(len(lengths), dtype=np.int64), chunk_modes)

    def _flatten(self, chunk: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        if type(chunk).__module__.partition(".")[0] == "awkward":
            # Whoever has such an array has imported it.
            awkward: Any = sys.modules["awkward"]
            lengths = np.asarray(awkward.num(chunk), dtype=np.int64)
            flat = np.asarray(awkward.flatten(chunk))
            return cast_tokens(flat, self.dtype, self.num_documents, np.cumsum(lengths)), lengths
        rows = [cast_tokens(row, self.dtype, self.num_documents + i) for i, row in enumerate(chunk)]
        return np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64)

    def add_sequences(
        self,
        tokens: Any,
        sequence_lengths: npt.ArrayLike,
        sequences_per_document: npt.ArrayLike,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Add many documents of any number of sequences in one call.

        Args:
            tokens: all tokens, in order.
            sequence_lengths: int [n], tokens of each sequence.
            sequences_per_document: int [documents], sum n; 0 is a document without sequences.
            modes: int8 [n], zeros when None.

        Raises:
            ValueError: a token or length does not fit, or the counts do not add up. Nothing is written.
        """
        self._check_open()
        lengths = np.asarray(sequence_lengths, dtype=np.int64).reshape(-1)
        per_document = np.asarray(sequences_per_document, dtype=np.int64).reshape(-1)
        modes = [0] * len(lengths) if modes is None else modes
        self._check_modes(modes)
        if self._open_items:
            raise ValueError("a document is open: call end_document before adding whole documents")
        if len(lengths) and lengths.min() < 0:
            raise ValueError(f"sequence lengths must not be negative, found {lengths.min()}")
        if per_document.sum() != len(lengths) or (len(per_document) and per_document.min() < 0):
            raise ValueError(
                f"the documents have {per_document.sum()} sequences, but {len(lengths)} lengths were given"
            )
        if np.size(modes) != len(lengths):
            raise ValueError(f"{np.size(modes)} modes were given for {len(lengths)} sequences")
        token_ends = np.concatenate(([0], np.cumsum(lengths)))
        flat = cast_tokens(tokens, self.dtype, self.num_documents, token_ends[np.cumsum(per_document)])
        if len(flat) != token_ends[-1]:
            raise ValueError(f"the sequence lengths add up to {token_ends[-1]}, but there are {len(flat)} tokens")
        self._append(flat, lengths, per_document, np.asarray(modes, dtype=np.int8))

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair of the same dtype.

        Raises:
            ValueError: its dtype differs.
            FormatError: it is damaged.
        """
        self._check_open()
        if self._open_items:
            raise ValueError("a document is open: call end_document before add_index")
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if other.dtype != self.dtype:
            raise ValueError(f"{other.path_prefix} holds {other.dtype.name}, this file {self.dtype.name}")
        index = other.index
        with self._fatal():
            sequences_before = len(self._lengths)
            for first in range(1, len(index.document_indices), _COPY_ITEMS):
                self._documents.extend(index.document_indices[first : first + _COPY_ITEMS] + sequences_before)
            self._lengths.extend(index.sequence_lengths)
            if index.sequence_modes is not None:
                self._modes.extend(index.sequence_modes)
            self._num_tokens += index.num_tokens
            copied = 0
            with open(get_bin_path(other.path_prefix), "rb") as source:
                while block := source.read(_COPY_BYTES):
                    self._output.file.write(block)
                    copied += len(block)
            if copied != other.bin_nbytes:
                raise FormatError(
                    f"{get_bin_path(other.path_prefix)}: changed while in use ({other.bin_nbytes} bytes when opened, "
                    f"{copied} were read)"
                )

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Write the index, make both files durable and give them their names.

        A crash in between leaves the old pair, or a ``.bin`` without an ``.idx``, which readers refuse; never a new
        file beside an old one.

        Raises:
            ValueError: a document is open.
        """
        self._check_open()
        if self._open_items:
            raise ValueError(f"{len(self._open_items)} items follow the last end_document; call it before finalize")
        path = os.fspath(idx_path)
        with self._fatal():
            index = TemporaryOutput(path)
            try:
                self._write_index(index)
                self._output.sync()
                index.sync()
                with locked_folder(path):
                    # The old index goes first: it must not be seen beside the new data, whose size may be the same.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    fsync_folder(path)
                    self._output.rename()
                    fsync_folder(self._bin_path)
                    index.rename()
                    fsync_folder(path)
            finally:
                index.discard()
        self.discard()

    def discard(self) -> None:
        """Give up: remove the temporary files. Nothing happens after ``finalize``."""
        self._closed = True
        self._output.discard()
        for spool in (self._lengths, self._documents, self._modes):
            spool.close()
        self._drop_open_document()

    def _write_index(self, output: TemporaryOutput) -> None:
        file = output.file
        file.write(Header(self.dtype, len(self._lengths), len(self._documents)).pack())
        for lengths in self._lengths.chunks():
            file.write(lengths.data)
        start = 0
        for lengths in self._lengths.chunks():
            for pointers in iter_pointers(lengths, self.dtype.itemsize, start):
                file.write(pointers.data)
            start += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        for documents in self._documents.chunks():
            file.write(documents.data)
        if self.multimodal:
            for modes in self._modes.chunks():
                file.write(modes.data)

    def _append(
        self,
        flat: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        per_document: npt.NDArray[np.int64],
        modes: npt.NDArray[np.int8],
    ) -> None:
        if len(lengths) and lengths.max() > MAX_SEQUENCE_LENGTH:
            raise ValueError(
                f"a sequence has {lengths.max()} tokens, the format stores at most {MAX_SEQUENCE_LENGTH}; split it"
            )
        with self._fatal():
            self._output.file.write(flat.data)
            self._documents.extend(len(self._lengths) + np.cumsum(per_document))
            self._lengths.extend(lengths)
            if self.multimodal:
                self._modes.extend(modes)
            self._num_tokens += len(flat)

    def _check_modes(self, modes: npt.ArrayLike) -> None:
        values = np.asarray(modes)
        if not values.size:
            return
        if not self.multimodal and values.any():
            raise ValueError("modes are stored only with multimodal=True")
        if values.min() < -128 or values.max() > 127:
            raise ValueError(f"modes must fit int8, found {values.min()} to {values.max()}")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the builder of {self._bin_path} is finished; make a new one")

    def _drop_open_document(self) -> None:
        self._open_items = []
        self._open_modes = []

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        # After a failed write the file and the counts no longer agree.
        try:
            yield
        except OSError as error:
            self.discard()
            # Failed writes do not know their file.
            raise OSError(error.errno, error.strerror, error.filename or self._bin_path) from error
        except BaseException:
            self.discard()
            raise
