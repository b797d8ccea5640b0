"""What travels between two ranks: which spans, in which order, in which bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.distributed.token_form import TokenForm
from tdp_megatron.distributed.wire import WireSchema
from tdp_megatron.ops import PackTable
from tdp_megatron.samples import FlatSamples
from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["GlobalSamples", "Parcel", "ParcelLayout", "SpanRequest"]


@dataclass(frozen=True, slots=True)
class GlobalSamples:
    """What all ranks know of a global batch's samples after the lengths have been gathered.

    Sample numbers go round the ranks: the first sample of rank 0, of rank 1, ..., then the second ones. A source that
    deals one global order out to the ranks therefore keeps that order.
    """

    seqlens: Int64Array
    num_loss_tokens: Int64Array
    refs: Int64Array
    """int64 [N, 2]."""
    owner: Int64Array
    """int64 [N], rank that has read the sample."""
    local_index: Int64Array
    """int64 [N], its place among that rank's samples."""
    value_bytes: Int64Array
    """int64 [N], encoded size of its per-sample values."""
    facts: Int64Array
    """int64 [N], what the ranks gave as ``facts``."""
    has_next: Int64Array
    """int64 [N], 1 where the sample knows the token that follows its last one."""
    ended: bool
    """Whether the data ended, on all ranks, with these samples."""

    def __len__(self) -> int:
        return len(self.seqlens)


@dataclass(frozen=True, slots=True)
class SpanRequest:
    """What one rank wants: spans of samples, and where in its arrays they go."""

    sample_ids: Int64Array
    """int64 [n], numbers in the global batch; entries without a token may be -1."""
    starts: Int64Array
    """int64 [n], tokens from the start of the sample."""
    lengths: Int64Array
    """int64 [n], tokens."""
    destinations: Int64Array
    """int64 [n], elements."""
    held: Int64Array
    """int64 [h], samples whose per-sample values are wanted."""

    @staticmethod
    def of(table: PackTable) -> SpanRequest:
        """The real tokens of a rank's packs."""
        return SpanRequest(table.sample_ids, table.starts, table.lengths, table.destinations, table.held)

    @staticmethod
    def whole(sample_ids: Int64Array, seqlens: Int64Array) -> SpanRequest:
        """Whole samples, one after the other.

        Args:
            sample_ids: int64 [n].
            seqlens: int64 [n], their lengths, tokens.
        """
        return SpanRequest(sample_ids, np.zeros_like(seqlens), seqlens, np.cumsum(seqlens) - seqlens, sample_ids)


@dataclass(frozen=True, slots=True)
class Parcel:
    """The part of a request that one rank sends, in the order of the request."""

    sample_ids: Int64Array
    starts: Int64Array
    lengths: Int64Array
    destinations: Int64Array
    follows: Int64Array
    """int64 [n], 1 where the token after the span is known: a later one of the sample, or its last label."""
    at_end: npt.NDArray[np.bool_]
    """[n], whether the span ends its sample."""
    value_ids: Int64Array
    """Samples whose per-sample values travel."""
    value_bytes: Int64Array

    @staticmethod
    def of(request: SpanRequest, samples: GlobalSamples, sender: int) -> Parcel:
        """What ``sender`` contributes to a request."""
        rows = np.flatnonzero(request.lengths > 0)
        rows = rows[samples.owner[request.sample_ids[rows]] == sender]
        held = request.held[samples.owner[request.held] == sender]
        ids = request.sample_ids[rows]
        at_end = request.starts[rows] + request.lengths[rows] == samples.seqlens[ids]
        return Parcel(
            ids,
            request.starts[rows],
            request.lengths[rows],
            request.destinations[rows],
            np.where(at_end, samples.has_next[ids], 1),
            at_end,
            held,
            samples.value_bytes[held],
        )


class ParcelLayout:
    """Where in a parcel's bytes what lies: derived tokens, binary loss mask, other keys one by one, values.

    Args:
        form: how the standard keys travel.
        schema: all per-token keys.
    """

    def __init__(self, form: TokenForm, schema: WireSchema) -> None:
        self.form = form
        self.raw = [(key, schema.token_bytes(key)) for key, _ in schema.keys if form.is_sent_raw(key)]
        self._raw_bytes = sum(width for _, width in self.raw)

    def size(self, parcel: Parcel) -> int:
        """Bytes of a parcel."""
        tokens = int(parcel.lengths.sum())
        return self._stream_bytes(parcel) + tokens * self._raw_bytes + int(parcel.value_bytes.sum())

    def _stream_bytes(self, parcel: Parcel) -> int:
        tokens = int(parcel.lengths.sum())
        size = tokens if self.form.loss == "binary" else 0
        if self.form.derived_labels:
            size += (tokens + int(parcel.follows.sum())) * self.form.dtype.itemsize
        return size

    def _places(
        self, parcels: Sequence[Parcel], sizes: Sequence[int]
    ) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
        """Byte offsets of all spans in the joined parcels: of derived tokens, of binary loss, of each raw key."""
        item = self.form.dtype.itemsize
        streams: list[Int64Array] = []
        losses: list[Int64Array] = []
        raws: dict[str, list[Int64Array]] = {key: [] for key, _ in self.raw}
        begin = 0
        for parcel, size in zip(parcels, sizes, strict=True):
            at = begin
            before = np.cumsum(parcel.lengths) - parcel.lengths
            tokens = int(parcel.lengths.sum())
            if self.form.derived_labels:
                wide = parcel.lengths + parcel.follows
                streams.append(at + (np.cumsum(wide) - wide) * item)
                at += int(wide.sum()) * item
            if self.form.loss == "binary":
                losses.append(at + before)
                at += tokens
            for key, width in self.raw:
                raws[key].append(at + before * width)
                at += tokens * width
            begin += size
        return _join(streams), _join(losses), {key: _join(parts) for key, parts in raws.items()}

    def pack_tokens(
        self,
        parcels: Sequence[Parcel],
        sizes: Sequence[int],
        samples: GlobalSamples,
        local: FlatSamples,
        last_labels: Int64Array,
        send: npt.NDArray[np.uint8],
    ) -> None:
        """Write the per-token keys of all parcels this rank sends."""
        streams, losses, raws = self._places(parcels, sizes)
        lengths = _join([p.lengths for p in parcels])
        sample = samples.local_index[_join([p.sample_ids for p in parcels])]
        begins = local.offsets[sample] + _join([p.starts for p in parcels])
        if self.form.derived_labels:
            item = self.form.dtype.itemsize
            at_end = _join([p.at_end for p in parcels])
            # Inside a sample the next token lies behind the span; at its end it is the last label.
            counts = lengths + ~at_end
            narrow = local.arrays["tokens"].astype(self.form.dtype)
            _C.copy_spans(_as_bytes(narrow), begins * item, send, streams, counts * item)
            ends = np.flatnonzero(at_end & (_join([p.follows for p in parcels]) > 0))
            labels = np.where(last_labels >= 0, last_labels, 0).astype(self.form.dtype)
            _C.copy_spans(
                _as_bytes(labels),
                sample[ends] * item,
                send,
                streams[ends] + lengths[ends] * item,
                np.full(len(ends), item, dtype=np.int64),
            )
        if self.form.loss == "binary":
            mask = local.arrays["loss_mask"].astype(np.uint8)
            _C.copy_spans(mask, begins, send, losses, lengths)
        for key, width in self.raw:
            _C.copy_spans(_as_bytes(local.arrays[key]), begins * width, send, raws[key], lengths * width)

    def unpack_tokens(
        self,
        parcels: Sequence[Parcel],
        sizes: Sequence[int],
        received: npt.NDArray[np.uint8],
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Write the per-token keys of all parcels this rank has received to their places.

        Positions that count up are not touched: ``out`` holds them already.
        """
        streams, losses, raws = self._places(parcels, sizes)
        lengths = _join([p.lengths for p in parcels])
        destinations = _join([p.destinations for p in parcels])
        if self.form.derived_labels:
            _C.gather_tokens(
                received,
                self.form.dtype_code,
                streams,
                lengths + _join([p.follows for p in parcels]),
                np.arange(len(lengths) + 1, dtype=np.int64),
                lengths,
                destinations,
                out["tokens"],
                out["labels"],
                out["loss_mask"],
                IGNORE_LABEL,
                -1,
            )
        if self.form.loss == "binary":
            mask = np.zeros(len(out["loss_mask"]), dtype=np.uint8)
            _C.copy_spans(received, losses, mask, destinations, lengths)
            out["loss_mask"][:] = mask
        for key, width in self.raw:
            _C.copy_spans(received, raws[key], _as_bytes(out[key]), destinations * width, lengths * width)
        if self.form.labels_need_loss:
            out["labels"][out["loss_mask"] == 0] = IGNORE_LABEL


def _join(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
