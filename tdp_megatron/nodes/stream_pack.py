"""``StreamPack``: balanced waves from samples that come one by one, where there is no global batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int, checked_names
from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.nodes.base import Node, require_node, skip_samples
from tdp_megatron.nodes.left_out import LeftOut, draw_numbers
from tdp_megatron.nodes.pack import GlobalBatch, declare_token_keys
from tdp_megatron.reading import PackingKeys
from tdp_megatron.schedule import CostModel, StreamScheduler, StreamWave, imbalance, validate
from tdp_megatron.schedule.api import DEFAULT_COST
from tdp_megatron.schedule.stream import join_waves
from tdp_megatron.types import ParallelLayout, SampleBlock

__all__ = ["StreamPack"]


class StreamPack(Node[GlobalBatch]):
    """Keeps a window of samples and takes from it, wave by wave, those that keep all ranks busy.

    It stands where ``Pack`` stands, before ``Reroute``, for data that no global batch cuts: how many samples a step
    has depends on their lengths. Long samples wait for others of their kind, at most ``max_age`` samples long, so
    samples move between optimiser steps, which training must accept. Waves depend on the layout. A restart on the same
    layout goes on with the same waves; on another one every sample still comes exactly once, in other waves.

    Args:
        source: samples, in the same order on every rank.
        layout: DP, CP, and the cap on tokens per rank.
        window: samples to choose from.
        max_age: samples after which one must go out; 0 means 8 windows.
        waves_per_batch: waves of one ``GlobalBatch``, that is microbatches of every rank in one step.
        max_sequences: most sequences in one microbatch, 0 for no limit.
        cost: cost model; None for the default.
        token_keys: user keys that have one entry per token and are packed like ``tokens``.
        together_key: user key with an int per sample, -1 being none: samples with the same one from 0 up that come one
            after the other, fewer than ``window``, share a microbatch, as do those that meet in the window.
        apart_key: user key with an int per sample: those with the same one from 0 up are in different microbatches.
        check_plans: validate every wave, the keys included.
        drop_last: whether a last ``GlobalBatch`` of fewer waves is left out.
        consumed_samples: samples to pass over when there is no saved state; global batches are counted from there.
        skip_samples: ranges (begin, end) of global sample numbers to leave out; nothing of them is read. They count
            for ``max_age``, so that what waits goes out behind a long range.

    Raises:
        ValueError, TypeError: a bad argument.
        ScheduleError: at a step, a sample that fits no rank; the message names its place in the data.
    """

    BUFFER_KEY = "buffer"

    def __init__(
        self,
        source: BaseNode[Any],
        layout: ParallelLayout,
        *,
        window: int,
        max_age: int = 0,
        waves_per_batch: int = 1,
        max_sequences: int = 0,
        cost: CostModel | None = None,
        token_keys: Sequence[str] = (),
        together_key: str | None = None,
        apart_key: str | None = None,
        check_plans: bool = False,
        drop_last: bool = False,
        consumed_samples: int = 0,
        skip_samples: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        require_node(source)
        self.source = source
        self.layout = layout
        self.window = window
        self.max_age = max_age
        self.waves_per_batch = checked_int("waves_per_batch", waves_per_batch, least=1)
        self.max_sequences = max_sequences
        self.cost = DEFAULT_COST if cost is None else cost
        self.token_keys = checked_names("token_keys", token_keys)
        self.keys = PackingKeys(together_key, apart_key)
        self.check_plans = check_plans
        self.drop_last = drop_last
        self.consumed_samples = checked_int("consumed_samples", consumed_samples, least=0)
        self.left_out = LeftOut("skip_samples", skip_samples)
        self._scheduler = self._new_scheduler()  # wrong arguments show here, not at the first step

    def _new_scheduler(self) -> StreamScheduler:
        return StreamScheduler(
            self.layout, self.cost, window=self.window, max_age=self.max_age, max_sequences=self.max_sequences
        )

    def fingerprint(self) -> dict[str, Any]:
        return {"window": self.window, "max_age": self.max_age, "waves_per_batch": self.waves_per_batch}

    _source_state_keys = ("source", BUFFER_KEY)

    def _source_state(self) -> dict[str, Any]:
        scheduler = self._scheduler.state_dict()
        first, source = self._snapshots[0]
        return {
            self.SOURCE_KEY: source,
            self.BUFFER_KEY: {"first": first, "numbers": scheduler["numbers"], "arrived": scheduler["arrived"]},
        }

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        self._scheduler = self._new_scheduler()
        self._ended = False
        self._pending = SampleBlock.concatenate([])
        self.source.reset(None if state is None else state[self.SOURCE_KEY])
        # Where the source stood before a sample that still waits: a restart reads on from there.
        self._snapshots: deque[tuple[int, Any]] = deque()
        if state is None:
            skip_samples(self.source, self.consumed_samples)
            self._jump_to(self.consumed_samples)
            self._snapshots.append((self.consumed_samples, self.source.state_dict()))
            return
        buffer = state.get(self.BUFFER_KEY)
        if not isinstance(buffer, Mapping) or not {"first", "arrived", "numbers"} <= buffer.keys():
            raise StateMismatchError(
                f"StreamPack: the saved state has no buffer with its numbers; it has {sorted(state)}"
            )
        first, arrived, saved = buffer["first"], buffer["arrived"], buffer["numbers"]
        values = [first, arrived, *saved] if isinstance(saved, list) else [None]
        if not all(type(value) is int and abs(value) < 2**62 for value in values):
            raise StateMismatchError(f"StreamPack: the saved buffer must hold integers, found {dict(buffer)}")
        numbers = np.array(saved, dtype=np.int64)
        if first < 0 or np.any(np.diff([first - 1, *numbers, arrived]) <= 0):
            raise StateMismatchError(
                f"StreamPack: the numbers of the saved buffer do not rise from {first} to below {arrived}"
            )
        self._snapshots.append((first, state[self.SOURCE_KEY]))
        # Some that waited may be left out by now.
        numbers = numbers[~self.left_out.contains(numbers)]
        with self.stats.waiting():
            block = draw_numbers(self.source, numbers, first, arrived)
        if block is None:
            raise StateMismatchError(
                f"StreamPack: {arrived} samples had been drawn when the state was saved, the data ends before"
            )
        declare_token_keys(block, self.token_keys)
        self._pending = block.without_idle_readers()
        kept = {"seqlens": self._pending.seqlens, "numbers": numbers, "arrived": arrived}
        none = {"together": [-1] * len(numbers), "apart": [-1] * len(numbers)}
        keys = self.keys.arguments(self.keys.read(self._pending))
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **none, **kept, **keys})

    def _jump_to(self, number: int) -> None:
        """Let the next sample have this number."""
        if number != self._scheduler.num_arrived:
            self._scheduler.load_state_dict({**self._scheduler.state_dict(), "arrived": number})

    def _fill(self) -> None:
        """Draw until the window is full or the data ends."""
        wanted = self.window - len(self._scheduler)
        if self._ended or not wanted:
            return
        arrived = self._scheduler.num_arrived
        if self._snapshots[-1][0] < arrived:
            self._snapshots.append((arrived, self.source.state_dict()))
        with self.stats.waiting():
            block, numbers = self.left_out.draw(self.source, wanted, arrived)
            declare_token_keys(block, self.token_keys)
        self._ended = len(block) < wanted
        keys = {name: values.tolist() for name, values in self.keys.arguments(self.keys.read(block)).items()}
        for i, (seqlen, number) in enumerate(zip(block.seqlens.tolist(), numbers.tolist(), strict=True)):
            self._jump_to(number)
            try:
                self._scheduler.put(seqlen, **{name: values[i] for name, values in keys.items()})
            except ScheduleError as error:
                dataset, sample = block.refs[i].tolist()
                raise ScheduleError(f"sample {sample} of dataset {dataset}: {error}") from error
        self._pending = SampleBlock.concatenate([self._pending, block])

    def _waves(self) -> tuple[list[StreamWave], SampleBlock]:
        """The waves of the next global batch and their samples, wave by wave; no wave at the end."""
        waves: list[StreamWave] = []
        blocks: list[SampleBlock] = []
        while len(waves) < self.waves_per_batch:
            self._fill()
            numbers = self._scheduler.numbers
            wave = self._scheduler.take(more=not self._ended)
            if wave is None:
                break
            chosen = np.isin(numbers, wave.sample_numbers)
            blocks.append(self._pending.select(np.flatnonzero(chosen)))
            if self.check_plans:
                keys = self.keys.arguments(self.keys.read(blocks[-1]))
                validate(wave.plan, equal_count=True, max_sequences_per_microbatch=self.max_sequences, **keys)
            self._pending = self._pending.select(np.flatnonzero(~chosen)).without_idle_readers()
            waves.append(wave)
        oldest = min([*self._scheduler.numbers.tolist()[:1], self._scheduler.num_arrived])
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= oldest:
            self._snapshots.popleft()
        return waves, SampleBlock.concatenate(blocks)

    def _next(self) -> GlobalBatch:
        begin, waited = time.perf_counter(), self.stats.wait_seconds
        waves, block = self._waves()
        self.stats.work_seconds += time.perf_counter() - begin - (self.stats.wait_seconds - waited)
        if not waves or (self.drop_last and len(waves) < self.waves_per_batch):
            raise StopIteration
        with self.stats.working():
            plan = waves[0].plan if len(waves) == 1 else join_waves(waves, self.layout, self.cost)
        batch = GlobalBatch(
            index=self._position,
            plan=plan,
            seqlens=block.seqlens,
            num_loss_tokens=block.num_loss_tokens,
            refs=block.refs,
            block=block,
        )
        self._position += 1
        self.stats.observe("imbalance", imbalance(plan, self.cost))
        self.stats.items += 1
        self.stats.tokens += int(block.seqlens.sum())
        return batch

    def skip_to(self, step: int) -> None:
        """Go on with global batch ``step``: the waves before it are planned, nothing is read.

        Raises:
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        step = checked_int("step", step)
        if not self._is_open:
            self.reset(None)
        if step < self._position:
            raise ValueError(f"StreamPack: cannot go back from global batch {self._position} to {step}; reset first")
        while self._position < step:
            waves, _ = self._waves()
            if len(waves) < self.waves_per_batch and (self.drop_last or not waves):
                raise ValueError(f"StreamPack: global batch {step} is beyond the end; there are {self._position}")
            self._position += 1
