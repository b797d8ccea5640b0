"""What the reference algorithms for dynamic CP share: sequences seen on every CP size, cost and room of an op."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.plan import padded_seqlens, tokens_per_rank
from tdp_megatron.schedule.problem import Problem, pack_token_cap

__all__ = ["Level", "Scratch"]


@dataclass(frozen=True, slots=True)
class Level:
    """One CP size, and what every sequence would be on it; sequences in order of falling length, ties by id."""

    cp_size: int
    """Ranks."""
    pad_multiple: int
    """Tokens."""
    token_cap: int
    """Most padded tokens of a whole pack."""
    padded: list[int]
    """Tokens."""
    squares: list[float]
    """Attention work, tokens^2."""
    alone: list[float]
    """Seconds of the sequence alone in a microbatch; infinite where it does not fit."""


class Scratch:
    """The sequences of a problem in order of falling length, seen on every allowed CP size."""

    def __init__(self, problem: Problem) -> None:
        layout, cost = problem.layout, problem.cost
        self.problem = problem
        self.cost = cost
        self.num_ranks = layout.num_ranks
        self.tail = layout.tail_multiple
        self.max_sequences = problem.max_sequences
        order = np.argsort(-problem.seqlens, kind="stable")
        lengths = problem.seqlens[order]
        self.sample_ids: list[int] = order.tolist()
        self.lengths: list[int] = lengths.tolist()
        self.levels: list[Level] = []
        for k in layout.cp_sizes:
            cap = pack_token_cap(layout, k)
            padded = padded_seqlens(lengths, k)
            fits = padded <= cap
            squares = cost.squares(padded)
            alone = cost.op_costs(tokens_per_rank(padded, k, self.tail), squares, k)
            alone[~fits] = math.inf
            self.levels.append(Level(k, layout.pad_multiple(k), cap, padded.tolist(), squares.tolist(), alone.tolist()))

    def seconds(self, tokens: int, squares: float, k: int) -> float:
        """Seconds of an op of ``tokens`` padded tokens and ``squares`` on ``k`` ranks: ``CostModel.op_costs``."""
        cost = self.cost
        whole = k * self.tail
        per_rank = max((tokens + whole - 1) // whole, 1) * self.tail
        attention = cost.b * squares / k
        if k > 1 and cost.layers:
            attention = max(attention, _comm(cost, k, per_rank))
        return cost.c0 + cost.a * per_rank + attention

    def room(self, level: Level, tokens: int, squares: float, limit: float) -> int:
        """Longest sequence that an op can still take without exceeding ``limit`` seconds or its tokens; -1 for none.

        Solved in closed form for whole tail multiples, so up to one tail less than the exact answer.
        """
        cost, k = self.cost, level.cp_size
        # With T = (tokens + x) / k: a*T + b*(squares + q(x))/k <= limit - c0, and a*T + comm(T) <= limit - c0.
        slack = (limit - cost.c0) * k - cost.a * tokens - cost.b * squares
        if slack < 0.0:
            return -1
        longest = float(level.token_cap - tokens)
        if cost.b > 0.0:
            by_attention = (math.sqrt(cost.a * cost.a + 4.0 * cost.b * slack) - cost.a) / (2.0 * cost.b)
            if cost.window and by_attention > 2.0 * cost.window:
                by_attention = slack / (cost.a + cost.b * 2.0 * cost.window)
            longest = min(longest, by_attention)
        elif cost.a > 0.0:
            longest = min(longest, slack / cost.a)
        if k > 1 and cost.layers:
            steps = 3.0 * cost.layers * (k - 1.0)
            per_token = cost.a + steps * cost.kv_bytes / _bandwidth(cost, k)
            if per_token > 0.0:
                most = (limit - cost.c0 - steps * cost.latency) / per_token
                longest = min(longest, most * k - tokens)
        whole = (tokens + int(max(longest, -1.0))) // (k * self.tail) * (k * self.tail) - tokens
        return whole // level.pad_multiple * level.pad_multiple if whole >= 0 else -1

    def choose_levels(self, limit: float) -> list[int]:
        """For each sequence the number of the smallest CP size on which it takes at most ``limit`` seconds alone.

        Where none does, the one on which it is fastest.
        """
        chosen = []
        for i in range(len(self.lengths)):
            best, best_seconds = 0, math.inf
            for number, level in enumerate(self.levels):
                seconds = level.alone[i]
                if seconds < best_seconds:
                    best, best_seconds = number, seconds
                    if seconds <= limit:
                        break
            chosen.append(best)
        return chosen


def _bandwidth(cost: CostModel, k: int) -> float:
    return cost.bandwidth if k <= cost.node_ranks else cost.internode_bandwidth


def _comm(cost: CostModel, k: int, tokens: int) -> float:
    moved = tokens * cost.kv_bytes / _bandwidth(cost, k)
    return 3.0 * cost.layers * (k - 1.0) * (cost.latency + moved)
