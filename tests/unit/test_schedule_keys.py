"""Sequences that must, or must not, share a microbatch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, Plan, PlanOp, schedule, simulate, validate
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), tail_multiple=1)


@pytest.mark.parametrize("algorithm", ["auto", "lpt", "buddy", "waves", "dp_balanced", "default_dynamic_cp"])
def test_keys_are_kept_by_every_algorithm(algorithm):
    seqlens = [10] * 12
    together = [0, -1, 0, 1, -1, 1, 1, -1, -1, -1, -1, -1]
    apart = [-1, 0, -1, -1, 0, -1, -1, 0, 0, 0, -1, -1]
    plan = schedule(seqlens, LAYOUT, algorithm=algorithm, together=together, apart=apart, equal_count=True)
    validate(plan, together=together, apart=apart, equal_count=True)


def test_more_of_one_key_than_ranks_get_more_microbatches():
    apart = [0] * 10
    plan = schedule([4] * 10, LAYOUT, apart=apart)
    validate(plan, apart=apart)
    assert max(len(op.sample_ids) for op in plan.ops) == 1


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 3), st.integers(-1, 3)), max_size=20),
    algorithm=st.sampled_from(["auto", "dp_balanced"]),
    multiple=st.integers(1, 2),
)
def test_random_keys_are_kept_or_refused_with_a_reason(rows, algorithm, multiple):
    seqlens = [row[0] for row in rows]
    together = [row[1] for row in rows]
    apart = [row[2] for row in rows]
    keys = {"together": together, "apart": apart, "microbatches_multiple": multiple}
    reason = ""
    try:
        plan = schedule(seqlens, LAYOUT, mode="lockstep", algorithm=algorithm, **keys)
    except ScheduleError as error:
        reason = str(error)
    if reason:
        assert "belong together" in reason or "the limit is" in reason
    else:
        validate(plan, **keys)
        assert simulate(plan, CostModel(a=1.0, b=0.0), "lockstep").step_seconds > 0


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"together": [0, 0], "apart": [1, 1]}, ScheduleError, r"sequences \[0, 1\] belong together \(key 0\)"),
        (
            {"together": [0, 0], "max_sequences_per_microbatch": 1},
            ScheduleError,
            r"sequences \[0, 1\] .* at most 1 may",
        ),
        ({"together": [0.5, 0]}, TypeError, "together must be integers"),
        ({"apart": [0]}, ValueError, r"one key per sequence \(2\)"),
        ({"apart": [0, -2]}, ValueError, "got -2"),
    ],
)
def test_impossible_keys(keys, error, message):
    with pytest.raises(error, match=message):
        schedule([5, 6], LAYOUT, **keys)


def test_what_belongs_together_and_is_too_long_is_named():
    with pytest.raises(ScheduleError, match=r"sequences \[0, 1\] belong together and have 304 tokens .* 256"):
        schedule([150, 150], LAYOUT, together=[7, 7])


def test_validate_names_broken_keys():
    plan = Plan.from_ops(ParallelLayout(2), [5, 6, 7], [PlanOp(0, 1, (0, 1)), PlanOp(1, 1, (2,))])
    validate(plan, together=[0, 0, 1], apart=[0, 1, 0])
    with pytest.raises(ScheduleError, match=r"sequences 1 and 2 belong together \(key 3\), but are in op 0"):
        validate(plan, together=[-1, 3, 3])
    with pytest.raises(ScheduleError, match=r"sequences 0 and 1 must be apart \(key 0\), but are both in op 0"):
        validate(plan, apart=[0, 0, -1])
