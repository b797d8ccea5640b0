"""Columns: plans for pipelines, where a rank pays the sum of its microbatches and once more a share of its longest.

A column is the smallest block of ranks. All columns have the same number of microbatches, but only those with a tall
one pay for it, so tall ones share columns instead of spreading over all.
"""

from __future__ import annotations

import heapq
import math

from tdp_megatron.schedule.column_estimates import ColumnEstimates, Estimate, Rule
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.packs import PlacedOp
from tdp_megatron.schedule.wave_building import GrowingOp, fill_lowest

__all__ = ["columns_reference"]

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


def columns_reference(scratch: Scratch, bubbles: float) -> tuple[float, list[PlacedOp]]:
    """The step and the ops, as many on every rank, in order; infinite and none where no plan was found.

    Args:
        scratch: the sequences; at least one.
        bubbles: how often a rank pays its longest microbatch beyond the sum of all.
    """
    return _Columns(scratch, bubbles).search()


class _Columns(ColumnEstimates):
    def __init__(self, scratch: Scratch, bubbles: float) -> None:
        super().__init__(scratch, bubbles)
        self.multiple = scratch.problem.limits.microbatches_multiple
        self.few = len(scratch.lengths) <= _FEW_SEQUENCES
        self.rules, self.fills, self.patience = _RULES, _FILLS, _PATIENCE
        if self.few:
            self.rules, self.fills, self.patience = _RULES_OF_FEW, _FILLS_OF_FEW, _PATIENCE_OF_FEW

    def search(self) -> tuple[float, list[PlacedOp]]:
        """The best of a few plans, those with the best estimates."""
        fewest, most, count = self.counts()
        # Together tall ops are worth a longer microbatch; where all take about the same time, they are better apart.
        rules = [Rule(time, 0.0, tall, False) for tall in _TALL for time in self.times]
        rules += [Rule(self.times[-1], stretch, _TALL[0], True) for stretch in _STRETCHES]
        ranked = self.rank(rules, count)
        if not ranked and not self.always_apart:
            self.always_apart = True
            ranked = self.rank(rules, count)
        known: list[Estimate] = []
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

    def rank(self, rules: list[Rule], count: int) -> list[tuple[float, int]]:
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

    def climb(self, rule: Rule, count: int, fewest: int, most: int) -> dict[int, Estimate]:
        """Estimates by number of microbatches, around the least and some way below it."""
        known: dict[int, Estimate] = {}
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

    def climb_slowly(self, rule: Rule, fewest: int, most: int, known: dict[int, Estimate]) -> None:
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

    def fill(self, estimate: Estimate) -> tuple[float, list[PlacedOp]]:
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

    def split(self, estimate: Estimate) -> list[list[int]] | None:
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
