"""``SampleReader``s over ``.bin/.idx`` files: fixed-length GPT samples, and runs of whole documents."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import DType, IndexedDataset
from tdp_megatron.indexed.pool import OPEN_FILES
from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["GPTArrays", "GPTReader", "RunReader", "TokenFileReader"]

_TOKEN_KEYS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"tokens": np.dtype(np.int64), "labels": np.dtype(np.int64), "loss_mask": np.dtype(np.float32)}
)
_WITH_POSITIONS = MappingProxyType({**_TOKEN_KEYS, "position_ids": np.dtype(np.int64)})
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class _Key:
    """Names a reader in the pool of open files."""


class TokenFileReader:
    """Turns parts of a ``.bin`` file into tokens, labels, loss mask and position ids, one native call per read.

    Subclasses say where the samples lie. ``position_ids`` is written when it is among the outputs; with
    ``reset_position_ids`` it is one of the reader's keys, otherwise positions just count.

    Args:
        dataset: the file.
        eod_mask_loss: token whose positions have no loss.
        reset_position_ids: token after which positions start again from 0.
        ignore_label: label of a token without a successor.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        eod_mask_loss: int | None = None,
        reset_position_ids: int | None = None,
        ignore_label: int = IGNORE_LABEL,
    ) -> None:
        if dataset.dtype.kind not in "iu":
            raise FormatError(f"{dataset.path_prefix}: dtype {dataset.dtype.name} holds no token ids, need an integer")
        self.dataset = dataset
        self._dtype_code = DType.code_from_dtype(dataset.dtype)
        self._rules = (
            ignore_label,
            -1 if eod_mask_loss is None else eod_mask_loss,
            -1 if reset_position_ids is None else reset_position_ids,
        )
        self._key = _Key()
        # What the pool keeps of this reader, its index arrays among it, must not outlive it.
        weakref.finalize(self, OPEN_FILES.discard, self._key).atexit = False

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        return _TOKEN_KEYS if self._rules[2] < 0 else _WITH_POSITIONS

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        return _NO_VALUES

    @property
    def raw_dtype(self) -> np.dtype[Any] | None:
        return self.dataset.dtype if self._rules[1] < 0 and self._rules[2] < 0 else None

    def read_raw(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: npt.NDArray[Any],
    ) -> Int64Array:
        offsets, counts, span_begin = self.native().pieces(sample_ids, starts, lengths)
        before = np.append(0, np.cumsum(counts))
        pieces = np.diff(span_begin)
        within = before[:-1] - np.repeat(before[span_begin[:-1]], pieces)
        item = self.dataset.dtype.itemsize
        targets = (np.repeat(destinations, pieces) + within) * item
        source = self.dataset.bin_bytes()
        if source is None:
            source = self.dataset.read_pieces(offsets, counts).view(np.uint8)
            offsets = before[:-1] * item
        _C.copy_spans(source, offsets, out.view(np.uint8), targets, counts * item)
        return np.diff(before[span_begin])

    def _make_native(self, source: npt.NDArray[np.uint8] | None) -> _C.SpanReader:
        """The native reader over a mapped file, or over none, which then only says where the tokens lie."""
        raise NotImplementedError

    def native(self) -> _C.SpanReader:
        """The native reader, from the pool of open files: it holds the maps of both files."""
        native: _C.SpanReader = OPEN_FILES.get(self._key, self._open_native)
        return native

    def _open_native(self) -> _C.SpanReader:
        return self._make_native(self.dataset.bin_bytes())

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        outputs = (out["tokens"], out["labels"], out["loss_mask"], out.get("position_ids"))
        native = self.native()
        if native.is_mapped:
            _C.read_spans([native], None, sample_ids, starts, lengths, destinations, *outputs)
            return
        # Positions that restart depend on what the sample holds in front of the span.
        lead = starts if self._rules[2] >= 0 and outputs[3] is not None else np.zeros_like(starts)
        # One token more than asked, where there is one: it is the last label.
        offsets, counts, span_begin = native.pieces(sample_ids, starts - lead, lengths + lead + 1)
        raw = self.dataset.read_pieces(offsets, counts).view(np.uint8)
        offsets = (np.cumsum(counts) - counts) * self.dataset.dtype.itemsize
        _C.gather_tokens(
            raw, self._dtype_code, offsets, counts, span_begin, starts, lengths, destinations, *outputs, *self._rules
        )


class GPTArrays(Protocol):
    """The three indices of fixed-length samples; see ``GPTIndices``."""

    @property
    def document_index(self) -> npt.NDArray[np.int32]: ...

    @property
    def sample_index(self) -> npt.NDArray[Any]: ...

    @property
    def shuffle_index(self) -> npt.NDArray[Any]: ...


class GPTReader(TokenFileReader):
    """Fixed-length samples in Megatron's order: sample i is row ``shuffle_index[i]`` of the sample index."""

    def __init__(
        self,
        dataset: IndexedDataset,
        indices: GPTArrays,
        extra_token: int,
        eod_mask_loss: int | None = None,
        reset_position_ids: int | None = None,
        ignore_label: int = IGNORE_LABEL,
    ) -> None:
        super().__init__(dataset, eod_mask_loss, reset_position_ids, ignore_label)
        self.indices = indices
        self._extra_token = extra_token

    def _make_native(self, source: npt.NDArray[np.uint8] | None) -> _C.SpanReader:
        index, indices = self.dataset.index, self.indices
        return _C.gpt_reader(
            source,
            self._dtype_code,
            index.sequence_lengths,
            index.sequence_pointers,
            indices.document_index,
            indices.sample_index,
            indices.shuffle_index,
            self._extra_token,
            *self._rules,
        )


class RunReader(TokenFileReader):
    """Samples that are runs of neighbouring tokens in the file: documents, or parts of them."""

    def __init__(
        self,
        dataset: IndexedDataset,
        byte_offsets: Int64Array,
        available: Int64Array,
        eod_mask_loss: int | None = None,
        reset_position_ids: int | None = None,
    ) -> None:
        """Args:
        dataset: the file.
        byte_offsets: int64 [n], where each sample begins in the ``.bin``.
        available: int64 [n], tokens of each sample's document from there on, those after the sample included.
        eod_mask_loss: token whose positions have no loss.
        reset_position_ids: token after which positions start again from 0.
        """
        super().__init__(dataset, eod_mask_loss, reset_position_ids)
        self._byte_offsets = byte_offsets
        self._available = available

    def _make_native(self, source: npt.NDArray[np.uint8] | None) -> _C.SpanReader:
        return _C.run_reader(source, self._dtype_code, self._byte_offsets, self._available, *self._rules)
