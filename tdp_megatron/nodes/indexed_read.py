"""``IndexedRead``: the sequences of a ``.bin/.idx`` pair, or of one split of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tdp_megatron.datasets.readers import RunReader
from tdp_megatron.datasets.splits import parse_split, split_bounds
from tdp_megatron.indexed import IndexedDataset, ObjectStorageConfig, check_vocab, is_object_storage_path
from tdp_megatron.indexed.expectations import SequencesPerDataset
from tdp_megatron.nodes.base import SampleSource
from tdp_megatron.types import Int64Array, SampleBlock

__all__ = ["IndexedRead"]

_CRC_TOKENS = 1024


class IndexedRead(SampleSource):
    """Sequences in file order, one sample each; what ``GPTSample`` and ``DocumentSample`` draw from.

    Args:
        path_prefix: the files' path without ``.bin`` or ``.idx``.
        split: Megatron's split string.
        split_name: ``train``, ``valid`` or ``test``.
        mmap: read through a memory map; otherwise with positioned reads. Object storage (``s3://``, ``msc://``) is
            never mapped.
        vocab_size: when given, a file whose dtype cannot come from that vocabulary is refused.
        object_storage_config: where the index of object storage is kept and how the data is read.
        sequences_per_dataset: counts and sizes of the file, or of many by prefix, as ``tdp sequences --with-sizes``
            writes them: then ``GPTSample`` with ``order="instant"`` opens nothing before the first token is needed.

    Raises:
        ValueError: a bad split; when the file is opened, a dtype that cannot come from ``vocab_size``.
        FormatError: when the file is opened, it is damaged or none of the format.
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        *,
        split: str = "1,0,0",
        split_name: str = "train",
        mmap: bool = True,
        vocab_size: int | None = None,
        object_storage_config: ObjectStorageConfig | None = None,
        sequences_per_dataset: SequencesPerDataset | None = None,
    ) -> None:
        super().__init__()
        parse_split(split)
        split_bounds(split, split_name, 0)
        self.path_prefix = os.fspath(path_prefix)
        self.split = split
        self.split_name = split_name
        self.mmap = mmap and not is_object_storage_path(self.path_prefix)
        self.object_storage_config = object_storage_config
        self.vocab_size = vocab_size
        entry = sequences_per_dataset
        if isinstance(entry, Mapping):  # of all files: only this one's is kept
            entry = {self.path_prefix: entry[self.path_prefix]} if self.path_prefix in entry else {}
        self._known = entry
        self._dataset: IndexedDataset | None = None
        self._reader: RunReader | None = None

    @property
    def dataset(self) -> IndexedDataset:
        """The file, opened at the first use."""
        if self._dataset is None:
            dataset = IndexedDataset(
                self.path_prefix,
                mmap=self.mmap,
                object_storage_config=self.object_storage_config,
                fast_cache_load=self._known is not None,
                sequences_per_dataset=self._known,
            )
            if self.vocab_size is not None:
                check_vocab(dataset, self.vocab_size)
            self._dataset = dataset
        return self._dataset

    @property
    def bounds(self) -> tuple[int, int]:
        """First and one-past-last sequence of the split."""
        return split_bounds(self.split, self.split_name, len(self.dataset))

    @property
    def label(self) -> str:
        """What error messages call this data."""
        return f"{self.path_prefix} (split {self.split!r}, {self.split_name})"

    def fingerprint(self) -> dict[str, Any]:
        dataset = self.dataset
        if self._known is None:
            facts = dataset.fingerprint()
        else:  # what is known without opening the file
            facts = {"sequences": len(dataset), "tokens": dataset.num_tokens, "dtype": dataset.dtype.name}
        return {"split": self.split, "split_name": self.split_name, **facts}

    def tokens_crc32(self) -> int | None:
        """A CRC of the first and last tokens of the split: files of the same lengths are told apart by it.

        Returns:
            None where that would read from object storage, or open a file whose counts are known.
        """
        if self._known is not None or is_object_storage_path(self.path_prefix):
            return None
        begin, end = self.bounds
        if begin == end:
            return 0
        pointers, itemsize = self.dataset.sequence_pointers, self.dataset.dtype.itemsize
        first, last = (
            int(pointers[begin]),
            int(pointers[end - 1]) + int(self.dataset.sequence_lengths[end - 1]) * itemsize,
        )
        count = min(_CRC_TOKENS, (last - first) // itemsize)
        offsets = np.array([first, last - count * itemsize], dtype=np.int64)
        return zlib.crc32(self.dataset.read_pieces(offsets, np.full(2, count, dtype=np.int64)).tobytes())

    def _open(self) -> None:
        begin, end = self.bounds
        pointers = np.array(self.dataset.sequence_pointers[begin:end], dtype=np.int64)
        self._seqlens = np.array(self.dataset.sequence_lengths[begin:end], dtype=np.int64)
        self._reader = RunReader(self.dataset, pointers, self._seqlens)

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        if position > len(self._seqlens):
            raise ValueError(f"{self.label}: position {position} is past the {len(self._seqlens)} sequences")

    def num_remaining(self) -> int | None:
        return len(self._seqlens) - self._position

    def _skip(self, n: int) -> None:
        """The position is all there is."""

    def _take(self, n: int) -> SampleBlock:
        assert self._reader is not None
        ids: Int64Array = np.arange(self._position, min(self._position + n, len(self._seqlens)), dtype=np.int64)
        seqlens = self._seqlens[ids]
        begin, _ = self.bounds
        return SampleBlock(
            readers=(self._reader,),
            reader_index=np.zeros(len(ids), dtype=np.int64),
            sample_ids=ids,
            seqlens=seqlens,
            num_loss_tokens=np.maximum(seqlens - 1, 0),
            refs=np.stack([np.zeros_like(ids), begin + ids], axis=1),
        )
