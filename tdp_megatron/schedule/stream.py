"""``stream``: waves from samples that arrive one by one, where there is no global batch to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.packs import PlacedOp, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Limits, Mode, Problem, check_fits
from tdp_megatron.schedule.wave_building import Wave, place, tall_wave
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["StreamScheduler", "StreamWave", "join_waves", "stream"]

#: Seeds tried for one wave, from the longest sample in the buffer down.
_SEEDS = 8
#: A wave whose ranks do useful work for this share of its time is good enough to stop looking.
_USEFUL_ENOUGH = 0.97


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
        self._seqlens: list[int] = []
        self._numbers: list[int] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._seqlens)

    @property
    def num_arrived(self) -> int:
        """Samples since the start of the stream."""
        return self._arrived

    @property
    def numbers(self) -> Int64Array:
        """int64 [n], numbers of the samples in the buffer, in order of arrival."""
        return np.array(self._numbers, dtype=np.int64)

    def add(self, seqlen: int) -> StreamWave | None:
        """Put the next sample in the buffer, and take a wave if that fills it.

        Raises:
            ScheduleError: the sample is too long for the layout.
        """
        self.put(seqlen)
        return self.take() if len(self._seqlens) >= self._window else None

    def put(self, seqlen: int) -> None:
        """Put the next sample in the buffer.

        Raises:
            ScheduleError: the sample is too long for the layout.
        """
        if isinstance(seqlen, bool) or not isinstance(seqlen, (int, np.integer)):
            raise TypeError(f"seqlen must be an int, got {type(seqlen).__name__}")
        if seqlen < 0:
            raise ValueError(f"seqlen must not be negative, got {seqlen}")
        check_fits(np.array([seqlen], dtype=np.int64), self._layout, self._layout.cp_sizes)
        self._seqlens.append(int(seqlen))
        self._numbers.append(self._arrived)
        self._arrived += 1

    def flush(self) -> list[StreamWave]:
        """Waves of everything that is still in the buffer."""
        waves = []
        while (wave := self.take()) is not None:
            waves.append(wave)
        return waves

    def take(self) -> StreamWave | None:
        """The next wave out of what is in the buffer, full or not; None when it is empty."""
        if not self._seqlens:
            return None
        seqlens = np.array(self._seqlens, dtype=np.int64)
        problem = Problem(seqlens, self._layout, self._cost, Mode("lockstep"), self._limits)
        scratch = Scratch(problem)
        seeds = self._seeds(scratch)
        best: Wave = []
        best_useful = -1.0
        for seed in seeds:
            alive = list(range(seed, len(seqlens)))
            for limit in self._seed_limits(scratch, seed):
                wave, _ = tall_wave(scratch, alive, limit)
                useful = _useful_share(scratch, wave)
                if useful > best_useful:
                    best, best_useful = wave, useful
            if best_useful >= _USEFUL_ENOUGH:
                break
        ops, _ = place(scratch, [best])
        chosen = sorted(i for _, _, ids in ops for i in ids)
        local = {i: at for at, i in enumerate(chosen)}
        placed: list[PlacedOp] = [(first, k, [local[i] for i in ids]) for first, k, ids in ops]
        inner = Problem(seqlens[chosen], self._layout, self._cost, problem.mode, self._limits)
        numbers = np.array([self._numbers[i] for i in chosen], dtype=np.int64)
        gone = set(chosen)
        self._numbers = [number for i, number in enumerate(self._numbers) if i not in gone]
        self._seqlens = [seqlen for i, seqlen in enumerate(self._seqlens) if i not in gone]
        return StreamWave(plan_of_placed_ops(inner, placed, "stream"), numbers)

    def _seed_limits(self, scratch: Scratch, seed: int) -> list[float]:
        """Times of the leading sample on the fewest ranks that hold it, on twice and on four times as many."""
        times = [level.alone[seed] for level in scratch.levels if level.alone[seed] < math.inf]
        return times[:3]

    def _seeds(self, scratch: Scratch) -> list[int]:
        """Places in the order of falling length that may lead the wave; an overdue sample leads alone."""
        overdue = [i for i, number in enumerate(self._numbers) if self._arrived - number > self._max_age]
        if overdue:
            return [scratch.sample_ids.index(overdue[0])]
        count = len(scratch.lengths)
        return sorted({count * step // (2 * _SEEDS) for step in range(_SEEDS)})

    def state_dict(self) -> dict[str, Any]:
        """Lengths and numbers of the samples in the buffer, and how many arrived; a copy."""
        return {
            "version": 1,
            "window": self._window,
            "max_age": self._max_age,
            "seqlens": list(self._seqlens),
            "numbers": list(self._numbers),
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
        seqlens = [int(seqlen) for seqlen in state["seqlens"]]
        check_fits(np.array(seqlens, dtype=np.int64), self._layout, self._layout.cp_sizes)
        self._seqlens = seqlens
        self._numbers = [int(number) for number in state["numbers"]]
        self._arrived = int(state["arrived"])


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
    scheduler = StreamScheduler(
        problem.layout,
        problem.cost,
        window=window or max(len(problem.seqlens), 1),
        max_age=max_age,
        max_sequences=problem.limits.max_sequences_per_microbatch,
    )
    waves = []
    for seqlen in problem.seqlens.tolist():
        wave = scheduler.add(seqlen)
        if wave is not None:
            waves.append(wave)
    waves.extend(scheduler.flush())
    return _joined(problem, waves)


def join_waves(waves: Sequence[StreamWave], layout: ParallelLayout, cost: CostModel) -> Plan:
    """One plan of several waves, one after the other.

    Args:
        waves: of one ``StreamScheduler``.
        layout, cost: its own.

    Returns:
        A plan of the waves' samples, those of the first wave before those of the second and so on.
    """
    ends = np.cumsum([len(wave.sample_numbers) for wave in waves]).tolist()
    local = [
        StreamWave(w.plan, np.arange(end - len(w.sample_numbers), end)) for w, end in zip(waves, ends, strict=True)
    ]
    seqlens = np.concatenate([wave.plan.seqlens for wave in waves])
    return _joined(Problem(seqlens, layout, cost, Mode("lockstep"), Limits()), local)


def _joined(problem: Problem, waves: Sequence[StreamWave]) -> Plan:
    placed: list[PlacedOp] = [
        (op.first_rank, op.cp_size, wave.sample_numbers[list(op.sample_ids)].tolist())
        for wave in waves
        for op in wave.plan.ops
    ]
    return plan_of_placed_ops(problem, placed, "stream")
