"""The stream: every sample goes out once and in time, waves are balanced, and a saved state goes on exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.schedule import CostModel, StreamScheduler, schedule, simulate, validate
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(8, 1, 1024, cp_sizes=(1, 2, 4, 8), tail_multiple=8)
COST = CostModel(a=1e-5, b=1e-9, c0=1e-4)


def lengths(n: int) -> list[int]:
    return np.random.default_rng(5).lognormal(5.0, 1.2, n).astype(int).clip(1, 8000).tolist()


def run(scheduler: StreamScheduler, seqlens: list[int]) -> list:
    waves = [wave for s in seqlens if (wave := scheduler.add(s)) is not None]
    return waves + scheduler.flush()


def test_every_sample_goes_out_once_in_valid_waves():
    seqlens = lengths(1500)
    waves = run(StreamScheduler(LAYOUT, COST, window=200), seqlens)
    numbers = np.concatenate([wave.sample_numbers for wave in waves])
    assert sorted(numbers.tolist()) == list(range(1500))
    for wave in waves:
        validate(wave.plan, equal_count=True)
        assert wave.plan.num_microbatches(0) == 1
        assert wave.plan.seqlens.tolist() == [seqlens[i] for i in wave.sample_numbers]


def test_waves_are_balanced_while_the_buffer_is_full():
    scheduler = StreamScheduler(LAYOUT, COST, window=300)
    waves = [wave for s in lengths(3000) if (wave := scheduler.add(s)) is not None]
    assert len(waves) > 20
    assert np.mean([simulate(wave.plan, COST, "lockstep").imbalance for wave in waves]) < 1.05


def test_no_sample_waits_longer_than_its_age_allows():
    seqlens = [8000] + [100] * 4000
    scheduler = StreamScheduler(LAYOUT, COST, window=100, max_age=150)
    went_out = None
    for number, seqlen in enumerate(seqlens):
        wave = scheduler.add(seqlen)
        if wave is not None and 0 in wave.sample_numbers:
            went_out = number
            break
    assert went_out is not None
    # Overdue after 150 more samples, and gone with the next wave, which takes at most a window to come.
    assert went_out <= 150 + 100


@pytest.mark.parametrize("stop", [0, 1, 99, 100, 101, 250, 499])
def test_a_saved_state_goes_on_exactly(stop):
    seqlens = lengths(500)
    whole = run(StreamScheduler(LAYOUT, COST, window=100), seqlens)
    first = StreamScheduler(LAYOUT, COST, window=100)
    waves = [wave for s in seqlens[:stop] if (wave := first.add(s)) is not None]
    state = json.loads(json.dumps(first.state_dict()))
    second = StreamScheduler(LAYOUT, COST, window=100)
    second.load_state_dict(state)
    waves += run(second, seqlens[stop:])
    assert [w.plan for w in waves] == [w.plan for w in whole]
    assert [w.sample_numbers.tolist() for w in waves] == [w.sample_numbers.tolist() for w in whole]


def test_a_state_is_a_copy_and_its_settings_are_checked():
    scheduler = StreamScheduler(LAYOUT, COST, window=100)
    scheduler.add(5)
    state = scheduler.state_dict()
    scheduler.add(6)
    assert state["seqlens"] == [5]
    with pytest.raises(StateMismatchError, match="window of the saved stream is 100, here it is 50"):
        StreamScheduler(LAYOUT, COST, window=50).load_state_dict(state)


@pytest.mark.parametrize(
    ("seqlen", "error", "message"),
    [(8193, ScheduleError, "8193 tokens, the limit is 8192"), (-1, ValueError, "-1"), (2.5, TypeError, "float")],
)
def test_bad_samples(seqlen, error, message):
    with pytest.raises(error, match=message):
        StreamScheduler(LAYOUT, COST, window=4).add(seqlen)


def test_bad_windows():
    with pytest.raises(ValueError, match="window must be at least 1"):
        StreamScheduler(LAYOUT, COST, window=0)
    with pytest.raises(TypeError, match="max_age"):
        StreamScheduler(LAYOUT, COST, window=4, max_age=1.5)


def test_by_name_over_a_global_batch():
    seqlens = lengths(400)
    plan = schedule(seqlens, LAYOUT, COST, "lockstep", algorithm="stream", window=100)
    validate(plan, equal_count=True)
    assert simulate(plan, COST, "lockstep").ratio < 1.3


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.lists(st.integers(0, 900), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=40
    ),
    apart=st.lists(st.integers(-1, 2), min_size=160, max_size=160),
    window=st.integers(5, 30),
    max_sequences=st.sampled_from([0, 4, 7]),
)
def test_keys_are_kept_by_every_wave(groups, apart, window, max_sequences):
    """Samples of one key come one after the other; none of them has an ``apart`` key, which could contradict."""
    rows = []
    for number, (seqlens, keyed) in enumerate(groups):
        rows += [(s, number if keyed else -1, -1 if keyed else key) for s, key in zip(seqlens, apart, strict=False)]
    scheduler = StreamScheduler(LAYOUT, COST, window=window, max_sequences=max_sequences)
    waves = []
    for seqlen, together, key in rows:
        wave = scheduler.add(seqlen, together=together, apart=key)
        waves += [] if wave is None else [wave]
        state = json.loads(json.dumps(scheduler.state_dict()))
        scheduler = StreamScheduler(LAYOUT, COST, window=window, max_sequences=max_sequences)
        scheduler.load_state_dict(state)
    waves += scheduler.flush()
    numbers = np.concatenate([wave.sample_numbers for wave in waves])
    assert sorted(numbers.tolist()) == list(range(len(rows)))
    wave_of = {}
    for i, wave in enumerate(waves):
        keys = {
            "together": [rows[n][1] for n in wave.sample_numbers],
            "apart": [rows[n][2] for n in wave.sample_numbers],
        }
        validate(wave.plan, equal_count=True, max_sequences_per_microbatch=max_sequences, **keys)
        for key in set(keys["together"]) - {-1}:
            assert wave_of.setdefault(key, i) == i


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        (
            [(4000, 1, -1), (4096, 1, -1), (99, 1, -1)],
            ScheduleError,
            r"3 samples belong together \(key 1\) and have",
        ),
        ([(5, 1, -1)] * 4, ScheduleError, r"4 samples belong together \(key 1\), at most 3 may share"),
        ([(5, 1, 7), (5, 1, 7)], ScheduleError, r"belong together \(key 1\), and apart \(key 7\)"),
        ([(5, -2, -1)], ValueError, "together must not be negative, got -2"),
        ([(5, 0, 1.5)], TypeError, "apart must be an int, got float"),
    ],
)
def test_keys_that_cannot_be_kept(samples, error, message):
    scheduler = StreamScheduler(LAYOUT, COST, window=10, max_sequences=3)
    *before, last = [{"together": together, "apart": apart} for _, together, apart in samples]
    for (seqlen, *_), keys in zip(samples, before, strict=False):
        scheduler.put(seqlen, **keys)
    with pytest.raises(error, match=message):
        scheduler.put(samples[-1][0], **last)


def test_a_window_of_nothing_but_one_key_is_refused_while_more_may_come():
    scheduler = StreamScheduler(LAYOUT, COST, window=3)
    for _ in range(2):
        assert scheduler.add(5, together=4) is None
    with pytest.raises(ScheduleError, match="all 3 samples in the window belong together"):
        scheduler.add(5, together=4)
    (wave,) = scheduler.flush()
    assert max(len(op.sample_ids) for op in wave.plan.ops) == 3


def test_a_state_saved_without_keys_has_none():
    scheduler = StreamScheduler(LAYOUT, COST, window=3)
    scheduler.put(5)
    state = {name: value for name, value in scheduler.state_dict().items() if name not in ("together", "apart")}
    other = StreamScheduler(LAYOUT, COST, window=3)
    other.load_state_dict(state)
    assert other.state_dict() == scheduler.state_dict()
