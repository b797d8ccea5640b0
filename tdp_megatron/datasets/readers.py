"""``SampleReader``s over ``.bin/.idx`` files: fixed-length GPT samples, and runs of whole documents."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.gpt_indices import GPTIndices
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import DType, IndexedDataset
from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["GPTReader", "RunReader"]

_TOKEN_KEYS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"tokens": np.dtype(np.int64), "labels": np.dtype(np.int64), "loss_mask": np.dtype(np.float32)}
)
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class _TokenFileReader:
    """Turns pieces of a ``.bin`` file into tokens, labels and loss mask; subclasses say which pieces."""

    def __init__(self, dataset: IndexedDataset, eod_mask_loss: int | None) -> None:
        if dataset.dtype.kind not in "iu":
            raise FormatError(f"{dataset.path_prefix}: dtype {dataset.dtype.name} holds no token ids, need an integer")
        self.dataset = dataset
        self._dtype_code = DType.code_from_dtype(dataset.dtype)
        self._eod = -1 if eod_mask_loss is None else eod_mask_loss

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        return _TOKEN_KEYS

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        return _NO_VALUES

    def _pieces(
        self, sample_ids: Int64Array, starts: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Byte offsets and token counts of the pieces, and where each span's pieces begin ([n + 1])."""
        raise NotImplementedError

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        # One token more than asked, where there is one: it is the last label.
        offsets, counts, span_begin = self._pieces(sample_ids, starts, lengths + 1)
        source = self.dataset.bin_bytes()
        if source is None:
            raw = self.dataset.read_pieces(offsets, counts)
            source = raw.view(np.uint8)
            offsets = (np.cumsum(counts) - counts) * self.dataset.dtype.itemsize
        _C.gather_tokens(
            source,
            self._dtype_code,
            offsets,
            counts,
            span_begin,
            lengths,
            destinations,
            out["tokens"],
            out["labels"],
            out["loss_mask"],
            IGNORE_LABEL,
            self._eod,
        )


class GPTReader(_TokenFileReader):
    """Fixed-length samples in Megatron's order: sample i is row ``shuffle_index[i]`` of the sample index."""

    def __init__(
        self, dataset: IndexedDataset, indices: GPTIndices, extra_token: int, eod_mask_loss: int | None = None
    ) -> None:
        super().__init__(dataset, eod_mask_loss)
        self.indices = indices
        self._extra_token = extra_token

    def _pieces(
        self, sample_ids: Int64Array, starts: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        dataset = self.dataset
        return _C.sample_pieces(
            dataset.sequence_lengths,
            dataset.sequence_pointers,
            self.indices.document_index,
            self.indices.sample_index,
            self._extra_token,
            dataset.dtype.itemsize,
            self.indices.shuffle_index[sample_ids].astype(np.int64),
            starts,
            lengths,
        )


class RunReader(_TokenFileReader):
    """Samples that are runs of neighbouring tokens in the file: documents, or parts of them."""

    def __init__(
        self,
        dataset: IndexedDataset,
        byte_offsets: Int64Array,
        available: Int64Array,
        eod_mask_loss: int | None = None,
    ) -> None:
        """Args:
        dataset: the file.
        byte_offsets: int64 [n], where each sample begins in the ``.bin``.
        available: int64 [n], tokens of each sample's document from there on, those after the sample included.
        eod_mask_loss: token whose positions have no loss.
        """
        super().__init__(dataset, eod_mask_loss)
        self._byte_offsets = byte_offsets
        self._available = available

    def _pieces(
        self, sample_ids: Int64Array, starts: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        offsets = self._byte_offsets[sample_ids] + starts * self.dataset.dtype.itemsize
        counts = np.minimum(lengths, self._available[sample_ids] - starts)
        return offsets, counts, np.arange(len(sample_ids) + 1, dtype=np.int64)
