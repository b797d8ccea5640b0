"""Samples that know their length before they are read: readers, one sample, a block of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["UNKNOWN_LOSS_TOKENS", "Int64Array", "RawTokenReader", "Sample", "SampleBlock", "SampleReader", "SampleRef"]

Int64Array: TypeAlias = npt.NDArray[np.int64]
SampleRef: TypeAlias = tuple[int, int]

#: ``num_loss_tokens`` of a sample whose loss mask depends on its content, which is not read yet.
UNKNOWN_LOSS_TOKENS = -1


class SampleReader(Protocol):
    """Random access to the tokens of many samples; what a lazy sample keeps instead of its tokens.

    A *span* is the part ``[start, start + length)`` of one sample. One call reads many spans, straight into the
    caller's memory.
    """

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        """Per-token keys and their dtypes. ``tokens``, ``labels`` (int64) and ``loss_mask`` (float32) come first."""
        ...

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Write span i of every key in ``out`` to ``out[key][destinations[i] : destinations[i] + lengths[i]]``.

        Args:
            sample_ids: int64 [n].
            starts: int64 [n], tokens from the start of the sample.
            lengths: int64 [n], tokens.
            destinations: int64 [n], elements.
            out: one flat array per wanted key, of the dtype ``token_keys`` names.
        """
        ...

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        """The keys that are not per token (user keys); empty for token files."""
        ...


@runtime_checkable
class RawTokenReader(SampleReader, Protocol):
    """A reader that also gives the tokens as they lie in the file."""

    @property
    def raw_dtype(self) -> np.dtype[Any] | None:
        """Dtype of the file; None where labels, loss mask and positions depend on more than the place of a token."""
        ...

    def read_raw(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: npt.NDArray[Any],
    ) -> Int64Array:
        """Write the tokens of span i to ``out[destinations[i] : ...]``; see ``read_spans``.

        Args:
            sample_ids, starts, lengths, destinations: int64 [n]; a span may reach over the end of its sample, to the
                token that is its last label.
            out: flat, of dtype ``raw_dtype``.

        Returns:
            int64 [n], tokens there are of each span.
        """
        ...


class Sample(Mapping[str, Any]):
    """One training sample, a read-only mapping whose tokens are read when they are first touched.

    Keys: ``tokens``, ``labels``, ``position_ids`` int64 [S], ``loss_mask`` float32 [S], and the reader's own.
    Values are torch tensors.
    """

    __slots__ = ("_reader", "_sample_id", "_values", "num_loss_tokens", "ref", "seqlen")

    def __init__(
        self,
        reader: SampleReader,
        sample_id: int,
        seqlen: int,
        ref: SampleRef,
        num_loss_tokens: int = UNKNOWN_LOSS_TOKENS,
    ) -> None:
        self._reader = reader
        self._sample_id = sample_id
        self._values: dict[str, Any] | None = None
        self.seqlen = seqlen
        """Tokens, known without reading."""
        self.ref = ref
        """Where it comes from: (dataset_id, sample_id)."""
        self.num_loss_tokens = num_loss_tokens
        """Positions with a loss, or -1 when only the content tells."""

    @property
    def reader(self) -> SampleReader:
        """What reads this sample's tokens."""
        return self._reader

    @property
    def sample_id(self) -> int:
        """This sample's number inside its reader."""
        return self._sample_id

    @property
    def is_materialised(self) -> bool:
        """Whether the tokens have been read already."""
        return self._values is not None

    def _load(self) -> dict[str, Any]:
        if self._values is None:
            import torch

            from tdp_megatron.torch_dtypes import tensor_of

            # Users' samples may have several numbers per token.
            shape_of = getattr(self._reader, "token_shape", lambda key: ())
            arrays = {
                key: np.zeros((self.seqlen, *shape_of(key)), dtype=dtype)
                for key, dtype in self._reader.token_keys.items()
            }
            one = np.zeros(1, dtype=np.int64)
            self._reader.read_spans(
                np.array([self._sample_id], dtype=np.int64),
                one,
                np.array([self.seqlen], dtype=np.int64),
                one,
                arrays,
            )
            values: dict[str, Any] = {key: tensor_of(array) for key, array in arrays.items()}
            values.setdefault("position_ids", torch.arange(self.seqlen))
            values.update(self._reader.sample_values(self._sample_id))
            self._values = values
        return self._values

    def __getitem__(self, key: str) -> Any:
        return self._load()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def __contains__(self, key: object) -> bool:
        return key in self._load()

    def __repr__(self) -> str:
        state = "read" if self.is_materialised else "lazy"
        return f"Sample(ref={self.ref}, seqlen={self.seqlen}, {state})"


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Many samples as arrays, so that planning a global batch costs no Python loop per sample.

    Sample i is ``readers[reader_index[i]]``'s sample ``sample_ids[i]``.
    """

    readers: tuple[SampleReader, ...]
    reader_index: Int64Array
    """int64 [n], index into ``readers``."""
    sample_ids: Int64Array
    """int64 [n], the sample's number inside its reader."""
    seqlens: Int64Array
    """int64 [n], tokens."""
    num_loss_tokens: Int64Array
    """int64 [n], positions with a loss, -1 where only the content tells."""
    refs: Int64Array
    """int64 [n, 2], (dataset_id, sample_id)."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> Sample:
        return Sample(
            self.readers[int(self.reader_index[index])],
            int(self.sample_ids[index]),
            int(self.seqlens[index]),
            (int(self.refs[index, 0]), int(self.refs[index, 1])),
            int(self.num_loss_tokens[index]),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Int64Array | slice) -> SampleBlock:
        """The samples at ``indices``, in that order; with a slice views, no copies."""
        return SampleBlock(
            self.readers,
            self.reader_index[indices],
            self.sample_ids[indices],
            self.seqlens[indices],
            self.num_loss_tokens[indices],
            self.refs[indices],
        )

    def without_idle_readers(self) -> SampleBlock:
        """The same samples; readers of none of them are let go, with the samples they may hold in memory."""
        used = np.unique(self.reader_index)
        if len(used) == len(self.readers):
            return self
        place = np.zeros(len(self.readers), dtype=np.int64)
        place[used] = np.arange(len(used))
        return replace(
            self, readers=tuple(self.readers[i] for i in used.tolist()), reader_index=place[self.reader_index]
        )

    @staticmethod
    def concatenate(blocks: Sequence[SampleBlock]) -> SampleBlock:
        """One block after the other; readers that are the same object are kept once."""
        readers: list[SampleReader] = []
        place: dict[int, int] = {}
        index_parts: list[Int64Array] = []
        for block in blocks:
            mapping = np.empty(len(block.readers), dtype=np.int64)
            for i, reader in enumerate(block.readers):
                if id(reader) not in place:
                    place[id(reader)] = len(readers)
                    readers.append(reader)
                mapping[i] = place[id(reader)]
            index_parts.append(mapping[block.reader_index])
        empty = np.zeros(0, dtype=np.int64)

        def join(parts: list[Int64Array], nothing: Int64Array) -> Int64Array:
            return np.concatenate(parts) if parts else nothing

        return SampleBlock(
            tuple(readers),
            join(index_parts, empty),
            join([b.sample_ids for b in blocks], empty),
            join([b.seqlens for b in blocks], empty),
            join([b.num_loss_tokens for b in blocks], empty),
            join([b.refs for b in blocks], empty.reshape(0, 2)),
        )
