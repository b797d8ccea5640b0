"""``Plan``: which sequences run together, on which ranks, in which order. Pure data, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["Plan", "PlanOp", "padded_seqlens", "tokens_per_rank"]


def padded_seqlens(seqlens: Int64Array, cp_size: Int64Array | int) -> Int64Array:
    """Lengths rounded up to ``2 * cp_size``, or left alone where ``cp_size`` is 1.

    Args:
        seqlens: int64 [n], tokens.
        cp_size: ranks that share each sequence, int64 [n] or one for all.

    Returns:
        int64 [n], tokens.
    """
    sizes = np.asarray(cp_size, dtype=np.int64)
    multiple = np.where(sizes > 1, 2 * sizes, 1)
    padded: Int64Array
    if np.any(multiple & (multiple - 1)):
        padded = -(-seqlens // multiple) * multiple
    else:  # several times faster than to divide
        padded = (seqlens + (multiple - 1)) & -multiple
    return padded


def tokens_per_rank(padded_totals: Int64Array, cp_size: Int64Array | int, tail_multiple: int) -> Int64Array:
    """Tokens each rank holds of packs of ``padded_totals`` tokens, tail included; see ``ParallelLayout``.

    Args:
        padded_totals: int64 [m], tokens of each whole pack.
        cp_size: ranks that share each pack, int64 [m] or one for all.
        tail_multiple: tokens.

    Returns:
        int64 [m], tokens.
    """
    # With CP the tail, too, is cut into two chunks per rank.
    multiple = np.where(np.asarray(cp_size) > 1, math.lcm(tail_multiple, 2), tail_multiple)
    per_rank = -(-padded_totals // cp_size)
    held: Int64Array = np.maximum(-(-per_rank // multiple), 1) * multiple
    return held


@dataclass(frozen=True, slots=True)
class PlanOp:
    """One microbatch of ``cp_size`` neighbouring ranks."""

    first_rank: int
    """First rank of the aligned block that runs it."""
    cp_size: int
    """Ranks in the block."""
    sample_ids: tuple[int, ...] = ()
    """Sequences in pack order; none in a dummy pack."""
    padded_lengths: tuple[int, ...] = ()
    """Padded length of each sequence, tokens."""

    @property
    def ranks(self) -> range:
        """The ranks that run it."""
        return range(self.first_rank, self.first_rank + self.cp_size)

    @property
    def is_dummy(self) -> bool:
        """Whether it only keeps ranks in step and carries no sequence."""
        return not self.sample_ids

    def tokens_per_rank(self, layout: ParallelLayout) -> int:
        """Tokens each rank of the block holds, tail included."""
        return layout.tokens_per_rank(sum(self.padded_lengths), self.cp_size)


def _frozen(name: str, values: npt.ArrayLike) -> Int64Array:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype == np.int64 and array.base is None and not array.flags.writeable and array.flags.c_contiguous:
        return array
    owned = np.array(array, dtype=np.int64, order="C")
    owned.flags.writeable = False
    return owned


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Every microbatch of one global batch, in an order in which they can be executed.

    Each rank runs the ops it belongs to in the order of the arrays; since that order is one for all ranks, no rank
    can wait for another that waits for it. Plans are equal when layout, lengths and ops are.
    """

    layout: ParallelLayout
    """How the ranks are arranged."""
    seqlens: Int64Array
    """int64 [n], real length of sequence i of the global batch, tokens."""
    op_first_rank: Int64Array
    """int64 [m], first rank of each op's block."""
    op_cp_size: Int64Array
    """int64 [m], ranks in each op's block."""
    op_offsets: Int64Array
    """int64 [m + 1], op j holds entries ``op_offsets[j]`` to ``op_offsets[j + 1]`` of the two arrays below."""
    sample_ids: Int64Array
    """int64 [n], sequences by op and pack order."""
    padded_lengths: Int64Array
    """int64 [n], padded length of each entry of ``sample_ids``, tokens."""
    op_group: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64 [m], barrier group of each op, never falling; all 0 when there is no barrier inside the step."""
    algorithm: str = "custom"
    """Name of what made it; no part of equality."""
    op_tokens_per_rank: Int64Array = field(init=False)
    """int64 [m], tokens each rank of the block holds, tail included."""
    _cache: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        m = len(self.op_first_rank)
        if len(self.op_group) == 0 and m:
            object.__setattr__(self, "op_group", np.zeros(m, dtype=np.int64))
        for name in _ARRAYS:
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))
        entries = len(self.sample_ids)
        for name, expected in (
            ("op_cp_size", m),
            ("op_group", m),
            ("op_offsets", m + 1),
            ("padded_lengths", entries),
        ):
            if len(getattr(self, name)) != expected:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, expected {expected}")
        offsets = self.op_offsets
        if offsets[0] != 0 or offsets[-1] != entries or bool(np.any(offsets[1:] < offsets[:-1])):
            raise ValueError(f"op_offsets must rise from 0 to {entries}, the number of sample_ids")
        if m and int(self.op_cp_size.min()) < 1:
            raise ValueError(f"op_cp_size must be at least 1, got {int(self.op_cp_size.min())}")
        totals = _segment_sums(self.padded_lengths, offsets)
        held = tokens_per_rank(totals, self.op_cp_size, self.layout.tail_multiple)
        object.__setattr__(self, "op_tokens_per_rank", _frozen("op_tokens_per_rank", held))
        object.__setattr__(self, "_cache", {})

    @staticmethod
    def from_packs(
        layout: ParallelLayout,
        seqlens: Int64Array,
        op_first_rank: npt.ArrayLike,
        op_cp_size: npt.ArrayLike,
        op_offsets: npt.ArrayLike,
        sample_ids: npt.ArrayLike,
        *,
        op_group: npt.ArrayLike = (),
        algorithm: str = "custom",
    ) -> Plan:
        """A plan whose sequences are padded as ``layout`` says for the CP size of their op.

        Args:
            layout: how the ranks are arranged.
            seqlens: int64 [n], tokens.
            op_first_rank, op_cp_size, op_group: [m].
            op_offsets: [m + 1].
            sample_ids: [n], by op.
            algorithm: name of what made the plan.
        """
        ids = _frozen("sample_ids", sample_ids)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(seqlens)):
            raise ValueError(f"sample_ids must be in [0, {len(seqlens)}), got {int(ids.min())} to {int(ids.max())}")
        sizes = _frozen("op_cp_size", op_cp_size)
        offsets = _frozen("op_offsets", op_offsets)
        if len(sizes) + 1 != len(offsets):
            raise ValueError(f"op_cp_size has {len(sizes)} entries, expected {len(offsets) - 1}")
        if offsets[0] != 0 or offsets[-1] != len(ids) or bool(np.any(offsets[1:] < offsets[:-1])):
            raise ValueError(f"op_offsets must rise from 0 to {len(ids)}, the number of sample_ids")
        padded = padded_seqlens(seqlens[ids], np.repeat(sizes, np.diff(offsets)))
        return Plan(
            layout,
            seqlens,
            _frozen("op_first_rank", op_first_rank),
            sizes,
            offsets,
            ids,
            padded,
            _frozen("op_group", op_group),
            algorithm,
        )

    @staticmethod
    def from_ops(
        layout: ParallelLayout,
        seqlens: npt.ArrayLike,
        ops: Sequence[PlanOp],
        *,
        op_group: npt.ArrayLike = (),
        algorithm: str = "custom",
    ) -> Plan:
        """A plan from ops in executable order; an op without ``padded_lengths`` is padded as ``layout`` says."""
        lengths = _frozen("seqlens", seqlens)
        padded: list[int] = []
        for op in ops:
            if op.padded_lengths:
                padded.extend(op.padded_lengths)
            else:
                padded.extend(layout.padded_seqlen(int(lengths[i]), op.cp_size) for i in op.sample_ids)
        return Plan(
            layout,
            lengths,
            np.array([op.first_rank for op in ops], dtype=np.int64),
            np.array([op.cp_size for op in ops], dtype=np.int64),
            np.cumsum([0] + [len(op.sample_ids) for op in ops], dtype=np.int64),
            np.array([i for op in ops for i in op.sample_ids], dtype=np.int64),
            np.array(padded, dtype=np.int64),
            _frozen("op_group", op_group),
            algorithm,
        )

    @property
    def num_ops(self) -> int:
        """Microbatches of all blocks together."""
        return len(self.op_first_rank)

    def __len__(self) -> int:
        return self.num_ops

    @property
    def ops(self) -> tuple[PlanOp, ...]:
        """The ops in executable order."""
        cached = self._cache.get("ops")
        if cached is None:
            ids, padded = self.sample_ids.tolist(), self.padded_lengths.tolist()
            offsets = self.op_offsets.tolist()
            cached = tuple(
                PlanOp(first, size, tuple(ids[lo:hi]), tuple(padded[lo:hi]))
                for first, size, lo, hi in zip(
                    self.op_first_rank.tolist(), self.op_cp_size.tolist(), offsets[:-1], offsets[1:], strict=True
                )
            )
            self._cache["ops"] = cached
        ops: tuple[PlanOp, ...] = cached
        return ops

    def by_op_and_rank(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Every pair of an op and one of its ranks, by op then rank.

        Returns:
            Op, rank, and the number of the op among those of the rank, int64 [sum of op_cp_size] each.
        """
        pairs: tuple[Int64Array, Int64Array, Int64Array] = self._pairs()[:3]
        return pairs

    def _pairs(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
        """``by_op_and_rank``, then offsets [R + 1] into the ops of each rank in order, and those ops."""
        cached = self._cache.get("pairs")
        if cached is None:
            num_ranks = self.layout.num_ranks
            sizes = self.op_cp_size
            if len(sizes) and (
                int(self.op_first_rank.min()) < 0 or int((self.op_first_rank + sizes).max()) > num_ranks
            ):
                raise ValueError(f"an op lies outside the {num_ranks} ranks; validate(plan) names it")
            ops = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
            starts = np.cumsum(sizes) - sizes
            ranks = np.arange(len(ops), dtype=np.int64) + np.repeat(self.op_first_rank - starts, sizes)
            order = np.argsort(ranks, kind="stable")
            by_rank = ops[order]
            by_rank.flags.writeable = False
            offsets = np.zeros(num_ranks + 1, dtype=np.int64)
            np.cumsum(np.bincount(ranks, minlength=num_ranks), out=offsets[1:])
            numbers = np.empty(len(ops), dtype=np.int64)
            numbers[order] = np.arange(len(ops), dtype=np.int64) - offsets[ranks[order]]
            cached = (ops, ranks, numbers, offsets, by_rank)
            self._cache["pairs"] = cached
        pairs: tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array] = cached
        return pairs

    def rank_ops(self, rank: int) -> Int64Array:
        """Numbers of the ops that ``rank`` runs, in order, int64 [microbatches of the rank]."""
        if not 0 <= rank < self.layout.num_ranks:
            raise ValueError(f"rank {rank} is outside the {self.layout.num_ranks} ranks of the layout")
        *_, offsets, ops = self._pairs()
        return ops[offsets[rank] : offsets[rank + 1]]

    @property
    def num_microbatches_per_rank(self) -> Int64Array:
        """Microbatches of every rank, int64 [R]."""
        counts: Int64Array = np.diff(self._pairs()[3])
        return counts

    def num_microbatches(self, rank: int) -> int:
        """Microbatches of ``rank``."""
        return len(self.rank_ops(rank))

    def locate(self, sample_id: int) -> tuple[int, int, int]:
        """Where sequence ``sample_id`` runs.

        Returns:
            The first rank of its block, the number of the microbatch among those of that rank, and the offset of
            its first token in the whole pack, padded tokens.

        Raises:
            KeyError: the plan does not hold the sequence.
        """
        where = self._cache.get("where")
        if where is None:
            where = np.full(len(self.seqlens), -1, dtype=np.int64)
            where[self.sample_ids] = np.arange(len(self.sample_ids))
            self._cache["where"] = where
        entry = int(where[sample_id]) if 0 <= sample_id < len(where) else -1
        if entry < 0:
            raise KeyError(f"sequence {sample_id} is not in this plan of {len(self.seqlens)} sequences")
        op = int(np.searchsorted(self.op_offsets, entry, side="right")) - 1
        first_rank = int(self.op_first_rank[op])
        microbatch = int(np.searchsorted(self.rank_ops(first_rank), op))
        return first_rank, microbatch, int(self.padded_lengths[self.op_offsets[op] : entry].sum())

    def scatter_back(self, outputs: Sequence[Any]) -> list[Any]:
        """What was computed per packed token, as one array per sequence of the global batch, pads left out.

        For outputs of all ranks in one process. Where they lie on their ranks, ``scatter_back`` of
        ``tdp_megatron.distributed``, and of what ``wrap_data_iterator`` returns, are collective calls.

        Args:
            outputs: per DP x CP rank, its outputs [T, ...] or [1, T, ...] of all its microbatches one after the other,
                or a list of them, one per microbatch: torch tensors on any device, or NumPy arrays. Gradients pass. If
                nothing but packs of one token leaves it open, [1, 1] is [1, T].

        Returns:
            Per sequence [seqlen, ...], in the order of the global batch, on the device of rank 0's outputs.

        Raises:
            TypeError: outputs of a rank that are no arrays, or of several dtypes.
            ValueError: outputs of the wrong number of ranks, microbatches or tokens, or that differ between ranks.
        """
        from tdp_megatron.schedule.scatter_back import scatter_back  # it goes by plans

        return scatter_back(self, outputs)

    def digest(self) -> str:
        """SHA-256 of layout, lengths and ops in hexadecimal: the same on all ranks or they disagree."""
        cached = self._cache.get("digest")
        if cached is None:
            sha = hashlib.sha256(json.dumps(asdict(self.layout), sort_keys=True).encode())
            for name in _ARRAYS:
                array = getattr(self, name)
                sha.update(f"{name}:{len(array)};".encode())
                sha.update(array.astype("<i8", copy=False).tobytes())
            cached = sha.hexdigest()
            self._cache["digest"] = cached
        return str(cached)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.layout == other.layout and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS
        )

    def __hash__(self) -> int:
        return int(self.digest()[:15], 16)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, tuple(getattr(self, f.name) for f in fields(self) if f.init)


_ARRAYS = (
    "seqlens",
    "op_first_rank",
    "op_cp_size",
    "op_offsets",
    "sample_ids",
    "padded_lengths",
    "op_group",
)


def _segment_sums(values: Int64Array, offsets: Int64Array) -> Int64Array:
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=running[1:])
    sums: Int64Array = running[offsets[1:]] - running[offsets[:-1]]
    return sums
