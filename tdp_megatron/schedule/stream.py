"""``stream``: waves from samples that arrive one by one, where there is no global batch to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.dynamic import Scratch
from tdp_megatron.schedule.keys import bundles_of, merged_length
from tdp_megatron.schedule.packs import PlacedOp, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Limits, Mode, Problem, check_fits, pack_token_cap
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
        self._seqlens: list[int] = []
        self._numbers: list[int] = []
        self._together: list[int] = []
        self._apart: list[int] = []
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

    def add(self, seqlen: int, *, together: int = -1, apart: int = -1) -> StreamWave | None:
        """Put the next sample in the buffer, and take a wave if that fills it; see ``put``."""
        self.put(seqlen, together=together, apart=apart)
        return self.take(more=True) if len(self._seqlens) >= self._window else None

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
        check_fits(np.array([seqlen], dtype=np.int64), self._layout, self._layout.cp_sizes)
        if together >= 0:
            self._check_unit(int(seqlen), int(together), int(apart))
        self._seqlens.append(int(seqlen))
        self._numbers.append(self._arrived)
        self._together.append(int(together))
        self._apart.append(int(apart))
        self._arrived += 1

    def _check_unit(self, seqlen: int, together: int, apart: int) -> None:
        """Refuse a sample that cannot go out with those of its key."""
        unit = [i for i, key in enumerate(self._together) if key == together]
        tokens = merged_length(self._layout, [*(self._seqlens[i] for i in unit), seqlen])
        limit = max(pack_token_cap(self._layout, k) for k in self._layout.cp_sizes)
        if tokens > limit:
            raise ScheduleError(
                f"{len(unit) + 1} samples belong together (key {together}) and have {tokens} tokens when padded, the "
                f"limit of a microbatch is {limit}; use fewer, or raise max_seqlen_per_dp_cp_rank or the CP size"
            )
        most = self._limits.max_sequences_per_microbatch
        if most and len(unit) >= most:
            raise ScheduleError(f"{len(unit) + 1} samples belong together (key {together}), at most {most} may share")
        if apart >= 0 and any(self._apart[i] == apart for i in unit):
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
        if not self._seqlens:
            return None
        units = self._units(more)
        lengths = [merged_length(self._layout, [self._seqlens[i] for i in unit]) for unit in units]
        largest = max(map(len, units))
        # A unit counts as one sequence, so it gets the limit for the largest one.
        limits = Limits(max_sequences_per_microbatch=self._limits.max_sequences_per_microbatch // largest)
        mode = Mode("lockstep")
        scratch = Scratch(Problem(np.array(lengths, dtype=np.int64), self._layout, self._cost, mode, limits))
        ops = self._apart_ops(place(scratch, [self._best_wave(scratch, units)])[0], units)
        chosen = sorted(i for _, _, ids in ops for i in ids)
        local = {i: at for at, i in enumerate(chosen)}
        placed: list[PlacedOp] = [(first, k, [local[i] for i in ids]) for first, k, ids in ops]
        seqlens = np.array([self._seqlens[i] for i in chosen], dtype=np.int64)
        inner = Problem(seqlens, self._layout, self._cost, mode, self._limits)
        numbers = np.array([self._numbers[i] for i in chosen], dtype=np.int64)
        gone = set(chosen)
        for column in (self._numbers, self._seqlens, self._together, self._apart):
            column[:] = [value for i, value in enumerate(column) if i not in gone]
        return StreamWave(plan_of_placed_ops(inner, placed, "stream"), numbers)

    def _units(self, more: bool) -> list[list[int]]:
        """Places in the buffer that go out together, by the first of each."""
        units = bundles_of(np.array(self._together, dtype=np.int64), len(self._together))
        last = self._together[-1]
        if more and last >= 0 and self._numbers[-1] == self._arrived - 1:
            waiting = [unit for unit in units if self._together[unit[0]] != last]
            if not waiting:
                raise ScheduleError(
                    f"all {len(self._together)} samples in the window belong together (key {last}), and more may come; "
                    "raise window"
                )
            return waiting
        return units

    def _best_wave(self, scratch: Scratch, units: list[list[int]]) -> Wave:
        best: Wave = []
        best_useful = -1.0
        for seed in self._seeds(scratch, units):
            alive = list(range(seed, len(units)))
            for limit in self._seed_limits(scratch, seed):
                wave, _ = tall_wave(scratch, alive, limit)
                useful = _useful_share(scratch, wave)
                if useful > best_useful:
                    best, best_useful = wave, useful
            if best_useful >= _USEFUL_ENOUGH:
                break
        return best

    def _apart_ops(self, ops: list[PlacedOp], units: list[list[int]]) -> list[PlacedOp]:
        """The ops with places in the buffer; units that meet their own key there stay in the buffer."""
        kept: list[PlacedOp] = []
        for first, k, ids in ops:
            met: set[int] = set()
            members: list[int] = []
            for number in ids:
                keys = {self._apart[i] for i in units[number] if self._apart[i] >= 0}
                if not keys & met:
                    met |= keys
                    members += units[number]
            kept.append((first, k, members))
        return kept

    def _seed_limits(self, scratch: Scratch, seed: int) -> list[float]:
        """Times of the leading sample on the fewest ranks that hold it, on twice and on four times as many."""
        times = [level.alone[seed] for level in scratch.levels if level.alone[seed] < math.inf]
        return times[:3]

    def _seeds(self, scratch: Scratch, units: list[list[int]]) -> list[int]:
        """Places in the order of falling length that may lead the wave; an overdue unit leads alone."""
        overdue = [i for i, unit in enumerate(units) if self._arrived - self._numbers[unit[0]] > self._max_age]
        if overdue:
            return [scratch.sample_ids.index(overdue[0])]
        count = len(scratch.lengths)
        return sorted({count * step // (2 * _SEEDS) for step in range(_SEEDS)})

    def state_dict(self) -> dict[str, Any]:
        """Lengths, numbers and keys of the samples in the buffer, and how many arrived; a copy."""
        return {
            "version": 1,
            "window": self._window,
            "max_age": self._max_age,
            "seqlens": list(self._seqlens),
            "numbers": list(self._numbers),
            "together": list(self._together),
            "apart": list(self._apart),
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
        none = [-1] * len(seqlens)  # states saved before there were keys
        self._together = [int(key) for key in state.get("together", none)]
        self._apart = [int(key) for key in state.get("apart", none)]
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
