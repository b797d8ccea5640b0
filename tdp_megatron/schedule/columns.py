"""Columns: plans for pipelines, where a rank pays the sum of its microbatches and once more a share of its longest.

A column is the smallest block of ranks. All columns have the same number of microbatches, but only those with a tall
one pay for it, so tall ones share columns instead of spreading over all.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.packs import PlacedOp
from tdp_megatron.schedule.wave_building import GrowingOp, choose_levels_under, fill_lowest, wide_ops

__all__ = ["columns_reference"]

#: Halvings of the step in an estimate; the second kind takes longer.
_HALVINGS = 20
_HALVINGS_TOGETHER = 10
_DOUBLINGS = 64
#: An estimate this much above the least is not needed.
_FAR = 1.02
#: With less than this share of the work in short sequences, tall microbatches must be balanced among themselves.
_FEW_OTHERS = 0.2
#: Sequences are tall when they take longer alone than this many mean microbatches.
_TALL = (1.0, 0.8)
#: Time limits of a microbatch over the mean, tried beside the times of the longest sequence.
_STRETCHES = (1.0, 1.25, 1.5)
#: Rules of which the number of microbatches is searched, and plans made.
_RULES = 2
_FILLS = 4
#: Plans whose tokens do not fit before the search ends.
_MISSES = 32
#: The same where sequences are so few that luck decides.
_FEW_SEQUENCES = 2048
_RULES_OF_FEW = 6
_FILLS_OF_FEW = 32
_MOST_STEPS = 12
_PATIENCE = 1
_PATIENCE_OF_FEW = 2
#: The number of microbatches at which the search starts, over the best one without tall sequences.
_START = 0.6


@dataclass(slots=True)
class _Rule:
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
class _Tall:
    """Microbatches that are placed first."""

    ops: list[GrowingOp]
    """By falling CP size, then time."""
    first_rest: int
    """Number of the first sequence that is in none of them."""


@dataclass(slots=True)
class _Loads:
    """What every column has to run."""

    seconds: list[float]
    longest: list[float]
    used: list[int]
    """Microbatches."""
    where: list[int]
    """First column of each tall op."""


@dataclass(slots=True)
class _Estimate:
    step: float
    count: int
    tall: _Tall
    loads: _Loads


def columns_reference(scratch: Scratch, bubbles: float) -> tuple[float, list[PlacedOp]]:
    """The step and the ops, as many on every rank, in order; infinite and none where no plan was found.

    Args:
        scratch: the sequences; at least one.
        bubbles: how often a rank pays its longest microbatch beyond the sum of all.
    """
    return _Columns(scratch, bubbles).search()


class _Columns:
    def __init__(self, scratch: Scratch, bubbles: float) -> None:
        cost, smallest = scratch.cost, scratch.levels[0]
        self.scratch = scratch
        self.bubbles = bubbles
        #: Together they only help against bubbles.
        self.always_apart = bubbles == 0.0
        self.smallest = smallest
        self.width = smallest.cp_size
        self.num = scratch.num_ranks // smallest.cp_size
        self.multiple = scratch.problem.limits.microbatches_multiple
        # Half a tail is what a microbatch pads on average.
        self.overhead = cost.c0 + cost.a * scratch.tail / 2.0
        #: Seconds of a microbatch without sequences.
        self.empty = scratch.seconds(0, 0.0, self.width)
        n = len(scratch.lengths)
        self.few = n <= _FEW_SEQUENCES
        self.rules, self.fills, self.patience = _RULES, _FILLS, _PATIENCE
        if self.few:
            self.rules, self.fills, self.patience = _RULES_OF_FEW, _FILLS_OF_FEW, _PATIENCE_OF_FEW
        #: Work and tokens of sequence i and all shorter ones.
        self.work_from = [0.0] * (n + 1)
        self.tokens_from = [0] * (n + 1)
        for i in reversed(range(n)):
            self.work_from[i] = self.work_from[i + 1] + self.work(i)
            self.tokens_from[i] = self.tokens_from[i + 1] + smallest.padded[i]
        self.mean_work = self.work_from[0] / self.num
        self.times = sorted({v.alone[0] for v in scratch.levels if v.alone[0] < math.inf}, reverse=True)
        self.wide: dict[float, list[GrowingOp]] = {}

    def work(self, i: int) -> float:
        """Seconds that sequence i adds to a column."""
        cost, smallest = self.scratch.cost, self.smallest
        return (cost.a * smallest.padded[i] + cost.b * smallest.squares[i]) / self.width

    def search(self) -> tuple[float, list[PlacedOp]]:
        """The best of a few plans, those with the best estimates."""
        fewest, most, count = self.counts()
        # Together tall ops are worth a longer microbatch; where all take about the same time, they are better apart.
        rules = [_Rule(time, 0.0, tall, False) for tall in _TALL for time in self.times]
        rules += [_Rule(self.times[-1], stretch, _TALL[0], True) for stretch in _STRETCHES]
        ranked = self.rank(rules, count)
        if not ranked and not self.always_apart:
            self.always_apart = True
            ranked = self.rank(rules, count)
        known: list[_Estimate] = []
        for _, number in ranked[: self.rules]:
            known.extend(self.climb(rules[number], count, fewest, most).values())
        best_seconds = math.inf
        best_ops: list[PlacedOp] = []
        fills, misses = self.fills, _MISSES
        for chosen in sorted(known, key=lambda made: (made.step, made.count)):
            if chosen.step >= best_seconds or fills == 0 or misses == 0:
                break
            if self.work_from[chosen.tall.first_rest] < _FEW_OTHERS * self.work_from[0]:
                self.estimate_apart(chosen)
            seconds, ops = self.fill(chosen)
            if seconds == math.inf:
                misses -= 1
            else:
                fills -= 1
            if seconds < best_seconds:
                best_seconds, best_ops = seconds, ops
        return best_seconds, best_ops

    def rank(self, rules: list[_Rule], count: int) -> list[tuple[float, int]]:
        """Estimates and numbers of rules, the best first; others only where one might be among the best."""
        ranked: list[tuple[float, int]] = []
        for number, rule in enumerate(rules):
            made = self.estimate(rule, count, ranked[self.rules - 1][0] if len(ranked) >= self.rules else math.inf)
            if made is not None:
                ranked.append((made.step, number))
                ranked.sort()
        return ranked

    def counts(self) -> tuple[int, int, int]:
        """Fewest and most microbatches of a column that make sense, and the number at which the search starts."""
        scratch, multiple = self.scratch, self.multiple
        n = len(scratch.lengths)
        slots = scratch.max_sequences * self.num
        tokens = sum(scratch.lengths)
        capacity = self.num * self.width * scratch.problem.layout.tokens_per_rank_limit
        fewest = max(-(-tokens // capacity), -(-n // slots))
        fewest += -fewest % multiple
        # Twice as many as there would be if each sequence had one alone, on the ranks where the longest is fastest.
        fastest = min(scratch.levels, key=lambda level: level.alone[0])
        most = max(-(-2 * n * (fastest.cp_size // self.width) // self.num), fewest)
        most += -most % multiple
        # Of count * overhead + bubbles * work / count, less because some columns pay for tall ones anyway.
        best = math.inf
        if self.overhead > 0.0:
            best = (1.0 if self.few else _START) * math.sqrt(self.bubbles * self.mean_work / self.overhead)
        count = int(min(max(best, fewest), most))
        return fewest, most, count + -count % multiple

    def climb(self, rule: _Rule, count: int, fewest: int, most: int) -> dict[int, _Estimate]:
        """Estimates by number of microbatches, around the least and some way below it."""
        known: dict[int, _Estimate] = {}
        best = math.inf
        for upwards in (False, True):
            at, worse = count, 0
            for _ in range(_MOST_STEPS):
                if at not in known:
                    made = self.estimate(rule, at, best * _FAR)
                    if made is not None:
                        known[at] = made
                    if made is None or made.step >= best:
                        worse += 1
                    else:
                        best, worse = made.step, 0
                following = max(at + 1, at * 5 // 4) if upwards else min(at - 1, at * 4 // 5)
                following += -following % self.multiple
                if worse == self.patience or following == at or not fewest <= following <= most:
                    break
                at = following
        if self.few and known:
            self.climb_slowly(rule, fewest, most, known)
        return known

    def climb_slowly(self, rule: _Rule, fewest: int, most: int, known: dict[int, _Estimate]) -> None:
        """The same by the smallest steps, from the least estimate so far."""
        at = min(known, key=lambda count: (known[count].step, count))
        best = known[at].step
        for direction in (-self.multiple, self.multiple):
            count, worse = at + direction, 0
            for _ in range(_MOST_STEPS):
                if not fewest <= count <= most or worse == self.patience:
                    break
                if count not in known:
                    made = self.estimate(rule, count, best * _FAR)
                    if made is not None:
                        known[count] = made
                if count in known and known[count].step < best:
                    best, worse = known[count].step, 0
                else:
                    worse += 1
                count += direction

    def estimate(self, rule: _Rule, count: int, most: float) -> _Estimate | None:
        """The step with ``count`` microbatches per column; None where it is ``most`` or longer, or has no room."""
        mean = self.mean_work / count + self.scratch.cost.c0
        limit = max(rule.time, rule.stretch * mean)
        longest = min(level.alone[0] for level in self.scratch.levels if level.alone[0] <= max(limit, self.times[-1]))
        if longest * (1.0 + self.bubbles) >= most:
            return None
        tall = self.make_tall(limit, min(rule.tall * mean, limit))
        if self.least(tall, count) >= most:
            return None
        best = _Estimate(most, count, tall, self.no_loads())
        if rule.apart or self.always_apart or not tall.ops:
            self.estimate_apart(best)
        else:
            self.estimate_together(best)
        return best if best.step < most else None

    def estimate_apart(self, best: _Estimate) -> None:
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

    def estimate_together(self, best: _Estimate) -> None:
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

    def least(self, tall: _Tall, count: int) -> float:
        """Seconds of the step if all columns had the same and all microbatches of a column, too."""
        seconds = self.work_from[tall.first_rest]
        for op in tall.ops:
            seconds += op.seconds * (op.level.cp_size // self.width)
        mean = seconds / self.num
        return mean + self.bubbles * mean / count

    def make_tall(self, limit: float, tall: float) -> _Tall:
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
        return _Tall(ops, first_rest)

    def no_loads(self) -> _Loads:
        """Empty columns."""
        return _Loads([0.0] * self.num, [0.0] * self.num, [0] * self.num, [])

    def put(self, loads: _Loads, first: int, op: GrowingOp) -> None:
        """Run ``op`` on the columns from ``first`` on."""
        for column in range(first, first + op.level.cp_size // self.width):
            loads.seconds[column] += op.seconds
            loads.longest[column] = max(loads.longest[column], op.seconds)
            loads.used[column] += 1
        loads.where.append(first)

    def apart(self, ops: list[GrowingOp], count: int) -> _Loads | None:
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

    def together(self, ops: list[GrowingOp], count: int, step: float) -> _Loads | None:
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

    def has_room(self, tall: _Tall, loads: _Loads, count: int) -> bool:
        """Whether all other sequences fit into what is left, by tokens and number."""
        left = sum(count - used for used in loads.used)
        others = len(self.scratch.lengths) - tall.first_rest
        tokens = self.tokens_from[tall.first_rest]
        return tokens <= left * self.smallest.token_cap and others <= left * self.scratch.max_sequences

    def target(self, loads: _Loads, column: int, count: int, step: float) -> float:
        """Seconds that each microbatch still free in ``column`` may take."""
        left = count - loads.used[column]
        seconds = (step - loads.seconds[column] - self.bubbles * loads.longest[column]) / left
        if seconds > loads.longest[column]:
            # They are the longest then, and paid for once more.
            return (step - loads.seconds[column]) / (left + self.bubbles)
        return seconds

    def room(self, loads: _Loads, count: int, step: float) -> float:
        """Work that fits into the free microbatches of all columns, seconds."""
        room = 0.0
        for column in range(self.num):
            left = count - loads.used[column]
            if left:
                room += left * max(self.target(loads, column, count, step) - self.overhead, 0.0)
        return room

    def fill(self, estimate: _Estimate) -> tuple[float, list[PlacedOp]]:
        """The step and the ops: others to columns, longest first where most room is left, then evenly in each.

        The step is infinite where tokens do not fit.
        """
        scratch, count, loads = self.scratch, estimate.count, estimate.loads
        members = self.split(estimate)
        if members is None:
            return math.inf, []
        placed: list[PlacedOp] = [
            (first * self.width, op.level.cp_size, [scratch.sample_ids[i] for i in op.members])
            for op, first in zip(estimate.tall.ops, loads.where, strict=True)
        ]
        step = 0.0
        for column in range(self.num):
            ops = [GrowingOp(self.smallest, seconds=self.empty) for _ in range(count - loads.used[column])]
            if not fill_lowest(scratch, members[column], ops, [0.0] * len(ops)):
                return math.inf, []
            seconds, longest = loads.seconds[column], loads.longest[column]
            for op in ops:
                seconds += op.seconds
                longest = max(longest, op.seconds)
                placed.append((column * self.width, self.width, [scratch.sample_ids[i] for i in op.members]))
            step = max(step, seconds + self.bubbles * longest)
        return step, placed

    def split(self, estimate: _Estimate) -> list[list[int]] | None:
        """Sequences of each column that are in no tall op; None where tokens do not fit."""
        scratch, count, loads = self.scratch, estimate.count, estimate.loads
        members: list[list[int]] = [[] for _ in range(self.num)]
        heap: list[tuple[float, int]] = []
        tokens, slots = [0] * self.num, [0] * self.num
        for column in range(self.num):
            left = count - loads.used[column]
            tokens[column], slots[column] = left * self.smallest.token_cap, left * scratch.max_sequences
            if left:
                target = self.target(loads, column, count, estimate.step)
                heap.append((-(left * (target - self.overhead)), column))
        heapq.heapify(heap)
        #: Columns too full for the current length, by the length that they can take.
        parked: list[tuple[int, int, float]] = []
        for i in range(estimate.tall.first_rest, len(scratch.lengths)):
            length = self.smallest.padded[i]
            while parked and -parked[0][0] >= length:
                _, column, key = heapq.heappop(parked)
                heapq.heappush(heap, (key, column))
            while heap:
                key, column = heap[0]
                if length <= tokens[column] and slots[column]:
                    break
                heapq.heappop(heap)
                if slots[column]:
                    heapq.heappush(parked, (-tokens[column], column, key))
            if not heap:
                return None
            members[column].append(i)
            tokens[column] -= length
            slots[column] -= 1
            heapq.heapreplace(heap, (key + self.work(i), column))
        return members
