"""Waves of microbatches that all take about the same time: how one is grown, and how many are filled evenly."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tdp_megatron.schedule.dynamic import Level, Scratch
from tdp_megatron.schedule.packs import PlacedOp

__all__ = [
    "GrowingOp",
    "UnfilledWaves",
    "Wave",
    "choose_levels_under",
    "deal",
    "even_waves",
    "fill_lowest",
    "place",
    "tall_wave",
    "wide_ops",
]


#: Halvings of the level up to which ops are filled.
_HALVINGS = 32


@dataclass(slots=True)
class GrowingOp:
    """A microbatch that still grows."""

    level: Level
    tokens: int = 0
    squares: float = 0.0
    seconds: float = 0.0
    members: list[int] = field(default_factory=list)
    """Numbers in the order of falling length."""

    def add(self, scratch: Scratch, i: int) -> None:
        """Put sequence i at the end."""
        self.tokens += self.level.padded[i]
        self.squares += self.level.squares[i]
        self.members.append(i)
        self.seconds = scratch.seconds(self.tokens, self.squares, self.level.cp_size)


#: One wave: ops whose CP sizes add up to at most the number of ranks.
Wave = list[GrowingOp]


class _Rooms:
    """Ops by the longest sequence that each can still take under a time limit; the tightest fit wins."""

    def __init__(self, scratch: Scratch, limit: float) -> None:
        self._scratch = scratch
        self._limit = limit
        self._rooms: list[tuple[int, int]] = []
        self._ops: list[GrowingOp] = []

    @property
    def largest(self) -> int:
        """Longest sequence that any op can take, tokens; -1 for none."""
        return self._rooms[-1][0] if self._rooms else -1

    def open(self, level: Level, i: int) -> GrowingOp:
        """A new op that starts with sequence i."""
        op = GrowingOp(level)
        self._ops.append(op)
        self._put(len(self._ops) - 1, i)
        return op

    def fill(self, i: int) -> bool:
        """Put sequence i where it fits most tightly, if anywhere."""
        at = bisect_left(self._rooms, (self._scratch.lengths[i], -1))
        if at == len(self._rooms):
            return False
        self._put(self._rooms.pop(at)[1], i)
        return True

    def _put(self, number: int, i: int) -> None:
        op = self._ops[number]
        op.add(self._scratch, i)
        if len(op.members) < self._scratch.max_sequences:
            room = self._scratch.room(op.level, op.tokens, op.squares, self._limit)
            if room >= 0:
                insort(self._rooms, (room, number))


def tall_wave(scratch: Scratch, alive: list[int], seed_limit: float) -> tuple[Wave, list[int]]:
    """One wave that takes as long as its tallest sequence does, filled with the longest sequences that fit.

    Args:
        scratch: the sequences.
        alive: numbers not placed yet, rising (so lengths fall); at least one.
        seed_limit: seconds that the tallest may take: it gets the smallest CP size under this.

    Returns:
        The wave, and the numbers left over.
    """
    levels = scratch.levels
    seed = alive[0]
    tallest = next((v for v in levels if v.alone[seed] <= seed_limit), None)
    if tallest is None:
        tallest = min(levels, key=lambda v: v.alone[seed])
    limit = tallest.alone[seed] * (1.0 + 1e-4)
    rooms = _Rooms(scratch, limit)
    wave = [rooms.open(tallest, seed)]
    free = scratch.num_ranks - tallest.cp_size
    left: list[int] = []
    position = 1
    while position < len(alive):
        i = alive[position]
        if free:
            level = next((v for v in levels if v.cp_size <= free and v.alone[i] <= limit), None)
            if level is not None:
                wave.append(rooms.open(level, i))
                free -= level.cp_size
                position += 1
                continue
        elif rooms.largest < scratch.lengths[i]:
            # Nothing this long fits any more: go on at the first that might.
            following = _first_not_longer(scratch, alive, position, rooms.largest)
            left.extend(alive[position:following])
            position = following
            continue
        if not rooms.fill(i):
            left.append(i)
        position += 1
    return wave, left


def _first_not_longer(scratch: Scratch, alive: list[int], low: int, length: int) -> int:
    high = len(alive)
    while low < high:
        middle = (low + high) // 2
        if scratch.lengths[alive[middle]] > length:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(slots=True)
class UnfilledWaves:
    """Even waves of which only the ops on more than the fewest ranks are filled."""

    scratch: Scratch
    ops: list[GrowingOp]
    targets: list[float]
    """Seconds up to which each op should be filled."""
    rest: list[int]
    """Sequences that are in no op yet."""
    seconds: float
    """What all waves take when every op reaches its target."""

    def fill(self) -> list[Wave] | None:
        """The waves, or None where the tokens do not fit."""
        if not fill_lowest(self.scratch, self.rest, self.ops, self.targets):
            return None
        return deal(self.scratch, self.ops)


def even_waves(scratch: Scratch, alive: list[int], count: int, limit: float) -> UnfilledWaves | None:
    """``count`` waves that all take about the same time, or None where the longest sequences do not fit into so many.

    Sequences that would take more than ``limit`` seconds get a larger CP size and are packed first; their waves are
    dealt by falling time. The others then go, longest first, to the op that is furthest below its target: the time of
    its wave, or the level at which all work just fits.

    Args:
        scratch: the sequences.
        alive: numbers to place, rising.
        count: waves.
        limit: seconds.
    """
    smallest = scratch.levels[0]
    chosen = choose_levels_under(scratch, alive, limit)
    wide = [op for made in wide_ops(scratch, alive, chosen, limit) for op in made]
    rest = [i for i in alive if chosen[i] is smallest]
    free = [scratch.num_ranks] * count
    time = [0.0] * count
    ops: list[GrowingOp] = []
    wave_of: list[int] = []
    first_open = 0
    for op in sorted(wide, key=lambda op: -op.seconds):
        while first_open < count and free[first_open] == 0:
            first_open += 1
        wave = next((w for w in range(first_open, count) if free[w] >= op.level.cp_size), -1)
        if wave < 0:
            return None
        free[wave] -= op.level.cp_size
        time[wave] = max(time[wave], op.seconds)
        ops.append(op)
        wave_of.append(wave)
    for wave in range(count):
        for _ in range(free[wave] // smallest.cp_size):
            ops.append(GrowingOp(smallest, seconds=scratch.cost.c0))
            wave_of.append(wave)

    work = 0.0
    for i in reversed(rest):
        work += scratch.cost.a * smallest.padded[i] + scratch.cost.b * smallest.squares[i]
    used = max(wave_of[: len(wide)], default=-1) + 1
    level_time = _water_level(scratch, ops[: len(wide)], wave_of, time[:used], free, work)
    targets = [max(time[wave], level_time) for wave in wave_of]
    seconds = 0.0
    for wave in range(count):
        seconds += max(time[wave], level_time)
    return UnfilledWaves(scratch, ops, targets, rest, seconds)


def choose_levels_under(scratch: Scratch, alive: Iterable[int], limit: float) -> dict[int, Level]:
    """The smallest CP size on which each sequence takes at most ``limit`` seconds alone, or else the fastest."""
    chosen = {}
    for i in alive:
        best = scratch.levels[0]
        for level in scratch.levels:
            if level.alone[i] < best.alone[i]:
                best = level
            if best.alone[i] <= limit:
                break
        chosen[i] = best
    return chosen


def wide_ops(
    scratch: Scratch, alive: Iterable[int], chosen: Mapping[int, Level], limit: float
) -> Iterator[list[GrowingOp]]:
    """Ops on more than the fewest ranks, largest CP size first, each filled up to ``limit`` seconds."""
    for level in reversed(scratch.levels[1:]):
        rooms = _Rooms(scratch, limit)
        made: list[GrowingOp] = []
        for i in alive:
            if chosen[i] is level and not rooms.fill(i):
                made.append(rooms.open(level, i))
        yield made


def _water_level(
    scratch: Scratch, wide: list[GrowingOp], wave_of: list[int], time: list[float], free: list[int], work: float
) -> float:
    """Seconds up to which all ops must be filled so that ``work`` rank-seconds fit.

    Args:
        scratch: the sequences.
        wide: ops on more than the fewest ranks.
        wave_of: the wave of each; they are in the first waves.
        time: seconds of the first waves.
        free: ranks of all waves that no wide op runs on.
        work: rank-seconds.
    """
    c0 = scratch.cost.c0
    empty = float((len(free) - len(time)) * scratch.num_ranks)
    low, high = 0.0, max(time, default=0.0) + work + c0 + 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        room = max(middle - c0, 0.0) * empty
        for op, wave in zip(wide, wave_of, strict=False):
            room += max(max(time[wave], middle) - op.seconds, 0.0) * op.level.cp_size
        for wave, seconds in enumerate(time):
            room += max(max(seconds, middle) - c0, 0.0) * free[wave]
        if room < work:
            low = middle
        else:
            high = middle
    return high


def fill_lowest(scratch: Scratch, rest: Sequence[int], ops: list[GrowingOp], targets: list[float]) -> bool:
    """Each sequence to the op furthest below its target that has the tokens; False if one has nowhere to go."""
    heap = [(op.seconds - target, number) for number, (op, target) in enumerate(zip(ops, targets, strict=True))]
    heapq.heapify(heap)
    #: Ops too full for the current length, by the length that they can take.
    parked: list[tuple[int, int, float]] = []
    for i in rest:
        length = scratch.lengths[i]
        while parked and -parked[0][0] >= length:
            _, number, key = heapq.heappop(parked)
            heapq.heappush(heap, (key, number))
        while heap:
            key, number = heap[0]
            op = ops[number]
            room = op.level.token_cap - op.tokens
            if length <= room and len(op.members) < scratch.max_sequences:
                break
            heapq.heappop(heap)
            if len(op.members) < scratch.max_sequences:
                heapq.heappush(parked, (-room, number, key))
        if not heap:
            return False
        op.add(scratch, i)
        heapq.heapreplace(heap, (op.seconds - targets[number], number))
    return True


def deal(scratch: Scratch, ops: list[GrowingOp]) -> list[Wave]:
    """Waves of ops by falling time; sizes are nested, so that full waves leave no hole."""
    rest = sorted(ops, key=lambda op: -op.seconds)
    dealt: list[Wave] = []
    while rest:
        free, wave, later = scratch.num_ranks, [], []
        for op in rest:
            if op.level.cp_size <= free:
                wave.append(op)
                free -= op.level.cp_size
            else:
                later.append(op)
        dealt.append(wave)
        rest = later
    return dealt


def place(scratch: Scratch, dealt: list[Wave]) -> tuple[list[PlacedOp], list[float]]:
    """Ops of each wave onto aligned blocks, wide ones first; of equal ones the longest where least has run so far.

    Returns:
        The ops in order, with dummies on free ranks, and the work of every rank, seconds.
    """
    loads = [0.0] * scratch.num_ranks
    placed: list[PlacedOp] = []
    for wave in dealt:
        taken = [False] * scratch.num_ranks
        for level in reversed(scratch.levels):
            k = level.cp_size
            ops = sorted((op for op in wave if op.level is level), key=lambda op: -op.seconds)
            if not ops:
                continue
            blocks = [first for first in range(0, scratch.num_ranks, k) if not taken[first]]
            blocks.sort(key=lambda first: max(loads[first : first + k]))
            for op, first in zip(ops, blocks, strict=False):
                placed.append((first, k, [scratch.sample_ids[i] for i in op.members]))
                for rank in range(first, first + k):
                    taken[rank] = True
                    loads[rank] += op.seconds
        for first in range(0, scratch.num_ranks, scratch.levels[0].cp_size):
            if not taken[first]:
                placed.append((first, scratch.levels[0].cp_size, []))
    return placed, loads
