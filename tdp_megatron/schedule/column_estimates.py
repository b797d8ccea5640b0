"""How long a step with columns of microbatches should take, before most sequences are placed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.wave_building import GrowingOp, choose_levels_under, wide_ops

__all__ = ["ColumnEstimates", "Estimate", "Loads", "Rule", "Tall"]

#: Halvings of the step in an estimate; the second kind takes longer.
_HALVINGS = 20
_HALVINGS_TOGETHER = 10
_DOUBLINGS = 64


@dataclass(slots=True)
class Rule:
    """What is tall and how it is placed."""

    time: float
    """Seconds a microbatch may take."""
    stretch: float
    """The same in mean microbatches; the larger counts."""
    tall: float
    """Time alone from which a sequence is tall, in mean microbatches."""
    apart: bool
    """Tall ops as far apart as possible, instead of in as few columns as possible."""


@dataclass(slots=True)
class Tall:
    """Microbatches that are placed first."""

    ops: list[GrowingOp]
    """By falling CP size, then time."""
    first_rest: int
    """Number of the first sequence that is in none of them."""


@dataclass(slots=True)
class Loads:
    """What every column has to run."""

    seconds: list[float]
    longest: list[float]
    used: list[int]
    """Microbatches."""
    where: list[int]
    """First column of each tall op."""


@dataclass(slots=True)
class Estimate:
    step: float
    count: int
    tall: Tall
    loads: Loads


class ColumnEstimates:
    """Estimates for one batch."""

    def __init__(self, scratch: Scratch, bubbles: float) -> None:
        cost, smallest = scratch.cost, scratch.levels[0]
        self.scratch = scratch
        self.bubbles = bubbles
        #: Together they only help against bubbles.
        self.always_apart = bubbles == 0.0
        self.smallest = smallest
        self.width = smallest.cp_size
        self.num = scratch.num_ranks // smallest.cp_size
        # Half a tail is what a microbatch pads on average.
        self.overhead = cost.c0 + cost.a * scratch.tail / 2.0
        #: Seconds of a microbatch without sequences.
        self.empty = scratch.seconds(0, 0.0, self.width)
        n = len(scratch.lengths)
        #: Work and tokens of sequence i and all shorter ones.
        self.work_from = [0.0] * (n + 1)
        self.tokens_from = [0] * (n + 1)
        for i in reversed(range(n)):
            self.work_from[i] = self.work_from[i + 1] + self.work(i)
            self.tokens_from[i] = self.tokens_from[i + 1] + smallest.padded[i]
        self.mean_work = self.work_from[0] / self.num
        self.times = sorted({v.alone[0] for v in scratch.levels if v.alone[0] < math.inf}, reverse=True)

    def work(self, i: int) -> float:
        """Seconds that sequence i adds to a column."""
        cost, smallest = self.scratch.cost, self.smallest
        return (cost.a * smallest.padded[i] + cost.b * smallest.squares[i]) / self.width

    def estimate(self, rule: Rule, count: int, most: float) -> Estimate | None:
        """The step with ``count`` microbatches per column; None where it is ``most`` or longer, or has no room."""
        mean = self.mean_work / count + self.scratch.cost.c0
        limit = max(rule.time, rule.stretch * mean)
        longest = min(level.alone[0] for level in self.scratch.levels if level.alone[0] <= max(limit, self.times[-1]))
        if longest * (1.0 + self.bubbles) >= most:
            return None
        tall = self.make_tall(limit, min(rule.tall * mean, limit))
        if self.least(tall, count) >= most:
            return None
        best = Estimate(most, count, tall, self.no_loads())
        if rule.apart or self.always_apart or not tall.ops:
            self.estimate_apart(best)
        else:
            self.estimate_together(best)
        return best if best.step < most else None

    def estimate_apart(self, best: Estimate) -> None:
        """With tall ops as far apart as possible, where that makes the step shorter than it is in ``best``."""
        work = self.work_from[best.tall.first_rest]
        count = best.count
        loads = self.apart(best.tall.ops, count)
        if loads is None or not self.has_room(best.tall, loads, count):
            return
        low = 0.0
        for column, used in enumerate(loads.used):
            paid = loads.seconds[column] + self.bubbles * loads.longest[column]
            low = max(low, paid + (count - used) * self.empty)
        if low >= best.step or self.room(loads, count, best.step) < work:
            return
        high = low + (self.mean_work + count * self.overhead) * (1.0 + self.bubbles)
        for _ in range(_DOUBLINGS):
            if self.room(loads, count, high) >= work:
                break
            low, high = high, 2.0 * high
        else:
            if self.room(loads, count, high) < work:
                return
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            if self.room(loads, count, middle) >= work:
                high = middle
            else:
                low = middle
        if high < best.step:
            best.step, best.loads = high, loads

    def estimate_together(self, best: Estimate) -> None:
        """With tall ops in as few columns as possible, where that makes the step shorter than it is in ``best``."""
        work = self.work_from[best.tall.first_rest]
        count = best.count
        longest = max(op.seconds for op in best.tall.ops)
        evenly = self.mean_work + count * self.overhead
        low = max(longest * (1.0 + self.bubbles), self.mean_work)
        high = min(best.step, 2.0 * (longest * (1.0 + self.bubbles) + evenly))
        if low >= high:
            return
        for halving in range(-1, _HALVINGS_TOGETHER):
            # The longest step that would do is tried first.
            middle = high if halving < 0 else (low + high) / 2.0
            loads = self.together(best.tall.ops, count, middle)
            if loads and self.has_room(best.tall, loads, count) and self.room(loads, count, middle) >= work:
                high = middle
                best.step, best.loads = middle, loads
            elif halving < 0:
                return
            else:
                low = middle

    def least(self, tall: Tall, count: int) -> float:
        """Seconds of the step if all columns had the same and all microbatches of a column, too."""
        seconds = self.work_from[tall.first_rest]
        for op in tall.ops:
            seconds += op.seconds * (op.level.cp_size // self.width)
        mean = seconds / self.num
        return mean + self.bubbles * mean / count

    def make_tall(self, limit: float, tall: float) -> Tall:
        """Sequences that take more than ``tall`` seconds alone: on more ranks where it is more than ``limit``."""
        scratch, smallest = self.scratch, self.smallest
        first_rest = 0
        while first_rest < len(scratch.lengths) and smallest.alone[first_rest] > tall:
            first_rest += 1
        chosen = choose_levels_under(scratch, range(first_rest), limit)
        ops: list[GrowingOp] = []
        for made in wide_ops(scratch, range(first_rest), chosen, limit):
            ops.extend(sorted(made, key=lambda op: -op.seconds))
        for i in range(first_rest):
            if chosen[i] is smallest:
                ops.append(GrowingOp(smallest))
                ops[-1].add(scratch, i)
        return Tall(ops, first_rest)

    def no_loads(self) -> Loads:
        """Empty columns."""
        return Loads([0.0] * self.num, [0.0] * self.num, [0] * self.num, [])

    def put(self, loads: Loads, first: int, op: GrowingOp) -> None:
        """Run ``op`` on the columns from ``first`` on."""
        for column in range(first, first + op.level.cp_size // self.width):
            loads.seconds[column] += op.seconds
            loads.longest[column] = max(loads.longest[column], op.seconds)
            loads.used[column] += 1
        loads.where.append(first)

    def apart(self, ops: list[GrowingOp], count: int) -> Loads | None:
        """Each op where least has run so far; columns of one block always have the same."""
        loads = self.no_loads()
        heap: list[tuple[float, int]] = []
        size = 0
        for op in ops:
            if op.level.cp_size != size:
                size = op.level.cp_size
                heap = [
                    (loads.seconds[first] + self.bubbles * loads.longest[first], first)
                    for first in range(0, self.num, size // self.width)
                    if loads.used[first] < count
                ]
                heapq.heapify(heap)
            if not heap:
                return None
            first = heap[0][1]
            self.put(loads, first, op)
            if loads.used[first] < count:
                heapq.heapreplace(heap, (loads.seconds[first] + self.bubbles * loads.longest[first], first))
            else:
                heapq.heappop(heap)
        return loads

    def together(self, ops: list[GrowingOp], count: int, step: float) -> Loads | None:
        """Ops in as few columns as a step of ``step`` seconds allows; None if that is more than there are."""
        loads = self.no_loads()
        first = 0
        for op in ops:
            while first < self.num:
                longest = max(loads.longest[first], op.seconds)
                others = (count - loads.used[first] - 1) * self.empty
                seconds = loads.seconds[first] + op.seconds + self.bubbles * longest + others
                if loads.used[first] < count and seconds <= step:
                    break
                first += op.level.cp_size // self.width
            if first >= self.num:
                return None
            self.put(loads, first, op)
        return loads

    def has_room(self, tall: Tall, loads: Loads, count: int) -> bool:
        """Whether all other sequences fit into what is left, by tokens and number."""
        left = sum(count - used for used in loads.used)
        others = len(self.scratch.lengths) - tall.first_rest
        tokens = self.tokens_from[tall.first_rest]
        return tokens <= left * self.smallest.token_cap and others <= left * self.scratch.max_sequences

    def target(self, loads: Loads, column: int, count: int, step: float) -> float:
        """Seconds that each microbatch still free in ``column`` may take."""
        left = count - loads.used[column]
        seconds = (step - loads.seconds[column] - self.bubbles * loads.longest[column]) / left
        if seconds > loads.longest[column]:
            # They are the longest then, and paid for once more.
            return (step - loads.seconds[column]) / (left + self.bubbles)
        return seconds

    def room(self, loads: Loads, count: int, step: float) -> float:
        """Work that fits into the free microbatches of all columns, seconds."""
        room = 0.0
        for column in range(self.num):
            left = count - loads.used[column]
            if left:
                room += left * max(self.target(loads, column, count, step) - self.overhead, 0.0)
        return room
