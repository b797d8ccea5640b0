"""What travels between two ranks: which spans, in which order, in which bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.distributed.token_form import TokenForm
from tdp_megatron.distributed.wire import WireSchema
from tdp_megatron.ops import RankSpans
from tdp_megatron.reading import FlatSamples
from tdp_megatron.samples import as_bytes
from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["GlobalSamples", "ParcelLayout", "Parcels"]


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
    """int64 [N, F], what the ranks gave as ``facts``."""
    has_next: Int64Array
    """int64 [N], 1 where the sample knows the token that follows its last one."""
    value_keys: Int64Array
    """int64 [N], a digest of the names of its per-sample values, 0 for none."""
    ended: bool
    """Whether the data ended, on all ranks, with these samples."""

    def __len__(self) -> int:
        return len(self.seqlens)


@dataclass(frozen=True, slots=True)
class Parcels:
    """What one rank sends to, or receives from, all others: spans sorted by the other rank, in the receiver's order."""

    peer: Int64Array
    """int64 [n], the other rank; never falling."""
    sample_ids: Int64Array
    starts: Int64Array
    lengths: Int64Array
    destinations: Int64Array
    follows: Int64Array
    """int64 [n], 1 where the token after the span is known: a later one of the sample, or its last label."""
    value_peer: Int64Array
    """int64 [v], never falling."""
    value_ids: Int64Array
    """int64 [v], samples whose per-sample values travel."""
    value_bytes: Int64Array
    """int64 [v]."""

    @staticmethod
    def sent(spans: RankSpans, samples: GlobalSamples, sender: int) -> Parcels:
        """What ``sender`` sends."""
        rows = np.flatnonzero(samples.owner[spans.sample_ids] == sender)
        held = np.flatnonzero(samples.owner[spans.held] == sender)
        return Parcels._of(spans, samples, rows, spans.rank[rows], held, spans.held_rank[held])

    @staticmethod
    def received(spans: RankSpans, samples: GlobalSamples, receiver: int) -> Parcels:
        """What ``receiver`` receives."""
        rows = np.flatnonzero(spans.rank == receiver)
        rows = rows[np.argsort(samples.owner[spans.sample_ids[rows]], kind="stable")]
        held = np.flatnonzero(spans.held_rank == receiver)
        held = held[np.argsort(samples.owner[spans.held[held]], kind="stable")]
        return Parcels._of(
            spans, samples, rows, samples.owner[spans.sample_ids[rows]], held, samples.owner[spans.held[held]]
        )

    @staticmethod
    def _of(
        spans: RankSpans,
        samples: GlobalSamples,
        rows: Int64Array,
        peer: Int64Array,
        held: Int64Array,
        value_peer: Int64Array,
    ) -> Parcels:
        ids = spans.sample_ids[rows]
        at_end = spans.starts[rows] + spans.lengths[rows] == samples.seqlens[ids]
        value_ids = spans.held[held]
        return Parcels(
            peer,
            ids,
            spans.starts[rows],
            spans.lengths[rows],
            spans.destinations[rows],
            np.where(at_end, samples.has_next[ids], 1),
            value_peer,
            value_ids,
            samples.value_bytes[value_ids],
        )


def _sums(values: Int64Array, peer: Int64Array, num_ranks: int) -> Int64Array:
    """Sum of ``values`` per peer, int64 [R]; exact, unlike a weighted bincount."""
    running = np.concatenate([[0], np.cumsum(values)])
    edges = np.searchsorted(peer, np.arange(num_ranks + 1))
    sums: Int64Array = running[edges[1:]] - running[edges[:-1]]
    return sums


def _before(values: Int64Array, peer: Int64Array) -> Int64Array:
    """Sum of the earlier values of the same peer, int64 [n]."""
    running = np.cumsum(values) - values
    first = np.searchsorted(peer, peer)
    before: Int64Array = running - running[first]
    return before


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

    def sizes(self, parcels: Parcels, num_ranks: int) -> Int64Array:
        """Bytes for, or from, each rank, int64 [R]."""
        tokens = _sums(parcels.lengths, parcels.peer, num_ranks)
        values = _sums(parcels.value_bytes, parcels.value_peer, num_ranks)
        sizes: Int64Array = self._stream_bytes(parcels, num_ranks) + tokens * self._raw_bytes + values
        return sizes

    def _stream_bytes(self, parcels: Parcels, num_ranks: int) -> Int64Array:
        tokens = _sums(parcels.lengths, parcels.peer, num_ranks)
        size = tokens if self.form.loss == "binary" else np.zeros_like(tokens)
        if self.form.derived_labels:
            size = size + (tokens + _sums(parcels.follows, parcels.peer, num_ranks)) * self.form.dtype.itemsize
        return size

    def _places(self, parcels: Parcels, sizes: Int64Array) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
        """Byte offsets of all spans in the joined parcels: of derived tokens, of binary loss, of each raw key."""
        num_ranks = len(sizes)
        peer = parcels.peer
        begins = np.cumsum(sizes) - sizes
        tokens = _sums(parcels.lengths, peer, num_ranks)
        before = _before(parcels.lengths, peer)
        at = begins
        streams = losses = np.zeros(0, dtype=np.int64)
        if self.form.derived_labels:
            item = self.form.dtype.itemsize
            wide = parcels.lengths + parcels.follows
            streams = at[peer] + _before(wide, peer) * item
            at = at + _sums(wide, peer, num_ranks) * item
        if self.form.loss == "binary":
            losses = at[peer] + before
            at = at + tokens
        raws: dict[str, Int64Array] = {}
        for key, width in self.raw:
            raws[key] = at[peer] + before * width
            at = at + tokens * width
        return streams, losses, raws

    def pack_tokens(
        self,
        parcels: Parcels,
        sizes: Int64Array,
        samples: GlobalSamples,
        local: FlatSamples,
        last_labels: Int64Array,
        send: npt.NDArray[np.uint8],
    ) -> None:
        """Write the per-token keys of all parcels this rank sends."""
        streams, losses, raws = self._places(parcels, sizes)
        starts, lengths = parcels.starts, parcels.lengths
        sample = samples.local_index[parcels.sample_ids]
        if self.form.derived_labels:
            local.columns["tokens"].narrow_spans(
                self.form.dtype_code, sample, starts, lengths, parcels.follows, last_labels, send, streams
            )
        if self.form.loss == "binary":
            mask = _C.Column(local.joined("loss_mask").astype(np.uint8), local.block.seqlens)
            mask.copy_spans(sample, starts, lengths, send, losses)
        for key, _ in self.raw:
            local.columns[key].copy_spans(sample, starts, lengths, send, raws[key])

    def unpack_tokens(
        self,
        parcels: Parcels,
        sizes: Int64Array,
        received: npt.NDArray[np.uint8],
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Write the per-token keys of all parcels this rank has received to their places.

        Positions that count up are not touched: ``out`` holds them already.
        """
        if "tokens" not in out:  # no rank has had a sample so far, so that not even the keys are known
            return
        streams, losses, raws = self._places(parcels, sizes)
        lengths, destinations = parcels.lengths, parcels.destinations
        if self.form.derived_labels:
            _C.gather_tokens(
                received,
                self.form.dtype_code,
                streams,
                lengths + parcels.follows,
                np.arange(len(lengths) + 1, dtype=np.int64),
                parcels.starts,
                lengths,
                destinations,
                out["tokens"],
                out["labels"],
                out["loss_mask"],
                None,
                IGNORE_LABEL,
                -1,
                -1,
            )
        if self.form.loss == "binary":
            mask = np.zeros(len(out["loss_mask"]), dtype=np.uint8)
            _C.copy_spans(received, losses, mask, destinations, lengths)
            out["loss_mask"][:] = mask
        for key, width in self.raw:
            _C.copy_spans(received, raws[key], as_bytes(out[key]), destinations * width, lengths * width)
        if self.form.labels_need_loss:
            out["labels"][out["loss_mask"] == 0] = IGNORE_LABEL
