"""Rerouting samples that each rank reads for itself: gather the lengths, then one all-to-all of bytes.

Every step begins with one small gather in which a rank also says that it failed or that its data ended, so that all
ranks end together, with the same first cause.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.distributed.collectives import all_gather_rows, all_to_all_bytes, gather_texts
from tdp_megatron.distributed.groups import DpCpGroups
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.parcels import GlobalSamples, ParcelLayout, Parcels
from tdp_megatron.distributed.sample_keys import require_equal_value_keys, value_key_digests
from tdp_megatron.distributed.token_form import NOTHING_TO_SEND, TokenForm
from tdp_megatron.distributed.values import decode_values, encode_values
from tdp_megatron.distributed.wire import WireSchema, different_keys
from tdp_megatron.errors import ExchangeError
from tdp_megatron.ops import PackBuffers, PackTable, RankSpans, allocate_pack, build_tables
from tdp_megatron.ops.buffer_pool import BufferPool
from tdp_megatron.reading import FlatSamples
from tdp_megatron.samples import TokenFacts
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["Exchange", "GlobalSamples", "digest_of"]

_POOL = BufferPool(8)
_NO_SAMPLES = TokenFacts(NOTHING_TO_SEND, 0, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
#: count, missing, failed, digest of the keys, bits, largest token id, facts per sample, digest of the place, and of
#: what is shared with neighbours
_HEADER = 9
#: length, loss tokens, dataset, sample, bytes of values, order, whether the next token is known, keys; then the facts
_COLUMNS = 8
_ORDER = 5


class Exchange:
    """Rerouting by all-to-all among the ranks of ``groups``; used from one thread, in step order."""

    def __init__(self, groups: DpCpGroups | HostGroup) -> None:
        self.host = groups if isinstance(groups, HostGroup) else groups.data
        self._schemas: dict[int, WireSchema] = {}
        self._agreed: set[int] = set()
        self._schema = WireSchema(())
        self._encoded: list[bytes] = []
        self._form = TokenForm.agree(np.array([0]), np.array([0]))
        self._last_labels: Int64Array = np.zeros(0, dtype=np.int64)
        self._room = 0
        """Numbers that travel with the header, whoever gathers: ranks may differ in how many each sample has."""
        self.bytes_sent = 0
        """Bytes of samples sent to other ranks so far."""

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return self.host.size

    def gather(
        self,
        step: int,
        local: FlatSamples | None,
        missing: int,
        *,
        order: Int64Array | None = None,
        facts: Int64Array | None = None,
        num_facts: int = 0,
        error: Exception | None = None,
        has_more: Callable[[], bool] = lambda: False,
        place: str = "",
        planned_by: Mapping[str, Any] | None = None,
        shared: tuple[int, int] = (1, 0),
    ) -> GlobalSamples:
        """Tell all ranks what this one has read, and learn what they have.

        Args:
            step: number of the global batch, for messages.
            local: this rank's samples; None when reading failed.
            missing: how many items this rank's data ended short of a full step; 0 while it goes on.
            order: int64 [n], sort keys that number the samples of all ranks; None goes round the ranks.
            facts: int64 [n, num_facts], further numbers of each sample that all ranks learn; None when reading failed.
            num_facts: how many, the same on all ranks.
            error: why reading failed.
            has_more: called when some rank's data ended: whether this rank could read on.
            place: what this rank reads in this step, in words that must be alike on all ranks.
            planned_by: what the plan will depend on beside the samples, by name; must be alike on all ranks, whose
                bytes would otherwise not fit together.
            shared: how many neighbouring ranks share out what each of them has read, and a number that tells whether
                they have read the same.

        Returns:
            The samples of all ranks. When the data ended on all of them together, ``ended`` is set.

        Raises:
            ExchangeError: a rank failed, its data ended before the others', or what must be alike on ranks is not.
        """
        self.host.begin_step(step)
        digest, facts_of_tokens = 0, _NO_SAMPLES
        if local is not None and error is None:
            try:
                digest = self._prepare(local)
                if len(local.block):
                    facts_of_tokens = local.facts
            except Exception as failure:
                error = failure
        count = 0 if local is None or error is not None else len(local.block)
        what = f"step {step}: gathering lengths"
        failed = int(error is not None)
        header = [count, missing, failed, digest, facts_of_tokens.bits, facts_of_tokens.largest, num_facts]
        settings = _as_texts(planned_by or {})
        header += [digest_of(json.dumps([place, settings])), shared[1]]
        rows = np.zeros((count, _COLUMNS + num_facts), dtype=np.int64)
        if local is not None and count:
            block = local.block
            rows[:, 0] = block.seqlens
            rows[:, 1] = block.num_loss_tokens
            rows[:, 2:4] = block.refs
            rows[:, 4] = [len(data) for data in self._encoded] or 0
            rows[:, _ORDER] = np.arange(count) if order is None else order
            rows[:, 6] = facts_of_tokens.last_labels >= 0
            rows[:, 7] = value_key_digests(local.values) if local.values else 0
            if facts is not None:
                rows[:, _COLUMNS:] = facts
        headers, table = self._gather_table(header, rows, what)
        self._raise_first(step, headers[:, 2], error)
        if (headers[:, 7] != headers[0, 7]).any():
            text = json.dumps([place, settings])
            texts = gather_texts(self.host, text, f"step {step}: comparing what the ranks read")
            rank = int(np.flatnonzero(headers[:, 7] != headers[0, 7])[0])
            raise ExchangeError(f"step {step}: {_difference(json.loads(texts[0]), json.loads(texts[rank]), rank)}")
        other = np.flatnonzero(headers[:, 6] != headers[0, 6])
        if len(other):
            raise ExchangeError(
                f"step {step}: rank 0 tells {int(headers[0, 6])} more numbers of each sample, rank {int(other[0])} "
                f"{int(headers[other[0], 6])}; give all ranks the same together_key and apart_key"
            )
        counts = np.ascontiguousarray(headers[:, 0])
        if headers[:, 1].any():
            self._check_end(step, headers[:, 1], has_more)
        self._check_shared(step, headers[:, 8].reshape(-1, shared[0]))
        self._agree_on_schema(step, headers[:, 3], digest)
        self._form = TokenForm.agree(headers[:, 4], headers[:, 5])
        self._last_labels = facts_of_tokens.last_labels
        columns = _C.number_samples(np.ascontiguousarray(self._rows_of(table, rows, counts, what)), counts, _ORDER)
        return GlobalSamples(
            seqlens=columns[0],
            num_loss_tokens=columns[1],
            refs=np.ascontiguousarray(columns[2:4].T),
            owner=columns[_COLUMNS + num_facts],
            local_index=columns[_COLUMNS + num_facts + 1],
            value_bytes=columns[4],
            facts=np.ascontiguousarray(columns[_COLUMNS : _COLUMNS + num_facts].T),
            has_next=columns[6],
            value_keys=columns[7],
            ended=bool(headers[:, 1].any()),
        )

    def run(
        self, step: int, plan: Plan, samples: GlobalSamples, local: FlatSamples, *, pad_id: int = 0
    ) -> tuple[PackTable, PackBuffers, dict[int, Mapping[str, Any]]]:
        """Send every rank what the plan gives it, and pack what arrives here.

        Returns:
            This rank's pack table, its filled buffers, and the per-sample values of the samples it holds.

        Raises:
            ExchangeError: a rank is gone or late, or samples of one pack have different per-sample keys.
        """
        require_equal_value_keys(self.host, step, plan, samples, local)
        mine, spans = build_tables(plan, self.host.rank)
        buffers = allocate_pack(mine, self.token_keys, pad_id=pad_id)
        values = self.transfer(step, spans, samples, local, buffers.arrays)
        return mine, buffers, values

    @property
    def token_keys(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Per-token keys all ranks agreed on in the last ``gather``, with dtype and shape of one token's entry."""
        return {key: (self._schema.dtype(key), spec[1]) for key, spec in self._schema.keys}

    def transfer(
        self,
        step: int,
        spans: RankSpans,
        samples: GlobalSamples,
        local: FlatSamples,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> dict[int, Mapping[str, Any]]:
        """One all-to-all that brings every rank the spans it wants; every rank knows what all want.

        Args:
            step: number of the global batch, for messages.
            spans: what every rank wants; the same on every rank.
            samples: from ``gather``.
            local: what this rank gave to ``gather``.
            out: per token key, the array this rank's spans are written to.

        Returns:
            The per-sample values of the samples this rank holds.

        Raises:
            ExchangeError: a rank is gone or late.
        """
        me = self.host.rank
        sends = Parcels.sent(spans, samples, me)
        receives = Parcels.received(spans, samples, me)
        layout = ParcelLayout(self._form, self._schema)
        sizes = layout.sizes(sends, self.num_ranks)
        receive_sizes = layout.sizes(receives, self.num_ranks)

        send = _POOL.empty(int(sizes.sum()), np.uint8)  # every byte of it is written
        if len(local.block):
            layout.pack_tokens(sends, sizes, samples, local, self._last_labels, send)
        for i, at, size in _value_places(sends, sizes):
            send[at : at + size] = np.frombuffer(self._encoded[int(samples.local_index[i])], dtype=np.uint8)

        received = all_to_all_bytes(
            self.host, send, sizes.tolist(), receive_sizes.tolist(), f"step {step}: exchanging samples"
        )
        self.bytes_sent += int(sizes.sum() - sizes[me])

        layout.unpack_tokens(receives, receive_sizes, received, out)
        values: dict[int, Mapping[str, Any]] = {i: {} for i in receives.value_ids.tolist()}
        for i, at, size in _value_places(receives, receive_sizes):
            values[i] = decode_values(received[at : at + size].tobytes())
        return values

    def _gather_table(self, header: list[int], rows: Int64Array, what: str) -> tuple[Int64Array, Int64Array]:
        """Headers of all ranks, int64 [R, header], and their rows as far as there is room for them.

        As many rows as the largest rank has had so far travel with the header: when no rank has more, one collective
        is enough.
        """
        width = rows.shape[1]
        room = self._room // width
        message = np.zeros(_HEADER + self._room, dtype=np.int64)
        message[:_HEADER] = header
        fitting = rows[:room].reshape(-1)
        message[_HEADER : _HEADER + len(fitting)] = fitting
        gathered = all_gather_rows(self.host, message, what)
        table = gathered[:, _HEADER : _HEADER + room * width]
        return gathered[:, :_HEADER], table.reshape(len(gathered), room, width)

    def _rows_of(self, table: Int64Array, rows: Int64Array, counts: Int64Array, what: str) -> Int64Array:
        """All rows of all ranks, int64 [R, most, columns]: those at hand, or gathered again with more room."""
        most = int(counts.max())
        if most <= table.shape[1]:
            return table
        self._room = most * rows.shape[1]
        padded = np.zeros((most, rows.shape[1]), dtype=np.int64)
        padded[: len(rows)] = rows
        return all_gather_rows(self.host, padded, what)

    def _prepare(self, local: FlatSamples) -> int:
        """Encode the per-sample values; a digest of the schema, 0 without samples."""
        self._encoded = [encode_values(values) for values in local.values]
        if not len(local.block):
            return 0
        text = WireSchema.of(local.specs).to_json()
        digest = digest_of(text)
        self._schemas.setdefault(digest, WireSchema.from_json(text))
        return digest

    def _raise_first(self, step: int, failed: Int64Array, error: Exception | None) -> None:
        if not failed.any():
            return
        text = "" if error is None else f"{type(error).__name__}: {error}"
        texts = gather_texts(self.host, text, f"step {step}: gathering error messages")
        first = int(np.flatnonzero(failed)[0])
        raise ExchangeError(f"step {step}: rank {first} failed: {texts[first]}") from error

    def _check_end(self, step: int, missing: Int64Array, has_more: Callable[[], bool]) -> None:
        error: Exception | None = None
        more = 0
        if not missing[self.host.rank]:
            try:
                more = int(has_more())
            except Exception as failure:
                error = failure
        state = all_gather_rows(
            self.host, np.array([more, error is not None], dtype=np.int64), f"step {step}: agreeing on the end"
        )
        self._raise_first(step, state[:, 1], error)
        going_on = np.flatnonzero(state[:, 0])
        # Dealing one order out in turn, ranks differ by one item where it ends.
        if len(going_on) or int(missing.max() - missing.min()) > 1:
            first = int(np.argmax(missing))
            others = going_on.tolist() if len(going_on) else np.flatnonzero(missing < missing[first] - 1).tolist()
            raise ExchangeError(
                f"step {step}: the data of rank {first} ended {int(missing[first])} samples short of the step while "
                f"ranks {others} have more; give every rank the same number of samples"
            )

    def _check_shared(self, step: int, shared: Int64Array) -> None:
        different = np.argwhere(shared != shared[:, :1])
        if len(different):
            row, place = different[0].tolist()
            first = row * shared.shape[1]
            raise ExchangeError(
                f"step {step}: ranks {first} and {first + place} have read samples of different lengths, but belong to "
                "one data-parallel rank, whose samples its context-parallel ranks share out; give them the same data "
                "in the same order, with the same seed"
            )

    def _agree_on_schema(self, step: int, digests: Int64Array, mine: int) -> None:
        used = sorted(set(digests.tolist()) - {0})
        if not used:
            return
        # Known digests are the same set on every rank once they have been gathered, so all ranks branch alike.
        if len(used) > 1 or used[0] not in self._agreed:
            schema = self._schemas[mine].to_json() if mine else ""
            texts = gather_texts(self.host, schema, f"step {step}: agreeing on keys")
            if len(used) > 1:
                first, other = (digests.tolist().index(d) for d in sorted(used, key=digests.tolist().index)[:2])
                shown = different_keys({rank: WireSchema.from_json(texts[rank]) for rank in (first, other)})
                raise ExchangeError(
                    f"step {step}: the ranks' samples have different per-token keys: {shown}; give all of them the "
                    "same, with the same dtypes"
                )
            self._schemas[used[0]] = WireSchema.from_json(next(t for t in texts if t))
            self._agreed.add(used[0])
        self._schema = self._schemas[used[0]]


def digest_of(text: str) -> int:
    """A number from 1 up that other texts are unlikely to have."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1


def _as_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as texts, those of a layout one by one."""
    texts: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, ParallelLayout):
            texts |= {field.name: repr(getattr(value, field.name)) for field in dataclasses.fields(value)}
        else:
            texts[name] = repr(value)
    return texts


def _difference(first: list[Any], other: list[Any], rank: int) -> str:
    """In what the places and settings of rank 0 and another one differ."""
    if first[0] != other[0]:
        return (
            f"rank 0 wants {first[0]}; rank {rank} wants {other[0]}. Give all ranks "
            "the same sizes, consumed_samples and ranges to leave out, and let them skip to the same place"
        )
    names = [name for name in {**first[1], **other[1]} if first[1].get(name) != other[1].get(name)]
    shown = "; ".join(
        f"{name} is {first[1].get(name, 'not given')} on rank 0 and {other[1].get(name, 'not given')} on rank {rank}"
        for name in names
    )
    return f"the ranks would plan differently: {shown}. Give all ranks the same configuration"


def _value_places(parcels: Parcels, sizes: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Sample, byte offset and size of the per-sample values in joined parcels, which they end."""
    if not parcels.value_bytes.any():
        return
    ends = np.cumsum(sizes)
    totals = np.concatenate([[0], np.cumsum(parcels.value_bytes)])
    last = np.searchsorted(parcels.value_peer, parcels.value_peer, side="right")
    places = ends[parcels.value_peer] - (totals[last] - totals[:-1])
    for i, at, size in zip(parcels.value_ids.tolist(), places.tolist(), parcels.value_bytes.tolist(), strict=True):
        if size:
            yield i, at, size
