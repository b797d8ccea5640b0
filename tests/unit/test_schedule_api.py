"""``schedule``: what it accepts, what it refuses, and the cases that other schedulers get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import (
    CostModel,
    Mode,
    Plan,
    PlanOp,
    algorithms,
    api,
    imbalance,
    register,
    schedule,
    simulate,
    validate,
)
from tdp_megatron.types import ParallelLayout

STATIC = ("dp_balanced", "lpt", "kk", "best_fit")
ALL = (*STATIC, "buddy", "waves", "default_dynamic_cp", "stream", "auto")


@pytest.mark.parametrize(
    ("seqlens", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "got dtype float64"),
        ([1.0, float("nan")], ValueError, r"seqlens\[1\] is NaN"),
        ([3, -2], ValueError, r"seqlens\[1\] is -2"),
        ([[1, 2]], ValueError, "one dimension"),
        ([[1, 2], [3]], ValueError, "flat array"),
        (7, ValueError, "one dimension"),
        (["7"], TypeError, "must be integers"),
        ([True, False], TypeError, "bool"),
        (np.array([2**63], dtype=np.uint64), ValueError, "int64 cannot hold"),
        ([5, 2**70], ValueError, r"seqlens\[1\] is 1180591620717411303424, which int64 cannot hold"),
        ([5, None], TypeError, "got dtype object"),
        (None, ValueError, "one dimension"),
    ],
)
def test_lengths_that_are_no_lengths(seqlens, error, message):
    with pytest.raises(error, match=message):
        schedule(seqlens, ParallelLayout(2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": {"dp": 2}}, TypeError, "ParallelLayout"),
        ({"cost": 3.0}, TypeError, "CostModel"),
        ({"mode": "fast"}, ValueError, "free, lockstep, barrier, pipeline"),
        ({"mode": "free(3)"}, ValueError, "got 'free"),
        ({"mode": "pipeline(0)"}, ValueError, "stages must be at least 1"),
        ({"mode": 3}, TypeError, "mode must be"),
        ({"algorithm": "best"}, ValueError, "unknown algorithm 'best'; known are auto, .*lpt"),
        ({"equal_count": 1}, TypeError, "equal_count"),
        ({"microbatches_multiple": 0}, ValueError, "microbatches_multiple"),
        ({"max_sequences_per_microbatch": 2.5}, TypeError, "max_sequences_per_microbatch"),
        ({"algorithm": "lpt", "strict": True}, TypeError, "strict"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        schedule([4, 5], **{"layout": ParallelLayout(2), **arguments})


def test_modes_are_read_as_written():
    assert Mode.parse("pipeline(8, 2)") == Mode("pipeline", 8, 2)
    assert Mode.parse("pipeline") == Mode("pipeline", 4)
    assert Mode.parse("lockstep").needs_equal_count
    assert not Mode.parse("free").needs_equal_count


def test_names():
    assert {*ALL, "balanced_hybrid_cp"} == {*algorithms(), "auto"}


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize(
    ("seqlens", "dp", "cp"),
    [
        ([], 4, 1),
        ([0], 2, 2),
        ([0, 0, 0], 2, 1),
        ([1], 8, 1),
        ([1] * 50, 3, 2),
        ([64] * 8, 8, 1),
        ([7, 8, 9, 15, 16, 17], 2, 4),
        ([10] * 100, 6, 2),
        (list(range(64)), 12, 1),
    ],
)
@pytest.mark.parametrize("limits", [{}, {"equal_count": True}, {"microbatches_multiple": 3}])
def test_small_and_odd_batches(algorithm, seqlens, dp, cp, limits):
    plan = schedule(seqlens, ParallelLayout(dp, cp, 64, tail_multiple=2), algorithm=algorithm, **limits)
    validate(plan, **limits)


@pytest.mark.parametrize("algorithm", ALL)
def test_a_sequence_above_the_cap_is_named(algorithm):
    with pytest.raises(ScheduleError, match="sequence 1 has 65 tokens, the limit is 64 .*1 sequence"):
        schedule([64, 65, 3], ParallelLayout(1, 2, 40, tail_multiple=16), algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALL)
def test_padding_counts_against_the_cap(algorithm):
    # A cap of 5 per rank holds 10 tokens on two ranks, but sequences come in fours: 8.
    layout = ParallelLayout(1, 2, 5, tail_multiple=1)
    validate(schedule([8, 4, 4], layout, algorithm=algorithm))
    with pytest.raises(ScheduleError, match="sequence 0 has 9 tokens, the limit is 8"):
        schedule([9], layout, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALL)
def test_a_limit_on_sequences_is_kept(algorithm):
    plan = schedule([1] * 30, ParallelLayout(2, 1, 64), algorithm=algorithm, max_sequences_per_microbatch=4)
    validate(plan, max_sequences_per_microbatch=4)
    unlimited = schedule([1] * 30, ParallelLayout(2, 1, 64), algorithm=algorithm)
    if algorithm in STATIC:
        with pytest.raises(ScheduleError, match="the limit is 4"):
            validate(unlimited, max_sequences_per_microbatch=4)


def test_many_short_sequences_where_megatron_has_not_enough_to_move():
    seqlens, layout = [100] * 100, ParallelLayout(8, 1, 16384)
    with pytest.raises(ScheduleError, match="no pack but the first"):
        schedule(seqlens, layout, algorithm="dp_balanced", strict=True)
    plan = schedule(seqlens, layout, algorithm="dp_balanced")
    assert all(not op.is_dummy for op in plan.ops)
    validate(plan, equal_count=True)


def test_static_algorithms_use_cp_of_a_dynamic_layout():
    layout = ParallelLayout(2, 2, 64, cp_sizes=(1, 2, 4))
    assert set(schedule([10, 20, 100], layout, algorithm="lpt").op_cp_size.tolist()) == {2}
    with pytest.raises(ScheduleError, match="limit is 128"):
        schedule([200], layout, algorithm="lpt")
    with pytest.raises(ScheduleError, match="cp 2 is not among cp_sizes"):
        schedule([10], ParallelLayout(2, 2, 64, cp_sizes=(1, 4)), algorithm="lpt")


def test_lpt_balances_work_and_not_tokens():
    # One sequence of 100 costs as much as 50 of 10 do under b alone; by tokens it equals 10 of them.
    cost = CostModel(a=0.0, b=1.0)
    seqlens = [100] + [10] * 100
    plan = schedule(seqlens, ParallelLayout(2, 1, 2000), cost, algorithm="lpt")
    assert imbalance(plan, cost) == 1.0
    assert imbalance(schedule(seqlens, ParallelLayout(2, 1, 2000), cost, algorithm="dp_balanced"), cost) > 1.3


@pytest.mark.parametrize("algorithm", ["lpt", "kk", "best_fit", "buddy", "waves", "default_dynamic_cp", "auto"])
def test_order_of_equal_lengths_changes_only_ids(algorithm):
    layout = ParallelLayout(4, 1, 256, cp_sizes=(1, 2, 4))
    seqlens = np.array([50, 50, 30, 30, 30, 20, 20, 10])
    shuffled = np.random.default_rng(0).permutation(len(seqlens))
    one, other = (schedule(s, layout, algorithm=algorithm) for s in (seqlens, seqlens[shuffled]))
    assert [one.seqlens[i] for i in one.sample_ids] == [other.seqlens[i] for i in other.sample_ids]
    assert one.op_offsets.tolist() == other.op_offsets.tolist()


def test_the_same_input_gives_the_same_bits():
    seqlens = np.random.default_rng(1).integers(1, 2000, 500)
    digests = {schedule(seqlens.tolist(), ParallelLayout(4, 2, 2048), algorithm="lpt").digest() for _ in range(3)}
    assert len(digests) == 1


def test_a_users_algorithm_is_called_by_name(monkeypatch):
    monkeypatch.setattr(api, "_REGISTRY", dict(api._REGISTRY))

    def one_pack(problem, *, reverse=False):
        ids = tuple(range(len(problem.seqlens)))
        return Plan.from_ops(problem.layout, problem.seqlens, [PlanOp(0, 1, ids[::-1] if reverse else ids)])

    register("one_pack", one_pack)
    assert "one_pack" in algorithms()
    plan = schedule([3, 4], ParallelLayout(1), algorithm="one_pack", reverse=True)
    assert plan.ops[0].sample_ids == (1, 0)
    with pytest.raises(ValueError, match="exists already"):
        register("one_pack", one_pack)
    with pytest.raises(TypeError, match="callable"):
        register("nothing", None)


def test_dynamic_cp_reaches_what_static_cp_cannot():
    """One sequence of half of all work: alone on one rank it takes 4 times the mean."""
    cost = CostModel(a=1.0, b=0.0)
    layout = ParallelLayout(8, 1, 512, cp_sizes=(1, 2, 4, 8), tail_multiple=1)
    seqlens = [512] + [16] * 32
    for mode in ("free", "lockstep"):
        plans = {name: schedule(seqlens, layout, cost, mode, algorithm=name) for name in ("dp_balanced", "auto")}
        ratios = {name: simulate(plan, cost, mode).ratio for name, plan in plans.items()}
        assert ratios["auto"] <= 1.01
        assert ratios["dp_balanced"] >= 3.9


def test_waves_make_equal_counts_and_equal_times_in_lockstep():
    seqlens = np.random.default_rng(3).lognormal(5.5, 1.2, 600).astype(np.int64).clip(1, 8192)
    layout = ParallelLayout(4, 4, 2048, cp_sizes=(1, 2, 4, 8, 16), tail_multiple=16)
    cost = CostModel(a=1e-5, b=1e-9, c0=1e-4)
    plan = schedule(seqlens, layout, cost, "lockstep", algorithm="waves")
    validate(plan, equal_count=True)
    assert simulate(plan, cost, "lockstep").ratio <= 1.05
    assert simulate(schedule(seqlens, layout, cost, "lockstep", algorithm="dp_balanced"), cost, "lockstep").ratio > 1.25


def test_a_pipeline_gets_more_and_shorter_microbatches():
    seqlens = [64] * 64
    layout = ParallelLayout(4, 1, 1024, tail_multiple=1)
    cost = CostModel(a=1e-3, b=0.0, c0=1e-3)
    free, pipeline = (schedule(seqlens, layout, cost, mode) for mode in ("free", "pipeline(8)"))
    assert free.num_microbatches(0) == 1
    assert pipeline.num_microbatches(0) == 16
    assert simulate(pipeline, cost, "pipeline(8)").step_seconds < 0.2 * simulate(free, cost, "pipeline(8)").step_seconds


def test_default_dynamic_cp_pads_as_asked():
    layout = ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), sp=2, tail_multiple=2)
    after = schedule([10, 70], layout, algorithm="default_dynamic_cp")
    before = schedule([10, 70], layout, algorithm="default_dynamic_cp", pad="before")
    assert sorted(after.padded_lengths.tolist()) == [12, 72]
    assert sorted(before.padded_lengths.tolist()) == [16, 80]
    validate(before)
    narrow = ParallelLayout(4, 1, 64, cp_sizes=(4,), sp=2, tail_multiple=62)
    with pytest.raises(ScheduleError, match="sequence 0 has 245 tokens, 256 when padded .* 248"):
        schedule([245], narrow, algorithm="default_dynamic_cp", pad="before")
    with pytest.raises(ValueError, match="'after' or 'before'"):
        schedule([1], layout, algorithm="default_dynamic_cp", pad="never")


def test_default_dynamic_cp_gives_nobody_nothing_to_do_and_strict_says_where_megatron_fails():
    dynamic = {"algorithm": "default_dynamic_cp"}
    # No CP size holds all six ranks, so that the groups of two stay as they are.
    layout = ParallelLayout(6, 1, 64, cp_sizes=(1, 2), tail_multiple=2)
    with pytest.raises(ScheduleError, match=r"rank 2 has nothing to do .*CP sizes are \[1, 2\], there are 6 ranks"):
        schedule([40], layout, strict=True, **dynamic)
    plan = schedule([40], layout, **dynamic)
    validate(plan, equal_count=True)
    assert plan.ops[0].ranks == range(2)
    assert schedule([40] * 6, layout, strict=True, **dynamic) == schedule([40] * 6, layout, **dynamic)
    # A sequence on all ranks cannot be parted from another.
    layout = ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), tail_multiple=2)
    with pytest.raises(ScheduleError, match="number of microbatches cannot be made a multiple of 2"):
        schedule([250], layout, strict=True, microbatches_multiple=2, **dynamic)
    plan = schedule([250], layout, microbatches_multiple=2, **dynamic)
    validate(plan, equal_count=True, microbatches_multiple=2)
    assert schedule([], layout, strict=True, **dynamic).num_microbatches(0) == 1


def test_default_dynamic_cp_takes_all_ranks_where_widening_leaves_some():
    layout = ParallelLayout(8, 1, 64, cp_sizes=(1, 8), tail_multiple=2)
    plan = schedule([40, 30], layout, algorithm="default_dynamic_cp", strict=True)
    assert [(op.first_rank, op.cp_size, op.sample_ids) for op in plan.ops] == [(0, 8, (0, 1))]


def test_default_dynamic_cp_does_not_widen_what_padding_would_bring_above_the_cap():
    # 30 sequences of one token are 30 tokens on one rank and 120 on two.
    layout = ParallelLayout(2, 1, 30, cp_sizes=(1, 2), tail_multiple=2)
    plan = schedule([30] + [1] * 30, layout, algorithm="default_dynamic_cp")
    validate(plan, equal_count=True)


def test_auto_takes_no_options():
    with pytest.raises(TypeError, match="auto has no options, got strict"):
        schedule([1], ParallelLayout(1), strict=True)
