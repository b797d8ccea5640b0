"""``validate``: each hard constraint, broken alone, is named with its op, rank, sequence, value and limit."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import Plan, PlanOp, validate
from tdp_megatron.schedule.execution import execution_order
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(4, 1, 16, cp_sizes=(1, 2), tail_multiple=1)
GOOD = (PlanOp(0, 2, (0,)), PlanOp(2, 1, (1, 2)), PlanOp(3, 1))
SEQLENS = [20, 6, 10]


def plan_of(*ops: PlanOp, op_group=()) -> Plan:
    return Plan.from_ops(LAYOUT, SEQLENS, ops, op_group=op_group)


def test_a_good_plan_passes():
    validate(plan_of(*GOOD), equal_count=True, max_sequences_per_microbatch=2)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((*GOOD[:1], PlanOp(2, 1, (1,)), PlanOp(3, 1)), r"sequence 2 \(10 tokens\) is in no microbatch"),
        ((*GOOD, PlanOp(3, 1, (2,))), r"sequence 2 is placed 2 times: in op 1 \(rank 2\) and op 3 \(rank 3\)"),
        ((PlanOp(0, 2, (0,)), PlanOp(2, 1, (1, 2)), PlanOp(3, 1, (7,), (8,))), "holds sequence 7, there are 3"),
        (
            (PlanOp(0, 1, (0,)), PlanOp(1, 1), *GOOD[1:]),
            r"op 0 \(rank 0\) holds 20 tokens per rank, the limit is 16",
        ),
        ((PlanOp(0, 1), PlanOp(1, 2, (0,)), PlanOp(3, 1, (1, 2))), "starts at rank 1, which is no multiple"),
        ((PlanOp(0, 4, (0,)), *GOOD[1:]), r"has CP size 4, allowed are \[1, 2\]"),
        ((*GOOD, PlanOp(4, 1)), r"op 3 \(rank 4\) lies outside the 4 ranks"),
        (GOOD[:2], "rank 3 has no microbatch"),
        ((PlanOp(0, 2, (0,), (18,)), *GOOD[1:]), "pads sequence 0 to 18 tokens; it has 20"),
        ((PlanOp(0, 2, (0,), (22,)), *GOOD[1:]), "needs a multiple of 4"),
    ],
)
def test_each_constraint_is_named(ops, message):
    with pytest.raises(ScheduleError, match=message):
        validate(plan_of(*ops))


def test_unequal_counts_are_refused_only_when_asked():
    plan = plan_of(*GOOD, PlanOp(3, 1))
    validate(plan)
    with pytest.raises(ScheduleError, match="rank 3 has 2 microbatches, rank 0 has 1"):
        validate(plan, equal_count=True)


def test_counts_must_be_a_multiple():
    with pytest.raises(ScheduleError, match="rank 0 has 1 microbatches, which is no multiple of 2"):
        validate(plan_of(*GOOD), microbatches_multiple=2)


def test_too_many_sequences():
    with pytest.raises(ScheduleError, match=r"op 1 \(rank 2\) holds 2 sequences, the limit is 1"):
        validate(plan_of(*GOOD), max_sequences_per_microbatch=1)


def test_barrier_groups_do_not_go_back():
    with pytest.raises(ScheduleError, match="barrier group 0 after group 1"):
        validate(plan_of(*GOOD, op_group=[0, 1, 0]))


def test_crossed_queues_are_a_deadlock_with_the_circle_named():
    first, size = np.array([0, 0]), np.array([2, 2])
    assert execution_order(first, size, [[1, 0], [1, 0]]).tolist() == [1, 0]
    with pytest.raises(ScheduleError, match=r"rank 0 waits in op 0 .*rank 1 waits in op 1 .*for rank 0"):
        execution_order(first, size, [[0, 1], [1, 0]])


def test_a_circle_of_three_leaves_out_the_rank_that_only_waits_for_it():
    first, size = np.array([0, 2, 4, 0]), np.array([4, 4, 2, 6])
    queues = [[0, 3], [0, 3], [1, 0, 3], [1, 0, 3], [2, 1, 3], [3, 2, 1]]
    with pytest.raises(ScheduleError, match="deadlock") as info:
        execution_order(first, size, queues)
    # Rank 4 waits for 5 in op 2, rank 5 for rank 0 in op 3, rank 0 for rank 2 in op 0, rank 2 for rank 4 in op 1.
    assert all(f"rank {r} waits" in str(info.value) for r in (0, 2, 4, 5))


@pytest.mark.parametrize(
    ("queues", "message"),
    [
        ([[0], []], "rank 1 does not run it"),
        ([[0, 0], [0]], "rank 0 queues op 0 twice"),
        ([[0], [0], [0]], "rank 2 runs it"),
        ([[0, 1], [0]], "rank 0 queues op 1, the plan has 1"),
    ],
)
def test_queues_that_do_not_fit_the_ops(queues, message):
    with pytest.raises(ScheduleError, match=message):
        execution_order(np.array([0]), np.array([2]), queues)
