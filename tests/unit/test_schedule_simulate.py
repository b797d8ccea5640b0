"""The event model in four modes, deadlocks, noise, and what is derived from a simulated step."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, Plan, PlanOp, lower_bound, schedule, simulate
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(4, 1, 1000, cp_sizes=(1, 2), tail_multiple=1)
#: One second per token on each rank, nothing else.
LINEAR = CostModel(a=1.0, b=0.0)


def plan_of(*ops: tuple[int, int, int], groups=()) -> Plan:
    """(first rank, cp size, tokens per rank), one sequence each."""
    seqlens = [tokens * size for _, size, tokens in ops]
    made = [PlanOp(first, size, (i,)) for i, (first, size, _) in enumerate(ops)]
    return Plan.from_ops(LAYOUT, seqlens, made, op_group=groups)


#: Rank 0: 2 + 10; 1: 6 + 10; 2: 4 + 1; 3: 4 + 8.
PLAN = plan_of((0, 1, 2), (1, 1, 6), (2, 2, 4), (0, 2, 10), (2, 1, 1), (3, 1, 8), groups=[0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("mode", "seconds"),
    [
        ("free", 16.0),
        ("lockstep", 6.0 + 10.0),
        ("barrier", 6.0 + 10.0),
        ("pipeline(1)", 16.0),
        ("pipeline(4)", 16.0 + 3 * 10.0),
        ("pipeline(4, 2)", 16.0 + 1.5 * 10.0),
        ("pipeline", 46.0),
    ],
)
def test_step_of_each_mode(mode, seconds):
    assert simulate(PLAN, LINEAR, mode).step_seconds == seconds


def test_a_rank_waits_for_its_partner_when_free():
    result = simulate(PLAN, LINEAR)
    assert result.op_start.tolist() == [0, 0, 0, 6, 4, 4]
    assert result.busy.tolist() == [12, 16, 5, 12]
    assert result.idle.tolist() == [4, 0, 11, 4]
    assert result.imbalance == 16 / 11.25


def test_lockstep_starts_microbatches_together():
    assert simulate(PLAN, LINEAR, "lockstep").op_start.tolist() == [0, 0, 0, 6, 6, 6]


def test_a_barrier_costs_more_than_running_free():
    plan = plan_of((0, 1, 9), (1, 1, 1), (2, 1, 1), (3, 1, 1), (0, 1, 1), (1, 1, 9), groups=[0, 0, 0, 0, 1, 1])
    assert simulate(plan, LINEAR, "free").step_seconds == 10
    assert simulate(plan, LINEAR, "barrier").step_seconds == 18


def test_lockstep_with_a_rank_that_ends_early_is_a_deadlock():
    plan = plan_of((0, 2, 1), (2, 2, 1), (0, 2, 1))
    with pytest.raises(ScheduleError, match=r"rank 0 has 2 microbatches and waits .* rank 2, which has 1"):
        simulate(plan, LINEAR, "lockstep")


def test_lockstep_with_partners_at_different_microbatches_is_a_deadlock():
    plan = plan_of((0, 1, 1), (0, 2, 1), (2, 2, 1), (1, 1, 1), (2, 2, 1))
    assert simulate(plan, LINEAR, "free").step_seconds == 4
    with pytest.raises(ScheduleError, match="op 1 is microbatch 1 of rank 0 and 0 of rank 1"):
        simulate(plan, LINEAR, "lockstep")


def test_queues_in_another_order():
    crossed = [[3, 0], [3, 1], [2, 4], [2, 5]]
    assert simulate(PLAN, LINEAR, queues=crossed).step_seconds == 16
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits in op 1"):
        simulate(
            plan_of((0, 2, 1), (0, 2, 1), (2, 1, 1), (3, 1, 1), (0, 1, 1)),
            LINEAR,
            queues=[[1, 0, 4], [0, 1], [2], [3]],
        )


def test_noise_is_repeatable_and_has_mean_one():
    seqlens = np.full(4000, 10)
    plan = schedule(seqlens, ParallelLayout(1, 1, 10, tail_multiple=1), LINEAR, algorithm="dp_balanced")
    one, two, other = (simulate(plan, LINEAR, noise=0.5, seed=seed).step_seconds for seed in (1, 1, 2))
    assert one == two != other
    assert one == pytest.approx(40000, rel=0.05)
    assert one != 40000
    for noise in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="noise"):
            simulate(plan, LINEAR, noise=noise)


def test_padding_counts_sequences_and_tails_but_not_dummies():
    layout = ParallelLayout(2, 1, 64, tail_multiple=16)
    plan = Plan.from_ops(layout, [20], [PlanOp(0, 1, (0,)), PlanOp(1, 1)])
    result = simulate(plan, LINEAR)
    assert result.padding == 1 - 20 / 32
    assert result.peak_tokens == 32


def test_bytes_moved():
    cost = CostModel(a=1.0, b=0.0, layers=2, kv_bytes=4.0)
    plan = plan_of((0, 2, 2), (2, 1, 3))
    # Two ranks send 2 tokens of 4 bytes to one partner, in 2 layers, three times.
    assert simulate(plan, cost).cp_bytes(cost) == 3 * 2 * 4 * 2 * 1 * 2
    # Sequence 0 is read by rank 0, so half of it moves; sequence 1 by rank 1, so all of it does.
    assert simulate(plan, cost).reroute_bytes == (2 + 3) * 32


def test_the_trace_has_one_event_per_rank_and_op():
    trace = json.loads(json.dumps(simulate(PLAN, LINEAR).chrome_trace()))
    events = trace["traceEvents"]
    assert len(events) == int(PLAN.op_cp_size.sum())
    assert {event["tid"] for event in events} == {0, 1, 2, 3}
    late = next(event for event in events if event["args"]["op"] == 3)
    assert (late["ts"], late["dur"], late["cat"]) == (6e6, 10e6, "cp2")


def test_lower_bound_by_area_and_by_the_longest_sequence():
    cost = CostModel(a=2.0, b=0.5, c0=3.0)
    layout = ParallelLayout(4, 1, 8, cp_sizes=(1, 2, 4), tail_multiple=1)
    assert lower_bound([8] * 8, layout, cost) == (2 * 64 + 0.5 * 8 * 64) / 4 + 3 * 2
    assert lower_bound([24, 1, 1], layout, cost) == (2 * 26 + 0.5 * 578) / 4 + 3
    assert lower_bound([], layout, cost) == 3
    with pytest.raises(ScheduleError, match="limit is 32"):
        lower_bound([33], layout, cost)


def test_lower_bound_holds_when_ranks_have_different_counts():
    """12 tokens need more than one pack of 10 on average, yet no rank needs two on both."""
    cost = CostModel(a=1.0, b=0.0, c0=100.0)
    layout = ParallelLayout(2, 1, 10, tail_multiple=1)
    plan = Plan.from_ops(layout, [10, 1, 1], [PlanOp(0, 1, (0,)), PlanOp(1, 1, (1, 2))])
    assert lower_bound([10, 1, 1], layout, cost) <= simulate(plan, cost).step_seconds == 110


def test_lower_bound_uses_the_largest_cp_size_for_the_longest_alone():
    cost = CostModel(a=1.0, b=1.0)
    layout = ParallelLayout(8, 1, 100, cp_sizes=(1, 2), tail_multiple=1)
    assert lower_bound([100], layout, cost) == (100 + 10000) / 2
