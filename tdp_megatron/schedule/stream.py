"""``stream``: waves from samples that arrive one by one, where there is no global batch to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.keys import bundles_of, merged_length
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, plan_of_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Limits, Mode, Problem, check_fits, pack_token_cap
from tdp_megatron.schedule.wave_building import Wave, place, tall_wave
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["StreamScheduler", "StreamWave", "join_waves", "stream", "stream_wave_reference"]

#: Seeds tried for one wave, from the longest sample in the buffer down.
_SEEDS = 8
#: A wave whose ranks do useful work for this share of its time is good enough to stop looking.
_USEFUL_ENOUGH = 0.97
#: CP sizes tried for the sample that leads: the smallest that hold it.
_LEADER_SIZES = 3
_MODE = Mode("lockstep")

#: First rank, CP size and offsets of ops, and their sample ids.
_Ops = tuple[Int64Array, Int64Array, Int64Array, Int64Array]
#: Rows of the buffer.
_SEQLEN, _NUMBER, _TOGETHER, _APART = range(4)


@dataclass(frozen=True, slots=True)
class StreamWave:
    """One microbatch of every rank."""

    plan: Plan
    """Sequence i of the plan is sample ``sample_numbers[i]``."""
    sample_numbers: Int64Array
    """int64 [n], numbers in order of arrival since the start of the stream."""


class StreamScheduler:
    """A buffer of samples from which balanced waves are taken.

    When the buffer is full, the wave goes out that keeps ranks busiest: led by one of the longest samples and filled
    with the longest that fit. Outliers wait in the buffer until others of their kind make a good wave with them, or
    until ``max_age`` later samples have arrived. Samples thereby move between optimiser steps, which training must
    accept. Wang et al., "WLB-LLM" (2025).

    Samples of one ``together`` key go out in one microbatch if they are in the buffer at the same time; those that
    arrive one after the other are, if the window is larger than their number. Samples of one ``apart`` key wait for a
    microbatch without the others.
    """

    def __init__(
        self, layout: ParallelLayout, cost: CostModel, *, window: int, max_age: int = 0, max_sequences: int = 0
    ) -> None:
        """Start with an empty buffer.

        Args:
            layout: how the ranks are arranged.
            cost: what a microbatch costs.
            window: samples in the buffer.
            max_age: samples after which one must go out; 0 means 8 windows.
            max_sequences: most sequences in one microbatch, 0 for no limit.
        """
        for name, value, least in (("window", window, 1), ("max_age", max_age, 0)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self._layout = layout
        self._cost = cost
        self._window = int(window)
        self._max_age = int(max_age) or 8 * self._window
        self._limits = Limits(max_sequences_per_microbatch=max_sequences)
        self._longest = max(pack_token_cap(layout, k) for k in layout.cp_sizes)
        #: int64 [4, n], by falling length, ties by number.
        self._buffer = np.zeros((4, 0), dtype=np.int64)
        #: What came since the last wave.
        self._new: list[tuple[int, int, int, int]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return self._buffer.shape[1] + len(self._new)

    @property
    def num_arrived(self) -> int:
        """Samples since the start of the stream."""
        return self._arrived

    @property
    def numbers(self) -> Int64Array:
        """int64 [n], numbers of the samples in the buffer, in order of arrival."""
        self._merge()
        return np.sort(self._buffer[_NUMBER])

    def add(self, seqlen: int, *, together: int = -1, apart: int = -1) -> StreamWave | None:
        """Put the next sample in the buffer, and take a wave if that fills it; see ``put``."""
        self.put(seqlen, together=together, apart=apart)
        return self.take(more=True) if len(self) >= self._window else None

    def put(self, seqlen: int, *, together: int = -1, apart: int = -1) -> None:
        """Put the next sample in the buffer.

        Args:
            seqlen: tokens.
            together: samples with the same key share a microbatch, -1 for none.
            apart: samples with the same key do not share one, -1 for none.

        Raises:
            ScheduleError: the sample, or what belongs together with it, is too long for the layout; or those that
                belong together must also be apart.
        """
        for name, value in (("seqlen", seqlen), ("together", together), ("apart", apart)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < (0 if name == "seqlen" else -1):
                raise ValueError(f"{name} must not be negative, got {value}")
        if seqlen > self._longest:
            check_fits(np.array([seqlen], dtype=np.int64), self._layout, self._layout.cp_sizes)
        if together >= 0:
            self._check_unit(int(seqlen), int(together), int(apart))
        self._new.append((int(seqlen), self._arrived, int(together), int(apart)))
        self._arrived += 1

    def _merge(self) -> None:
        if self._new:
            self._extend(np.array(self._new, dtype=np.int64).T)
            self._new = []

    def _extend(self, rows: Int64Array) -> None:
        """Put ``rows``, int64 [4, n] in order of arrival, into the buffer."""
        joined = np.concatenate([self._buffer, rows], axis=1)
        # take and compress leave rows contiguous, as the native core wants them.
        self._buffer = np.take(joined, np.argsort(-joined[_SEQLEN], kind="stable"), axis=1)

    def _check_unit(self, seqlen: int, together: int, apart: int) -> None:
        """Refuse a sample that cannot go out with those of its key."""
        self._merge()
        unit = self._buffer[:, self._buffer[_TOGETHER] == together]
        count = unit.shape[1]
        tokens = merged_length(self._layout, [*unit[_SEQLEN].tolist(), seqlen])
        limit = self._longest
        if tokens > limit:
            raise ScheduleError(
                f"{count + 1} samples belong together (key {together}) and have {tokens} tokens when padded, the "
                f"limit of a microbatch is {limit}; use fewer, or raise max_seqlen_per_dp_cp_rank or the CP size"
            )
        most = self._limits.max_sequences_per_microbatch
        if most and count >= most:
            raise ScheduleError(f"{count + 1} samples belong together (key {together}), at most {most} may share")
        if apart >= 0 and apart in unit[_APART]:
            raise ScheduleError(f"two samples belong together (key {together}), and apart (key {apart})")

    def flush(self) -> list[StreamWave]:
        """Waves of everything that is still in the buffer."""
        waves = []
        while (wave := self.take()) is not None:
            waves.append(wave)
        return waves

    def take(self, *, more: bool = False) -> StreamWave | None:
        """The next wave out of what is in the buffer, full or not; None when it is empty.

        Args:
            more: whether samples are still to come: those that belong together with the last one wait for them.

        Raises:
            ScheduleError: all samples in the buffer belong together, and there may be more of them.
        """
        wave = self._next_ops(more)
        if wave is None:
            return None
        first_rank, cp_size, offsets, samples = wave
        numbers = samples[_NUMBER]
        order = np.argsort(numbers)
        local = np.empty_like(order)
        local[order] = np.arange(len(order))
        problem = Problem(samples[_SEQLEN][order], self._layout, self._cost, _MODE, self._limits)
        return StreamWave(plan_of_ops(problem, first_rank, cp_size, offsets, local, "stream"), numbers[order])

    def _next_ops(self, more: bool) -> _Ops | None:
        """Take the next wave: first rank, CP size and offsets of its ops, and the rows of their samples, [4, n]."""
        self._merge()
        if len(self) == 0:
            return None
        keyed = bool((self._buffer[_TOGETHER:] >= 0).any())
        first_rank, cp_size, offsets, places = self._unit_ops(more) if keyed else self._sample_ops()
        samples = np.take(self._buffer, places, axis=1)
        stays = np.ones(len(self), dtype=np.bool_)
        stays[places] = False
        self._buffer = np.compress(stays, self._buffer, axis=1)
        return first_rank, cp_size, offsets, samples

    def _sample_ops(self) -> _Ops:
        """The next wave of samples without keys, with places in the buffer."""
        oldest = int(np.argmin(self._buffer[_NUMBER]))
        overdue = self._arrived - int(self._buffer[_NUMBER, oldest]) > self._max_age
        return self._wave(self._buffer[_SEQLEN], self._limits, oldest if overdue else -1)

    def _unit_ops(self, more: bool) -> _Ops:
        """The next wave of what belongs together, with places in the buffer."""
        arrival = np.argsort(self._buffer[_NUMBER])
        seqlens, numbers, _, _ = rows = self._buffer[:, arrival].tolist()
        units = self._units(rows[_TOGETHER], more and numbers[-1] == self._arrived - 1)
        merged = [merged_length(self._layout, [seqlens[i] for i in unit]) for unit in units]
        # A unit counts as one sequence, so it gets the limit for the largest one.
        limits = Limits(max_sequences_per_microbatch=self._limits.max_sequences_per_microbatch // max(map(len, units)))
        overdue = [number for number, unit in enumerate(units) if self._arrived - numbers[unit[0]] > self._max_age]
        leader = overdue[0] if overdue else -1
        first_rank, cp_size, offsets, ids = self._wave(np.array(merged, dtype=np.int64), limits, leader)
        ends = [0]
        places: list[int] = []
        for op in np.split(ids, offsets[1:-1]):
            places += self._without_apart([units[number] for number in op.tolist()], rows[_APART])
            ends.append(len(places))
        return first_rank, cp_size, np.array(ends, dtype=np.int64), arrival[np.array(places, dtype=np.int64)]

    def _wave(self, seqlens: Int64Array, limits: Limits, leader: int) -> _Ops:
        problem = Problem(seqlens, self._layout, self._cost, _MODE, limits)
        ops: _Ops = _C.schedule_stream_wave(native_input(problem), leader)
        return ops

    @staticmethod
    def _units(together: list[int], more: bool) -> list[list[int]]:
        """Samples that go out together, by the first of each; ``more`` of the last one's key may come."""
        units = bundles_of(np.array(together, dtype=np.int64), len(together))
        last = together[-1]
        if not more or last < 0:
            return units
        waiting = [unit for unit in units if together[unit[0]] != last]
        if not waiting:
            raise ScheduleError(
                f"all {len(together)} samples in the window belong together (key {last}), and more may come; "
                "raise window"
            )
        return waiting

    @staticmethod
    def _without_apart(units: list[list[int]], apart: list[int]) -> list[int]:
        """Samples of the units of one op, but for those units that meet their own key there."""
        met: set[int] = set()
        members: list[int] = []
        for unit in units:
            keys = {apart[i] for i in unit if apart[i] >= 0}
            if not keys & met:
                met |= keys
                members += unit
        return members

    def state_dict(self) -> dict[str, Any]:
        """Lengths, numbers and keys of the samples in the buffer, and how many arrived; a copy."""
        self._merge()
        seqlens, numbers, together, apart = self._buffer[:, np.argsort(self._buffer[_NUMBER])].tolist()
        return {
            "version": 1,
            "window": self._window,
            "max_age": self._max_age,
            "seqlens": seqlens,
            "numbers": numbers,
            "together": together,
            "apart": apart,
            "arrived": self._arrived,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            StateMismatchError: it was saved with another version, window or max_age.
            ScheduleError: a sample in the buffer is too long for this layout.
        """
        for name, here in (("version", 1), ("window", self._window), ("max_age", self._max_age)):
            if state[name] != here:
                raise StateMismatchError(f"{name} of the saved stream is {state[name]}, here it is {here}")
        seqlens = np.array(state["seqlens"], dtype=np.int64)
        check_fits(seqlens, self._layout, self._layout.cp_sizes)
        none = [-1] * len(seqlens)  # states saved before there were keys
        keys = [np.array(state.get(name, none), dtype=np.int64) for name in ("together", "apart")]
        self._buffer, self._new = np.zeros((4, 0), dtype=np.int64), []
        self._extend(np.stack([seqlens, np.array(state["numbers"], dtype=np.int64), *keys]))
        self._arrived = int(state["arrived"])


def stream_wave_reference(problem: Problem, leader: int) -> list[PlacedOp]:
    """The next wave out of a buffer in plain Python; the native core gives the same.

    Of waves led by some of the longer sequences, on each of the fewest ranks that hold the leader, the one whose ranks
    do useful work for the largest share of its time.

    Args:
        problem: the buffer as one batch.
        leader: the sequence that must lead; -1 for none.
    """
    scratch = Scratch(problem)
    count = len(scratch.lengths)
    if leader >= 0:
        seeds = [scratch.sample_ids.index(leader)]
    else:
        seeds = sorted({count * step // (2 * _SEEDS) for step in range(_SEEDS)})
    best: Wave = []
    best_useful = -1.0
    for seed in seeds:
        alive = list(range(seed, count))
        times = [level.alone[seed] for level in scratch.levels if level.alone[seed] < math.inf]
        for limit in times[:_LEADER_SIZES]:
            wave, _ = tall_wave(scratch, alive, limit)
            useful = _useful_share(scratch, wave)
            if useful > best_useful:
                best, best_useful = wave, useful
        if best_useful >= _USEFUL_ENOUGH:
            break
    return place(scratch, [best])[0]


def _useful_share(scratch: Scratch, wave: Wave) -> float:
    """Work of the samples alone over what the wave costs on all ranks: waiting, overhead and padding count against."""
    longest = max(op.seconds for op in wave)
    work = 0.0
    for op in wave:
        for i in op.members:
            length = scratch.lengths[i]
            work += scratch.cost.a * length + scratch.cost.b * op.level.squares[i]
    return work / (longest * scratch.num_ranks) if longest > 0 else 1.0


def stream(problem: Problem, *, window: int = 0, max_age: int = 0) -> Plan:
    """``StreamScheduler`` over one global batch in order of arrival.

    Args:
        problem: what to schedule.
        window: samples in the buffer; 0 means the whole batch.
        max_age: see ``StreamScheduler``.
    """
    window = window or max(len(problem.seqlens), 1)
    scheduler = StreamScheduler(
        problem.layout,
        problem.cost,
        window=window,
        max_age=max_age,
        max_sequences=problem.limits.max_sequences_per_microbatch,
    )
    n = len(problem.seqlens)
    none = np.full(n, -1, dtype=np.int64)
    rows = np.stack([problem.seqlens, np.arange(n, dtype=np.int64), none, none])
    waves: list[_Ops] = []
    while True:
        end = min(scheduler._arrived + window - len(scheduler), n)
        scheduler._extend(rows[:, scheduler._arrived : end])
        scheduler._arrived = end
        wave = scheduler._next_ops(more=False)
        if wave is None:
            return _joined(problem, waves)
        waves.append((*wave[:3], wave[3][_NUMBER]))


def join_waves(waves: Sequence[StreamWave], layout: ParallelLayout, cost: CostModel) -> Plan:
    """One plan of several waves, one after the other.

    Args:
        waves: of one ``StreamScheduler``.
        layout, cost: its own.

    Returns:
        A plan of the waves' samples, those of the first wave before those of the second and so on.
    """
    plans = [wave.plan for wave in waves]
    starts = np.cumsum([0, *(len(plan.seqlens) for plan in plans)]).tolist()
    problem = Problem(np.concatenate([plan.seqlens for plan in plans]), layout, cost, _MODE, Limits())
    return _joined(
        problem,
        [
            (plan.op_first_rank, plan.op_cp_size, plan.op_offsets, plan.sample_ids + start)
            for plan, start in zip(plans, starts, strict=False)
        ],
    )


def _joined(problem: Problem, waves: Sequence[_Ops]) -> Plan:
    """The plan of waves given as first ranks, CP sizes and offsets of their ops, and sample ids."""
    empty = np.zeros(0, dtype=np.int64)
    first_rank, cp_size, counts, ids = (
        np.concatenate([empty, *columns])
        for columns in (
            [wave[0] for wave in waves],
            [wave[1] for wave in waves],
            [np.diff(wave[2]) for wave in waves],
            [wave[3] for wave in waves],
        )
    )
    return plan_of_ops(problem, first_rank, cp_size, np.append(0, np.cumsum(counts)), ids, "stream")
