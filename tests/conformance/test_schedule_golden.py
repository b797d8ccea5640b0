"""Plans equal to Megatron's for the same lengths.

The data come from Megatron-LM commit d98e8a64, Aug 2026, NumPy 2.4.6.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import Plan, schedule, validate
from tdp_megatron.schedule.hybrid_cp import hybrid_groups
from tdp_megatron.schedule.megatron import BalancedCPScheduler
from tdp_megatron.types import ParallelLayout

DATA = Path(__file__).parent / "data"
BALANCED_CP = json.loads((DATA / "balanced_cp.json").read_text())["cases"]
DP_BALANCED = json.loads((DATA / "dp_balanced.json").read_text())["cases"]
#: Megatron overfills a rank here instead of refusing; the empty batch has no microbatch there and a dummy one here.
DIFFERENT = ("first_sample_too_long", "middle_sample_too_long", "empty")


def packs_by_microbatch(plan: Plan) -> list[list[list[int]]]:
    cp = plan.layout.cp
    ranks = [[plan.ops[op].sample_ids for op in plan.rank_ops(dp_rank * cp)] for dp_rank in range(plan.layout.dp)]
    return [[list(packs[i]) for packs in ranks] for i in range(len(ranks[0]))]


def dp_balanced_input(case):
    _, cap, cp, dp, multiple, seqlens, _ = case
    # Megatron was given lengths as they are; in whole pad multiples padding changes nothing here either.
    unit = ParallelLayout.pad_multiple(cp)
    return [s * unit for s in seqlens], ParallelLayout(dp, cp, cap * unit, tail_multiple=1), multiple


def test_the_data_hold_both_kinds():
    accepted = [case for case in DP_BALANCED if case[-1] is not None]
    assert (len(DP_BALANCED), len(accepted)) == (293, 180)
    assert {case[0] for case in DP_BALANCED} >= set(DIFFERENT)


@pytest.mark.parametrize("strict", [True, False])
def test_dp_balanced_equals_megatron_where_megatron_accepts(strict):
    compared = 0
    for case in DP_BALANCED:
        if case[-1] is None or case[0] in DIFFERENT:
            continue
        seqlens, layout, multiple = dp_balanced_input(case)
        plan = schedule(seqlens, layout, algorithm="dp_balanced", strict=strict, microbatches_multiple=multiple)
        assert packs_by_microbatch(plan) == case[-1], case
        validate(plan, equal_count=True, microbatches_multiple=multiple)
        compared += 1
    assert compared == 177


def test_dp_balanced_strict_rejects_what_megatron_rejects_and_the_default_does_not():
    rejected = [case for case in DP_BALANCED if case[-1] is None]
    for case in rejected:
        seqlens, layout, multiple = dp_balanced_input(case)
        limits = {"algorithm": "dp_balanced", "microbatches_multiple": multiple}
        with pytest.raises(ScheduleError, match="cannot be made a multiple"):
            schedule(seqlens, layout, strict=True, **limits)
        validate(schedule(seqlens, layout, **limits), equal_count=True, microbatches_multiple=multiple)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("first_sample_too_long", "sequence 0 has 150 tokens, the limit is 100"),
        ("middle_sample_too_long", "sequence 1 has 150 tokens, the limit is 100"),
    ],
)
def test_dp_balanced_names_a_sequence_that_megatron_lets_overflow(label, message):
    case = next(c for c in DP_BALANCED if c[0] == label)
    assert any(sum(case[5][i] for i in pack) > case[1] for step in case[-1] for pack in step)
    seqlens, layout, _ = dp_balanced_input(case)
    for strict in (True, False):
        with pytest.raises(ScheduleError, match=message):
            schedule(seqlens, layout, algorithm="dp_balanced", strict=strict)


def test_an_empty_batch_gives_every_rank_a_dummy():
    plan = schedule([], ParallelLayout(2, 1, 100, tail_multiple=1), algorithm="dp_balanced")
    assert packs_by_microbatch(plan) == [[[], []]]


def hybrid_layout(case) -> ParallelLayout:
    _, cap, ranks, _, _ = case
    sizes = tuple(1 << shift for shift in range(ranks.bit_length()) if ranks % (1 << shift) == 0)
    return ParallelLayout(ranks, 1, cap, cp_sizes=sizes, tail_multiple=1)


def test_hybrid_groups_equal_megatrons():
    compared = 0
    for _, cap, ranks, seqlens, expected in BALANCED_CP:
        if expected is None:
            with pytest.raises(ScheduleError, match=f"sequence 0 has {seqlens[0]} tokens and needs"):
                hybrid_groups(seqlens, cap, ranks)
            continue
        assert hybrid_groups(seqlens, cap, ranks) == [
            [ids for count, ids in group for _ in range(count)] for group in expected
        ]
        compared += 1
    assert (len(BALANCED_CP), compared) == (166, 163)


def barrier_groups(plan: Plan) -> list[list[list[int]]]:
    groups = [[[] for _ in range(plan.layout.num_ranks)] for _ in range(int(plan.op_group[-1]) + 1)]
    for op, group in zip(plan.ops, plan.op_group.tolist(), strict=True):
        for rank in op.ranks:
            groups[group][rank].extend(op.sample_ids)
    return groups


def test_the_hybrid_class_equals_megatron_and_aligns_what_megatron_does_not():
    equal = aligned = 0
    for label, cap, ranks, seqlens, expected in BALANCED_CP:
        if expected is None:
            continue
        rows = [[ids for count, ids in group for _ in range(count)] for group in expected]
        lengths, ids = BalancedCPScheduler(cap, ranks).get_groups_and_subsamples(list(enumerate(seqlens)), None)
        assert lengths == [[[seqlens[i] for i in rank] for rank in group] for group in ids]
        if label == "known_bad":
            assert ids != rows
            assert [sorted(group) for group in ids] == [sorted(group) for group in rows]
            assert all(group.index(rank) % group.count(rank) == 0 for group in ids for rank in group)
            with pytest.raises(ScheduleError, match="which are no process group"):
                BalancedCPScheduler(cap, ranks, strict=True).get_groups_and_subsamples(list(enumerate(seqlens)), None)
            aligned += 1
        else:
            assert ids == rows
            equal += 1
    assert (equal, aligned) == (160, 3)


def test_hybrid_plans_can_always_be_run_and_are_megatrons_where_strict_accepts():
    """Strict refuses blocks without a process group, the default moves them or takes other CP sizes."""
    accepted = refused = too_long = 0
    for case in BALANCED_CP:
        _, cap, ranks, seqlens, expected = case
        limits = {"layout": hybrid_layout(case), "mode": "barrier", "algorithm": "balanced_hybrid_cp"}
        if max(seqlens) > cap * max(limits["layout"].cp_sizes):
            for strict in (True, False):
                with pytest.raises(ScheduleError, match="tokens, the limit is"):
                    schedule(seqlens, strict=strict, **limits)
            too_long += 1
            continue
        plan = schedule(seqlens, **limits)
        validate(plan)
        assert [sorted({i for rank in group for i in rank}) for group in barrier_groups(plan)] == [
            sorted(i for _, ids in group for i in ids) for group in expected
        ]
        starts = [(count, sum(c for c, _ in group[:at])) for group in expected for at, (count, _) in enumerate(group)]
        if all(size in plan.layout.cp_sizes and start % size == 0 for size, start in starts):
            assert barrier_groups(plan) == hybrid_groups(seqlens, cap, ranks)
            assert schedule(seqlens, strict=True, **limits) == plan
            accepted += 1
        else:
            with pytest.raises(ScheduleError, match=r"group \d+ puts sequence \d+ on ranks .* are no process group"):
                schedule(seqlens, strict=True, **limits)
            refused += 1
    assert (accepted, refused, too_long) == (137, 9, 20)
