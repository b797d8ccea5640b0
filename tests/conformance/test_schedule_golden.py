"""Plans equal to Megatron's for the same lengths.

The data come from Megatron-LM commit d98e8a64, Aug 2026, NumPy 2.4.6.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import Plan, schedule, validate
from tdp_megatron.types import ParallelLayout

DATA = Path(__file__).parent / "data"
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
