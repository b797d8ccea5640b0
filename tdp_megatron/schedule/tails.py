"""Fuller tails: sequences exchanged between the microbatches of a plan, so that fewer tokens are padding.

A microbatch is padded to whole tail multiples, half of one on average. Where sequences change places so that one gives
away what it has over whole tails and another has room for it, a whole tail less is held, and nothing else changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tdp_megatron import _C
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp
from tdp_megatron.schedule.problem import Problem
from tdp_megatron.types import Int64Array

__all__ = ["fill_tails", "fill_tails_reference"]

#: Share of the tokens held that tails must pad for the exchange to be worth its time.
_WORTH_IT = 0.003
#: A rank that the step waits for must gain this share, so that rounding never makes the step longer.
_MARGIN = 1e-12
#: Short sequences tried for the tail of one op, and most that it gets.
_FILL_TRIES = 24
_FILLS_OF_OP = 8
#: Swaps tried for a sequence alone in its op, and for any op.
_SETTLE_TRIES = 48
_FEWEST_TRIES = 20
_MOST_TRIES = 64
#: The same for all ops of one CP size, so that planning time stays bounded.
_EFFORT = 1 << 18
#: Sequences tried of those that leave the same over whole tails.
_NEAREST = 8
#: Modes in which a rank may have fewer microbatches than the next, so that nothing is run for an op without sequences.
_FREE = ("free", "barrier")


def fill_tails(
    problem: Problem, first_rank: Int64Array, cp_size: Int64Array, offsets: Int64Array, sample_ids: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """The ops with fewer tokens held, tails included; the step in the mode of ``problem`` takes no longer.

    Ranks, CP sizes and order of the ops stay. An op may lose its last sequence: it becomes a dummy, or goes where ranks
    run free. First, short sequences move whole into the tails of others. Then a sequence alone in its op changes places
    with one that fills whole tails better, as far as others share an op. Last, two ops swap sequences where together
    they need a tail less.

    Args:
        problem: lengths, layout, cost, mode and limits.
        first_rank, cp_size: int64 [m], ops in order.
        offsets: int64 [m + 1] into ``sample_ids``.
        sample_ids: int64 [n], by op.

    Returns:
        The same four arrays.
    """
    mode = problem.mode
    first_rank, cp_size, offsets, sample_ids = _C.schedule_fill_tails(
        native_input(problem),
        mode.name == "lockstep",
        mode.name == "pipeline",
        (mode.stages - 1) / mode.virtual_stages,
        first_rank,
        cp_size,
        offsets,
        sample_ids,
    )
    if mode.name in _FREE:
        filled = np.diff(offsets) > 0
        first_rank, cp_size = first_rank[filled], cp_size[filled]
        offsets = np.concatenate([offsets[:1], offsets[1:][filled]])
    return first_rank, cp_size, offsets, sample_ids


def fill_tails_reference(problem: Problem, ops: Sequence[PlacedOp]) -> list[PlacedOp]:
    """``fill_tails`` in plain Python; the native core gives the same ops."""
    filled = list(ops) if problem.layout.tail_multiple == 1 else _Tails(problem, ops).run()
    return [op for op in filled if op[2]] if problem.mode.name in _FREE else filled


@dataclass(slots=True)
class _Op:
    first: int
    level: int
    unit: int
    """Tokens of one tail multiple on all ranks."""
    wave: int = 0
    tokens: int = 0
    squares: float = 0.0
    seconds: float = 0.0
    members: list[int] = field(default_factory=list)

    @property
    def hole(self) -> int:
        return _whole_tails(self.tokens, self.unit) * self.unit - self.tokens


def _whole_tails(tokens: int, unit: int) -> int:
    return max(-(-tokens // unit), 1)


def _nearest(lengths: Sequence[int], wanted: int, most: int) -> Iterator[int]:
    """Numbers of rising ``lengths``, those nearest to ``wanted`` first; of equally near ones the longer."""
    up = bisect_left(lengths, wanted)
    down = up - 1
    for _ in range(most):
        has_longer, has_shorter = up < len(lengths), down >= 0
        if not has_longer and not has_shorter:
            return
        if has_longer and (not has_shorter or lengths[up] - wanted <= wanted - lengths[down]):
            yield up
            up += 1
        else:
            yield down
            down -= 1


class _Tails:
    def __init__(self, problem: Problem, ops: Sequence[PlacedOp]) -> None:
        self.problem = problem
        self.given = list(ops)
        self.scratch = scratch = Scratch(problem)
        self.lockstep = problem.mode.name == "lockstep"
        self.free = problem.mode.name in _FREE
        self.bubbles = 0.0
        if problem.mode.name == "pipeline":
            self.bubbles = (problem.mode.stages - 1) / problem.mode.virtual_stages
        numbers = {level.cp_size: number for number, level in enumerate(scratch.levels)}
        place_of = {sample_id: i for i, sample_id in enumerate(scratch.sample_ids)}
        self.loads = [0.0] * scratch.num_ranks
        self.longest = [0.0] * scratch.num_ranks
        self.waves: list[float] = []
        self.ops: list[_Op] = []
        #: By number in the order of falling length.
        self.op_of = [0] * len(scratch.lengths)
        counts = [0] * scratch.num_ranks
        for number, (first, k, sample_ids) in enumerate(ops):
            op = _Op(first, numbers[k], k * scratch.tail, counts[first])
            level = scratch.levels[op.level]
            for sample_id in sample_ids:
                i = place_of[sample_id]
                op.tokens += level.padded[i]
                op.squares += level.squares[i]
                op.members.append(i)
                self.op_of[i] = number
            op.seconds = scratch.seconds(op.tokens, op.squares, k)
            self.waves.extend([0.0] * (op.wave + 1 - len(self.waves)))
            self.waves[op.wave] = max(self.waves[op.wave], op.seconds)
            for rank in range(first, first + k):
                counts[rank] += 1
                self.loads[rank] += op.seconds
                self.longest[rank] = max(self.longest[rank], op.seconds)
            self.ops.append(op)
        most = max(load + self.bubbles * longest for load, longest in zip(self.loads, self.longest, strict=True))
        self.limit = most * (1.0 - _MARGIN)

    def run(self) -> list[PlacedOp]:
        held = sum(op.tokens + op.hole for op in self.ops if op.members)
        if sum(op.hole for op in self.ops if op.members) <= _WORTH_IT * held:
            return self.given
        before = self.free_seconds()
        self.fill()
        for level in range(len(self.scratch.levels)):
            self.settle(level)
            self.swap_all(level)
        # Sums of ranks say nothing of those that wait for each other.
        if self.free_seconds() > before:
            return self.given
        sample_ids: list[list[int]] = [[] for _ in self.ops]
        for i, number in enumerate(self.op_of):
            sample_ids[number].append(self.scratch.sample_ids[i])
        return [(first, k, ids) for (first, k, _), ids in zip(self.given, sample_ids, strict=True)]

    def free_seconds(self) -> float:
        if not self.free:
            return 0.0
        return _C.schedule_free_step(
            np.array([first for first, _, _ in self.given], dtype=np.int64),
            np.array([k for _, k, _ in self.given], dtype=np.int64),
            np.array([op.seconds for op in self.ops], dtype=np.float64),
            self.scratch.num_ranks,
        )

    def ranks(self, op: _Op) -> range:
        return range(op.first, op.first + self.scratch.levels[op.level].cp_size)

    def bears(self, a: _Op, tokens: int, squares: float, b: _Op, tokens_b: int, squares_b: float) -> bool:
        """Whether the mode's step bears ``a`` and ``b`` with so many more tokens and squares."""
        scratch = self.scratch
        level_a, level_b = scratch.levels[a.level], scratch.levels[b.level]
        if a.tokens + tokens > level_a.token_cap or b.tokens + tokens_b > level_b.token_cap:
            return False
        seconds_a = scratch.seconds(a.tokens + tokens, a.squares + squares, level_a.cp_size)
        seconds_b = scratch.seconds(b.tokens + tokens_b, b.squares + squares_b, level_b.cp_size)
        if self.lockstep:
            return seconds_a <= self.waves[a.wave] and seconds_b <= self.waves[b.wave]
        more_a, more_b = seconds_a - a.seconds, seconds_b - b.seconds
        ranks_a, ranks_b = self.ranks(a), self.ranks(b)
        for rank in ranks_a:
            load, most = self.loads[rank] + more_a, seconds_a
            if rank in ranks_b:
                load, most = load + more_b, max(seconds_a, seconds_b)
            if load + self.bubbles * max(self.longest[rank], most) > self.limit:
                return False
        return not any(
            self.loads[rank] + more_b + self.bubbles * max(self.longest[rank], seconds_b) > self.limit
            for rank in ranks_b
            if rank not in ranks_a
        )

    def change(self, op: _Op, tokens: int, squares: float) -> None:
        op.tokens += tokens
        op.squares += squares
        seconds = self.scratch.seconds(op.tokens, op.squares, self.scratch.levels[op.level].cp_size)
        for rank in self.ranks(op):
            self.loads[rank] += seconds - op.seconds
            self.longest[rank] = max(self.longest[rank], seconds)
        op.seconds = seconds

    def fill(self) -> None:
        """Sequences of the smallest CP size, whole, into the tails of other ops where their own needs fewer tails."""
        lengths = self.scratch.lengths
        candidates = [i for i in range(len(lengths)) if self.ops[self.op_of[i]].level == 0]
        falling = [-lengths[i] for i in candidates]
        small = self.scratch.levels[0]
        for number, op in enumerate(self.ops):
            level = self.scratch.levels[op.level]
            for _ in range(_FILLS_OF_OP):
                if not op.members or op.hole == 0 or len(op.members) >= self.scratch.max_sequences:
                    break
                start = bisect_left(falling, -op.hole)
                most, best = 0, -1
                for i in candidates[start : start + _FILL_TRIES]:
                    other = self.ops[self.op_of[i]]
                    if self.op_of[i] == number or other.level != 0 or level.padded[i] > op.hole:
                        continue
                    less = small.padded[i]
                    saved = _whole_tails(other.tokens, other.unit) - _whole_tails(other.tokens - less, other.unit)
                    more, squares = level.padded[i], level.squares[i]
                    if saved > most and self.bears(op, more, squares, other, -less, -small.squares[i]):
                        most, best = saved, i
                if best < 0:
                    break
                other = self.ops[self.op_of[best]]
                self.change(op, level.padded[best], level.squares[best])
                self.change(other, -small.padded[best], -small.squares[best])
                other.members.remove(best)
                op.members.append(best)
                self.op_of[best] = number

    def own(self, level: int) -> list[int]:
        """Numbers of the ops on one CP size that hold anything."""
        return [number for number, op in enumerate(self.ops) if op.level == level and op.members]

    def buckets(self, numbers: list[int], least: int) -> dict[int, list[int]]:
        """Sequences of ops with at least so many by what their length leaves over whole tails, by rising length."""
        made: dict[int, list[int]] = {}
        for i in sorted((i for number in numbers for i in self.ops[number].members), reverse=True):
            op = self.ops[self.op_of[i]]
            if len(op.members) >= least:
                made.setdefault(self.scratch.levels[op.level].padded[i] % op.unit, []).append(i)
        return made

    def bears_swap(self, i: int, j: int) -> bool:
        one, other = self.ops[self.op_of[i]], self.ops[self.op_of[j]]
        level = self.scratch.levels[one.level]
        tokens, squares = level.padded[i] - level.padded[j], level.squares[i] - level.squares[j]
        return self.bears(one, -tokens, -squares, other, tokens, squares)

    def swap(self, i: int, j: int) -> None:
        one, other = self.ops[self.op_of[i]], self.ops[self.op_of[j]]
        level = self.scratch.levels[one.level]
        tokens, squares = level.padded[i] - level.padded[j], level.squares[i] - level.squares[j]
        self.change(one, -tokens, -squares)
        self.change(other, tokens, squares)
        one.members[one.members.index(i)] = j
        other.members[other.members.index(j)] = i
        self.op_of[i], self.op_of[j] = self.op_of[j], self.op_of[i]

    def settle(self, level_number: int) -> None:
        """Sequences alone change places with those of shared ops that leave a smaller hole when alone."""
        level = self.scratch.levels[level_number]
        numbers = self.own(level_number)
        for number in numbers:
            self.ops[number].members.sort()
        total = sum(len(self.ops[number].members) for number in numbers)
        alone = [number for number in numbers if len(self.ops[number].members) == 1 and self.ops[number].hole]
        alone.sort(key=lambda number: -self.ops[number].hole)
        shared = self.buckets(numbers, 2)
        lengths = {left: [level.padded[i] for i in members] for left, members in shared.items()}
        # Each needs one that shares, so as many at most.
        for at, number in enumerate(alone[: sum(map(len, shared.values()))]):
            op = self.ops[number]
            i = op.members[0]
            tries = _SETTLE_TRIES
            # The first ones get the best, the next ones start where those ended.
            hole = op.unit * at // total // level.pad_multiple * level.pad_multiple
            found = -1
            while hole < op.hole and tries > 0 and found < 0:
                left = -hole % op.unit
                for place in _nearest(lengths.get(left, []), level.padded[i], _NEAREST):
                    tries -= 1
                    j = shared[left][place]
                    if len(self.ops[self.op_of[j]].members) > 1 and self.bears_swap(i, j):
                        found = j
                        break
                tries -= 1
                hole += level.pad_multiple
            if found >= 0:
                self.swap(i, found)

    def swap_all(self, level_number: int) -> None:
        """Two ops swap sequences where together they need a tail less; holes above half a tail first."""
        level = self.scratch.levels[level_number]
        numbers = self.own(level_number)
        buckets = self.buckets(numbers, 1)
        lengths = {left: [level.padded[i] for i in members] for left, members in buckets.items()}
        keys = {}
        for number in numbers:
            # To swap one that is alone saves nothing unless the other op is not: then it is the other's turn.
            if len(self.ops[number].members) == 1:
                continue
            hole, unit = self.ops[number].hole, self.ops[number].unit
            keys[number] = hole if 2 * hole >= unit else 2 * unit - hole
        tries = min(max(_EFFORT // max(len(keys), 1), _FEWEST_TRIES), _MOST_TRIES)
        for number in sorted(keys, key=lambda number: keys[number]):
            op = self.ops[number]
            if op.hole and op.tokens > op.unit:
                self.swap_best(op, tries, buckets, lengths)

    def swap_best(self, op: _Op, tries: int, buckets: dict[int, list[int]], lengths: dict[int, list[int]]) -> None:
        level = self.scratch.levels[op.level]
        best: tuple[int, int, int] | None = None
        for moved in range(op.unit - op.hole, op.unit, level.pad_multiple):
            for i in op.members:
                if tries <= 0:
                    break
                wanted = level.padded[i] - moved
                left = wanted % op.unit
                tries -= 1
                for place in _nearest(lengths.get(left, []), wanted, _NEAREST):
                    tries -= 1
                    j = buckets[left][place]
                    other = self.ops[self.op_of[j]]
                    if other is op or other.hole < moved or op.tokens - level.padded[i] + level.padded[j] < 1:
                        continue
                    holes = (op.hole, moved + op.hole - op.unit, other.hole, other.hole - moved)
                    before, after, room, rest = (hole * (op.unit - hole) for hole in holes)
                    score = before - after + room - rest
                    if (best is None or score > best[0]) and self.bears_swap(i, j):
                        best = score, i, j
        if best is not None:
            self.swap(best[1], best[2])
