"""``waves``: equal counts and ranks in lockstep, by waves of microbatches that all take the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tdp_megatron import _C
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.columns import columns_reference
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, plan_of_ops, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem
from tdp_megatron.schedule.tails import fill_tails, fill_tails_reference
from tdp_megatron.schedule.wave_building import Wave, even_waves, place, tall_wave

__all__ = ["waves", "waves_reference"]

#: Sequences and slots that all candidates together may touch, so that planning time stays bounded.
_EFFORT = 1 << 16
_FEWEST_CANDIDATES = 10
_MOST_CANDIDATES = 96
#: A step this close to the lower bound ends the search.
_GOOD_ENOUGH = 1.002
#: With at least this many candidates all numbers of tall waves are tried.
_THOROUGH = 16
_MOST_TALL_WAVES = 12
#: What a candidate is expected to be longer than hoped for, over the least seen with fewer tall waves.
_LEAST_GAP = 0.5
#: Numbers of tall waves tried otherwise: most often many are best.
_PROBES = (8, 12, 4, 2, 1, 0)
#: Even waves beyond the fewest, and time limits over their mean, tried around the best so far.
_AROUND = ((1, 1.0), (2, 1.0), (0, 1.25), (1, 1.25), (0, 1.5), (3, 1.0))
#: Time limit of a sequence alone over the mean time of a wave.
_STRETCHES = (1.0, 1.25, 1.5)


def waves(problem: Problem) -> Plan:
    """Waves in which all ranks are busy for about the same time.

    First a few *tall* waves, each as long as its longest sequence takes and filled with the longest that fit, then
    *even* waves that share what is left. How many of each, and on how many ranks the longest sequences run, is what
    makes the step shortest in the mode of ``problem``; the number of candidates depends on the input alone.
    """
    mode = problem.mode
    ops = _C.schedule_waves(
        native_input(problem),
        lower_bound(problem.seqlens, problem.layout, problem.cost),
        mode.name == "lockstep",
        mode.name == "pipeline",
        (mode.stages - 1) / mode.virtual_stages,
    )
    return plan_of_ops(problem, *fill_tails(problem, *ops), "waves")


def waves_reference(problem: Problem) -> Plan:
    """``waves`` in plain Python; the native core gives the same plan."""
    scratch = Scratch(problem)
    mode = problem.mode
    search = _Search(scratch)
    seconds, ops = math.inf, search.best_ops
    if mode.name == "pipeline" and scratch.lengths:
        seconds, ops = columns_reference(scratch, (mode.stages - 1) / mode.virtual_stages)
    if not ops or search.thorough:
        search.tall_then_even()
        if search.best_seconds < seconds:
            ops = search.best_ops
    return plan_of_placed_ops(problem, fill_tails_reference(problem, ops), "waves")


@dataclass(slots=True)
class _Head:
    """Tall waves made so far, and what they leave."""

    waves: list[Wave]
    seconds: float
    alive: list[int]


class _Search:
    def __init__(self, scratch: Scratch) -> None:
        problem = scratch.problem
        self.scratch = scratch
        self.mode = problem.mode
        self.multiple = problem.limits.microbatches_multiple
        self.capacity = problem.layout.num_ranks * problem.layout.tokens_per_rank_limit
        self.good_enough = lower_bound(problem.seqlens, problem.layout, problem.cost) * _GOOD_ENOUGH
        size = len(scratch.lengths) + 4 * scratch.num_ranks
        self.thorough = _EFFORT // size >= _THOROUGH
        self.left = min(_EFFORT // size, _MOST_CANDIDATES) if self.thorough else _FEWEST_CANDIDATES
        #: Numbers of tall waves, and by how much the step was longer than hoped for.
        self.gaps: list[tuple[int, float]] = []
        self.best_seconds = math.inf
        self.best_ops: list[PlacedOp] = []
        #: Of the best even waves so far.
        self.best_head: _Head | None = None

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.best_seconds <= self.good_enough

    def offer(self, made: list[Wave]) -> float:
        """Seconds of the step that ``made`` gives in the mode; kept if it is the best so far."""
        placed, seconds = None, math.inf
        if self.mode.name == "lockstep":
            seconds = 0.0
            for wave in made:
                seconds += max(op.seconds for op in wave)
        else:
            placed, loads = place(self.scratch, made)
            seconds = max(loads)
            if self.mode.name == "pipeline":
                longest = max(op.seconds for wave in made for op in wave)
                seconds += (self.mode.stages - 1) / self.mode.virtual_stages * longest
        if seconds < self.best_seconds:
            self.best_seconds = seconds
            self.best_ops = place(self.scratch, made)[0] if placed is None else placed
        return seconds

    def evenly(self, head: _Head, extra: int, stretches: tuple[float, ...]) -> float:
        """Fill up ``head`` with even waves, ``extra`` more than needed; the first stretch that works counts.

        A sequence alone may take ``stretch`` times the mean of a wave.
        """
        count = self.fewest(head) + extra
        mean = self.mean_seconds(head, count)
        if head.seconds + mean * count >= self.best_seconds:
            return math.inf
        for stretch in stretches:
            if self.left <= 0:
                return math.inf
            unfilled = even_waves(self.scratch, head.alive, count, stretch * mean)
            if unfilled is None:
                continue
            hoped = head.seconds + unfilled.seconds
            if hoped + self.gap(len(head.waves)) >= self.best_seconds:
                return math.inf
            self.left -= 1
            made = unfilled.fill()
            if made is not None:
                before = self.best_seconds
                seconds = self.offer([*head.waves, *made])
                if seconds < before:
                    self.best_head = head
                if not self.thorough:
                    self.gaps.append((len(head.waves), max(seconds - hoped, 0.0)))
                return seconds
        return math.inf

    def gap(self, tall_waves: int) -> float:
        """By how much the step will be longer than hoped for: the fewer tall waves, the more."""
        with_more = [gap for number, gap in self.gaps if number > tall_waves]
        if with_more:
            return max(with_more)
        return min((gap for _, gap in self.gaps), default=0.0) * _LEAST_GAP

    def fewest(self, head: _Head) -> int:
        tokens = sum(self.scratch.lengths[i] for i in head.alive)
        by_count = -(-len(head.alive) // (self.scratch.max_sequences * self.scratch.num_ranks))
        count = max(-(-tokens // self.capacity), by_count, 1)
        return count + -(count + len(head.waves)) % self.multiple

    def mean_seconds(self, head: _Head, count: int) -> float:
        scratch = self.scratch
        level = scratch.levels[0]
        work = 0.0
        for i in reversed(head.alive):
            work += scratch.cost.a * level.padded[i] + scratch.cost.b * level.squares[i]
        return work / scratch.num_ranks / count + scratch.cost.c0

    def tall_then_even(self) -> None:
        scratch = self.scratch
        if not scratch.lengths:
            return
        everything = list(range(len(scratch.lengths)))
        times = sorted({v.alone[0] for v in scratch.levels if v.alone[0] < math.inf}, reverse=True)
        # Twice the CP size that the longest sequence needs is best most often, so it goes first.
        limits = [*times[1:2], *times[:1], *times[2:4]]
        seen: set[tuple[int, int, float]] = set()
        heads_of = {limit: [_Head([], 0.0, everything)] for limit in limits}
        if not self.thorough:
            limits[:2] = sorted(limits[:2], key=lambda limit: self.hoped(heads_of[limit], limit))
        for limit in limits:
            heads = heads_of[limit]
            tried: dict[int, float] = {}
            for number in range(_MOST_TALL_WAVES + 1) if self.thorough else _PROBES:
                self.probe(heads, number, limit, tried, seen)
            start = min(tried, key=lambda number: (tried[number], number), default=-1)
            least = tried.get(start, math.inf)
            for direction in (1, -1):
                number = start + direction
                while number >= 0 and number not in tried:
                    self.probe(heads, number, limit, tried, seen)
                    if tried.get(number, math.inf) >= least:
                        break
                    least = tried[number]
                    number += direction
            if self.done:
                break
        self.refine()
        if not self.best_ops:
            # Even waves never fitted; tall ones alone always do.
            head = _Head([], 0.0, everything)
            while head.alive:
                head = self.taller(head, times[0])
            self.offer(head.waves)

    def probe(
        self,
        heads: list[_Head],
        number: int,
        limit: float,
        tried: dict[int, float],
        seen: set[tuple[int, int, float]],
    ) -> None:
        """Fill up ``number`` tall waves with even ones, unless they alone take too long; the step goes to ``tried``."""
        while len(heads) <= number:
            if not heads[-1].alive or heads[-1].seconds >= self.best_seconds or self.done:
                return
            self.grow(heads, limit)
        head = heads[number]
        key = (len(head.waves), len(head.alive), head.seconds)
        if not head.alive or self.done or key in seen:
            return
        seen.add(key)
        tried[number] = self.evenly(head, 0, _STRETCHES)

    def hoped(self, heads: list[_Head], limit: float) -> float:
        """Seconds that even waves after many tall ones should take, without filling them."""
        while len(heads) <= _PROBES[0] and heads[-1].alive:
            self.grow(heads, limit)
        head = heads[-1] if heads[-1].alive else heads[-2]
        count = self.fewest(head)
        mean = self.mean_seconds(head, count)
        for stretch in _STRETCHES:
            unfilled = even_waves(self.scratch, head.alive, count, stretch * mean)
            if unfilled is not None:
                return head.seconds + unfilled.seconds
        return math.inf

    def grow(self, heads: list[_Head], limit: float) -> None:
        """One more tall wave after the last of ``heads``; a plan of its own where it takes the last sequences."""
        heads.append(self.taller(heads[-1], limit))
        if not heads[-1].alive:
            self.offer(heads[-1].waves)

    def taller(self, head: _Head, limit: float) -> _Head:
        wave, alive = tall_wave(self.scratch, head.alive, limit)
        return _Head([*head.waves, wave], head.seconds + max(op.seconds for op in wave), alive)

    def refine(self) -> None:
        """More even waves, or longer sequences on fewer ranks, around the best so far."""
        for extra, stretch in _AROUND if self.thorough else _AROUND[:2]:
            if self.done or self.best_head is None:
                return
            self.evenly(self.best_head, extra * self.multiple, (stretch,))
