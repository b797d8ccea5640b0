"""The native core gives the same plans as the plain references, bit for bit, on random and on nasty input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, Limits, Mode, Plan, Problem, preset
from tdp_megatron.schedule.buddy import buddy, buddy_reference
from tdp_megatron.schedule.dp_balanced import dp_balanced, dp_balanced_reference
from tdp_megatron.schedule.dynamic_cp import default_dynamic_cp, default_dynamic_cp_reference, dynamic_cp_within
from tdp_megatron.schedule.lpt import best_fit, best_fit_reference, kk, kk_reference, lpt, lpt_reference
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.problem import pack_token_cap
from tdp_megatron.schedule.simulate import simulate, step_seconds
from tdp_megatron.schedule.stream import stream_wave_reference
from tdp_megatron.schedule.waves import waves, waves_reference
from tdp_megatron.types import ParallelLayout

PAIRS = {
    "buddy": (buddy, buddy_reference),
    "waves": (waves, waves_reference),
    "lpt": (lpt, lpt_reference),
    "kk": (kk, kk_reference),
    "best_fit": (best_fit, best_fit_reference),
    "dp_balanced": (dp_balanced, dp_balanced_reference),
    "default_dynamic_cp": (default_dynamic_cp, default_dynamic_cp_reference),
}
COSTS = (
    preset("llama-8b"),
    preset("mistral-7b"),
    CostModel(a=1e-4, b=1e-7, c0=1e-3, window=16, layers=2, kv_bytes=1e4, node_ranks=2),
    CostModel(a=0.0, b=1e-6),
    CostModel(a=1.0, b=0.0),
    CostModel(a=0.0, b=0.0, c0=1.0),
)


def outcome(algorithm, problem: Problem, **options) -> Plan | str:
    try:
        return algorithm(problem, **options)
    except ScheduleError as error:
        return str(error)


@st.composite
def problems(draw):
    """Problems on 1 to 24 ranks with lengths of every kind."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]))
    powers = [k for k in (1, 2, 4, 8, 16) if num_ranks % k == 0]
    sizes = tuple(sorted(draw(st.sets(st.sampled_from(powers), min_size=1))))
    cp = draw(st.sampled_from(sizes))
    tail = draw(st.sampled_from([1, 2, 16, 48]))
    layout = ParallelLayout(
        num_ranks // cp, cp, draw(st.integers(max(tail, 2), 400)), cp_sizes=sizes, tail_multiple=tail
    )
    longest = max(pack_token_cap(layout, k) for k in sizes)
    length = st.one_of(
        st.integers(0, longest),
        st.sampled_from([0, 1, longest, longest // 2, longest // 2 + 1, longest // 3]),
        st.integers(0, min(longest, 20)),
    )
    limits = Limits(draw(st.booleans()), draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 1, 3])))
    mode = Mode.parse(draw(st.sampled_from(["free", "lockstep", "barrier", "pipeline(3)", "pipeline(4, 2)"])))
    seqlens = np.array(draw(st.lists(length, max_size=120)), dtype=np.int64)
    return Problem(seqlens, layout, draw(st.sampled_from(COSTS)), mode, limits)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_native_equals_reference(name, problem):
    native, reference = PAIRS[name]
    assert outcome(native, problem) == outcome(reference, problem)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("mode", ["free", "lockstep", "pipeline(4)"])
@pytest.mark.parametrize("seed", [0, 1])
def test_native_equals_reference_on_real_sizes(name, mode, seed):
    rng = np.random.default_rng(seed)
    seqlens = rng.lognormal(np.log(1200), 1.7, 400).astype(np.int64).clip(1, 131072)
    layout = ParallelLayout(4, 8, 16384, cp_sizes=(1, 2, 4, 8, 16, 32), sp=1 + 7 * seed)
    problem = Problem(seqlens, layout, preset("llama-70b" if seed else "llama-8b"), Mode.parse(mode), Limits())
    native, reference = PAIRS[name]
    assert native(problem).digest() == reference(problem).digest()


def test_options_reach_the_native_core():
    problem = Problem(
        np.array([30, 7, 9, 60, 2], dtype=np.int64),
        ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), sp=2, tail_multiple=2),
        COSTS[0],
        Mode("free"),
        Limits(),
    )
    for options in ({"pad": "before"}, {"pad": "after"}, {"strict": True}):
        assert default_dynamic_cp(problem, **options) == default_dynamic_cp_reference(problem, **options)
    assert outcome(dp_balanced, problem, strict=True) == outcome(dp_balanced_reference, problem, strict=True)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_strict_dynamic_cp_is_the_default_or_an_error(problem):
    strict = outcome(default_dynamic_cp, problem, strict=True)
    assert strict == outcome(default_dynamic_cp_reference, problem, strict=True)
    plan = default_dynamic_cp(problem)
    if isinstance(strict, str):
        assert any(op.is_dummy for op in plan.ops)
    else:
        assert strict == plan
        assert len(problem.seqlens) == 0 or not any(op.is_dummy for op in plan.ops)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), leader=st.integers(-1, 40))
def test_waves_of_a_stream_equal_the_reference(problem, leader):
    count = len(problem.seqlens)
    if count == 0 or leader >= count:
        with pytest.raises(ValueError, match="leader must be -1 or one of the sequences"):
            _C.schedule_stream_wave(native_input(problem), leader)
        return
    first_rank, cp_size, offsets, ids = _C.schedule_stream_wave(native_input(problem), leader)
    native = [
        (first, k, members.tolist())
        for first, k, members in zip(first_rank.tolist(), cp_size.tolist(), np.split(ids, offsets[1:-1]), strict=True)
    ]
    assert native == stream_wave_reference(problem, leader)


def seconds_or_error(run) -> float | str:
    try:
        return run()
    except ScheduleError as error:
        return str(error)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), rises=st.lists(st.booleans(), min_size=300, max_size=300), name=st.sampled_from(list(PAIRS)))
def test_the_short_way_to_the_step_equals_the_simulation(problem, rises, name):
    plan = outcome(PAIRS[name][0], problem)
    if isinstance(plan, str):
        return
    groups = np.cumsum(np.resize(rises, plan.num_ops)).astype(np.int64)
    grouped = Plan.from_packs(
        plan.layout,
        plan.seqlens,
        plan.op_first_rank,
        plan.op_cp_size,
        plan.op_offsets,
        plan.sample_ids,
        op_group=groups,
    )
    for mode in (Mode("free"), Mode("lockstep"), Mode("barrier"), Mode("pipeline", 3, 2)):
        short = seconds_or_error(lambda mode=mode: step_seconds(grouped, problem.cost, mode))
        assert short == seconds_or_error(lambda mode=mode: simulate(grouped, problem.cost, mode).step_seconds)


@settings(max_examples=150, deadline=None)
@given(problem=problems(), share=st.floats(0.3, 1.1))
def test_dynamic_cp_is_given_up_only_where_it_takes_too_long(problem, share):
    plan = default_dynamic_cp(problem)
    seconds = step_seconds(plan, problem.cost, problem.mode)
    within = dynamic_cp_within(problem, share * seconds)
    if within is None:
        assert share < 1.0
    else:
        assert within == plan
    assert dynamic_cp_within(problem, seconds) == plan


def test_dynamic_cp_is_given_up_early():
    seqlens = np.array([4000] + [100] * 200, dtype=np.int64)
    problem = Problem(seqlens, ParallelLayout(8, 1, 4096, cp_sizes=(1, 2, 4, 8)), COSTS[0], Mode("lockstep"), Limits())
    seconds = step_seconds(default_dynamic_cp(problem), problem.cost, problem.mode)
    assert dynamic_cp_within(problem, 0.5 * seconds) is None


def test_the_binding_refuses_what_would_be_unsafe():
    good = {
        "seqlens": np.array([1, 2], dtype=np.int64),
        "cp_sizes": [1],
        "num_ranks": 2,
        "token_limit": 8,
        "tail": 1,
        "max_sequences": 4,
        "microbatches_multiple": 1,
        "cost": [0.0] * 10,
    }
    _C.ScheduleInput(**good)
    with pytest.raises(TypeError):
        _C.ScheduleInput(**{**good, "seqlens": np.array([1, 2], dtype=np.int32)})
    for bad in (
        {"seqlens": np.array([-1], dtype=np.int64)},
        {"seqlens": np.array([9], dtype=np.int64)},
        {"seqlens": np.array([[1]], dtype=np.int64)},
        {"cp_sizes": []},
        {"cp_sizes": [3]},
        {"cp_sizes": [0]},
        {"num_ranks": 0},
        {"cost": [0.0]},
    ):
        with pytest.raises(ValueError, match="must"):
            _C.ScheduleInput(**{**good, **bad})
    one = np.zeros(1, dtype=np.int64)
    for first, size, message in ((-1, 1, "outside"), (1, 2, "outside"), (0, 0, "outside")):
        with pytest.raises(ValueError, match=message):
            _C.schedule_free_step(one + first, one + size, np.ones(1), 2)


def test_the_binding_of_the_step_refuses_what_would_be_unsafe():
    one = np.ones(1, dtype=np.int64)
    good = {
        "first_rank": 0 * one,
        "cp_size": one,
        "offsets": np.array([0, 2], dtype=np.int64),
        "padded_lengths": np.array([3, 4], dtype=np.int64),
        "tokens_per_rank": 7 * one,
        "group": 0 * one,
        "num_ranks": 1,
        "cost": [1.0] + [0.0] * 6 + [8.0, 1.0, 1.0],
        "mode": "free",
        "stages_before": 0.0,
    }
    assert _C.schedule_step(**good) == 7.0
    for bad, message in (
        ({"first_rank": one}, "outside"),
        ({"cp_size": 2 * one}, "outside"),
        ({"cp_size": np.ones(2, dtype=np.int64)}, "cp_size"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"offsets": np.array([0, 3], dtype=np.int64)}, "offsets"),
        ({"offsets": np.array([1, 2], dtype=np.int64)}, "offsets"),
        ({"offsets": np.array([0, 1, 2], dtype=np.int64)}, "offsets"),
        ({"tokens_per_rank": np.ones(2, dtype=np.int64)}, "tokens_per_rank"),
        ({"group": np.ones(0, dtype=np.int64)}, "group"),
        ({"cost": [1.0]}, "cost"),
        ({"mode": "fast"}, "mode"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.schedule_step(**{**good, **bad})
    with pytest.raises(TypeError):
        _C.schedule_step(**{**good, "group": np.zeros(1)})


@pytest.mark.parametrize("mode", ["free", "lockstep", "pipeline(4)"])
@pytest.mark.parametrize("name", ["llama-70b", "qwen-1.7b"])
@pytest.mark.parametrize("kind", ["files", "two lengths", "pareto"])
def test_waves_equal_the_reference_on_large_batches(mode, name, kind):
    # From some size on the search takes larger steps.
    rng = np.random.default_rng(0)
    if kind == "files":
        lengths = rng.lognormal(np.log(1200), 1.7, 4096)
    elif kind == "two lengths":
        lengths = np.where(rng.random(2600) < 0.03, rng.normal(60_000, 8000, 2600), rng.normal(1500, 400, 2600))
    else:
        lengths = 300 * (1 + rng.pareto(1.1, 3000))
    ranks = 64 if kind == "files" else 128
    sizes = tuple(1 << shift for shift in range(ranks.bit_length()))
    layout = ParallelLayout(ranks // 8, 8, 16384, cp_sizes=sizes, sp=8 if name == "llama-70b" else 1)
    problem = Problem(
        lengths.clip(1, 131072).astype(np.int64), layout, preset(name), Mode.parse(mode), Limits(equal_count=True)
    )
    assert waves(problem) == waves_reference(problem)
