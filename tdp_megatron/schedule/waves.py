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
from tdp_megatron.schedule.wave_building import Wave, even_waves, place, tall_wave

__all__ = ["waves", "waves_reference"]

#: Sequences and slots that all candidates together may touch, so that planning time stays bounded.
_EFFORT = 1 << 16
_FEWEST_CANDIDATES = 16
_MOST_CANDIDATES = 96
#: A step this close to the lower bound ends the search.
_GOOD_ENOUGH = 1.002
#: Tall waves tried after the best so far.
_PATIENCE = 3
_MOST_TALL_WAVES = 12
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
    return plan_of_ops(problem, *ops, "waves")


def waves_reference(problem: Problem) -> Plan:
    """``waves`` in plain Python; the native core gives the same plan."""
    scratch = Scratch(problem)
    mode = problem.mode
    ops: list[PlacedOp] = []
    if mode.name == "pipeline" and scratch.lengths:
        ops = columns_reference(scratch, (mode.stages - 1) / mode.virtual_stages)
    if not ops:
        search = _Search(scratch)
        search.tall_then_even()
        ops = search.best_ops
    return plan_of_placed_ops(problem, ops, "waves")


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
        self.left = min(max(_EFFORT // size, _FEWEST_CANDIDATES), _MOST_CANDIDATES)
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
            self.left -= 1
            made = even_waves(self.scratch, head.alive, count, stretch * mean)
            if made is not None:
                before = self.best_seconds
                seconds = self.offer([*head.waves, *made])
                if seconds < before:
                    self.best_head = head
                return seconds
        return math.inf

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
        for number, limit in enumerate(limits):
            head = _Head([], 0.0, everything)
            shortest, worse = math.inf, 0
            for _ in range(_MOST_TALL_WAVES + 1):
                key = (len(head.waves), len(head.alive), head.seconds)
                if key not in seen:
                    seen.add(key)
                    seconds = self.evenly(head, 0, _STRETCHES)
                    worse = 0 if seconds < shortest else worse + 1
                    shortest = min(shortest, seconds)
                head = self.taller(head, limit)
                if not head.alive:
                    self.offer(head.waves)
                    break
                if head.seconds >= self.best_seconds or worse >= _PATIENCE or self.done:
                    break
            if self.done and number > 0:
                break
        self.refine()
        if not self.best_ops:
            # Even waves never fitted; tall ones alone always do.
            head = _Head([], 0.0, everything)
            while head.alive:
                head = self.taller(head, times[0])
            self.offer(head.waves)

    def taller(self, head: _Head, limit: float) -> _Head:
        wave, alive = tall_wave(self.scratch, head.alive, limit)
        return _Head([*head.waves, wave], head.seconds + max(op.seconds for op in wave), alive)

    def refine(self) -> None:
        """More even waves, or longer sequences on fewer ranks, around the best so far."""
        for extra, stretch in ((0, 1.25), (1, 1.0), (1, 1.25), (0, 1.5), (2, 1.0), (3, 1.0)):
            if self.done or self.best_head is None:
                return
            self.evenly(self.best_head, extra * self.multiple, (stretch,))
