"""``CostModel``: how long one packed microbatch takes, forward and backward, from a few numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.schedule.plan import Plan, padded_seqlens, tokens_per_rank
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["CostModel", "imbalance", "padding", "rank_costs"]

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one microbatch of sequences p_i (padded, tokens) on k ranks, each holding T tokens:

    ``c0 + a * T + max(b * Q / k, comm(k, T))`` with ``Q = sum p_i * min(p_i, 2 * window)`` and
    ``comm(k, T) = 3 * layers * (k - 1) * (latency + T * kv_bytes / bandwidth(k))``, the ring exchange of K and V,
    which hides under attention.
    """

    a: float
    """Seconds per token: everything that is linear in the length."""
    b: float
    """Seconds per token^2: attention."""
    c0: float = 0.0
    """Seconds per microbatch, whatever it holds."""
    window: int = 0
    """Sliding attention window, tokens; 0 means full causal attention."""
    layers: int = 0
    """Layers that exchange K and V; 0 leaves communication out."""
    kv_bytes: float = 0.0
    """Bytes of K and V of one token in one layer on one rank."""
    latency: float = 15e-6
    """Seconds per exchange between neighbours."""
    node_ranks: int = 8
    """CP groups of at most this many ranks use ``bandwidth``, larger ones ``internode_bandwidth``."""
    bandwidth: float = 250e9
    """Bytes per second inside a node."""
    internode_bandwidth: float = 40e9
    """Bytes per second between nodes."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            whole = f.name in ("window", "layers", "node_ranks")
            kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "an int" if whole else "a number"
                raise TypeError(f"{f.name} must be {kind}, got {value!r} of type {type(value).__name__}")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{f.name} must be finite and not negative, got {value}")
        for name in ("bandwidth", "internode_bandwidth", "node_ranks"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def to_json(self, notes: Mapping[str, Any] | None = None) -> str:
        """The numbers as JSON text, with ``notes`` on where they come from, which ``from_json`` passes over."""
        return json.dumps({"cost_model": asdict(self), "notes": dict(notes or {})}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> CostModel:
        """What ``to_json`` or ``tdp calibrate`` wrote.

        Raises:
            TypeError: a number is of the wrong type.
            ValueError: not JSON, no cost model, an unknown or missing name, or a number out of range.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        numbers = content.get("cost_model") if isinstance(content, dict) else None
        if not isinstance(numbers, dict):
            raise ValueError('a cost model is a JSON object with the key "cost_model", as `tdp calibrate` writes it')
        known = [f.name for f in fields(CostModel)]
        unknown = sorted(set(numbers) - set(known))
        if unknown:
            raise ValueError(f"cost_model has an unknown name {unknown[0]!r}; the names are {', '.join(known)}")
        missing = [name for name in ("a", "b") if name not in numbers]
        if missing:
            raise ValueError(f"cost_model has no {missing[0]!r}; a and b are needed")
        return CostModel(**numbers)

    def squares(self, padded_lengths: Int64Array) -> Float64Array:
        """Attention work of each sequence, tokens^2, float64 [n]."""
        lengths = padded_lengths.astype(np.float64)
        if self.window:
            return lengths * np.minimum(lengths, 2.0 * self.window)
        return lengths * lengths

    def comm(self, cp_size: Int64Array | int, tokens: Int64Array | int) -> Float64Array:
        """Seconds of the K and V exchange of ``tokens`` per rank over ``cp_size`` ranks, float64."""
        k = np.asarray(cp_size, dtype=np.float64)
        bandwidth = np.where(k <= self.node_ranks, self.bandwidth, self.internode_bandwidth)
        moved = np.asarray(tokens, dtype=np.float64) * self.kv_bytes / bandwidth
        seconds: Float64Array = 3.0 * self.layers * (k - 1.0) * (self.latency + moved)
        return seconds

    def op_costs(self, tokens: Int64Array, squares: Float64Array, cp_size: Int64Array | int) -> Float64Array:
        """Seconds of microbatches from their totals.

        Args:
            tokens: int64 [m], tokens per rank, tail included.
            squares: float64 [m], sum of ``squares`` of the sequences in each.
            cp_size: int64 [m] or one for all.

        Returns:
            float64 [m], seconds.
        """
        attention = self.b * squares / np.asarray(cp_size, dtype=np.float64)
        hidden = np.maximum(attention, self.comm(cp_size, tokens))
        seconds: Float64Array = self.c0 + self.a * tokens.astype(np.float64) + hidden
        return seconds

    def sequence_costs(self, seqlens: Int64Array, cp_size: Int64Array | int = 1) -> Float64Array:
        """Seconds each sequence adds to each of its ranks, float64 [n]; without c0, communication and tail."""
        padded = padded_seqlens(seqlens, cp_size)
        k = np.asarray(cp_size, dtype=np.float64)
        seconds: Float64Array = self.a * padded.astype(np.float64) / k + self.b * self.squares(padded) / k
        return seconds

    def sequence_cost(self, seqlen: int, cp_size: int = 1) -> float:
        """Seconds one sequence adds to each of its ranks; without c0, communication and tail."""
        return float(self.sequence_costs(np.array([seqlen], dtype=np.int64), cp_size)[0])

    def microbatch_cost(self, seqlens: npt.ArrayLike, cp_size: int, layout: ParallelLayout) -> float:
        """Seconds of one microbatch of ``seqlens`` (real lengths, tokens) on ``cp_size`` ranks."""
        padded = padded_seqlens(np.asarray(seqlens, dtype=np.int64).reshape(-1), cp_size)
        tokens = tokens_per_rank(padded.sum(keepdims=True), cp_size, layout.tail_multiple)
        squares = np.zeros(1)
        for square in self.squares(padded):
            squares += square
        return float(self.op_costs(tokens, squares, cp_size)[0])

    def plan_costs(self, plan: Plan) -> Float64Array:
        """Seconds of every op of ``plan``, float64 [m]."""
        entries = self.squares(plan.padded_lengths)
        op_of_entry = np.repeat(np.arange(plan.num_ops), np.diff(plan.op_offsets))
        # bincount adds in order, so that every rank and machine gets the same bits.
        squares = np.asarray(np.bincount(op_of_entry, weights=entries, minlength=plan.num_ops), dtype=np.float64)
        return self.op_costs(plan.op_tokens_per_rank, squares, plan.op_cp_size)


def rank_costs(plan: Plan, cost: CostModel) -> Float64Array:
    """Seconds of work of every rank, float64 [R]."""
    ops, ranks, _ = plan.by_op_and_rank()
    weights = cost.plan_costs(plan)[ops]
    return np.asarray(np.bincount(ranks, weights=weights, minlength=plan.layout.num_ranks), dtype=np.float64)


def padding(plan: Plan) -> float:
    """Share of pads in what all ranks hold, 0 to 1; dummy packs count."""
    held = int(plan.op_tokens_per_rank @ plan.op_cp_size)
    return 1.0 - int(plan.seqlens.sum()) / held if held else 0.0


def imbalance(plan: Plan, cost: CostModel) -> float:
    """Work of the busiest rank over the mean of all ranks; 1.0 is perfect."""
    work = rank_costs(plan, cost)
    mean = float(np.cumsum(work)[-1]) / len(work)
    return max(float(work.max()) / mean, 1.0) if mean > 0 else 1.0
