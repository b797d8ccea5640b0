"""``Plan``: what it derives from its ops, when two are equal, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tdp_megatron.schedule import CostModel, Plan, PlanOp, imbalance, rank_costs
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(2, 2, 64, cp_sizes=(1, 2, 4), tail_multiple=4)
SEQLENS = [5, 9, 30, 0, 7]


def make_plan(**changes) -> Plan:
    ops = [
        PlanOp(0, 4, (2,)),
        PlanOp(0, 2, (0, 3)),
        PlanOp(2, 1, (1, 4)),
        PlanOp(3, 1),
    ]
    return Plan.from_ops(
        changes.get("layout", LAYOUT), changes.get("seqlens", SEQLENS), changes.get("ops", ops), algorithm="by hand"
    )


def test_lengths_are_padded_for_the_cp_size_and_tokens_have_a_tail():
    plan = make_plan()
    assert [op.padded_lengths for op in plan.ops] == [(32,), (8, 0), (9, 7), ()]
    assert plan.op_tokens_per_rank.tolist() == [8, 4, 16, 4]
    assert [op.tokens_per_rank(LAYOUT) for op in plan.ops] == plan.op_tokens_per_rank.tolist()
    assert [op.is_dummy for op in plan.ops] == [False, False, False, True]
    assert list(plan.ops[0].ranks) == [0, 1, 2, 3]


def test_every_rank_sees_its_ops_in_order():
    plan = make_plan()
    assert [plan.rank_ops(rank).tolist() for rank in range(4)] == [[0, 1], [0, 1], [0, 2], [0, 3]]
    assert [plan.num_microbatches(rank) for rank in range(4)] == [2, 2, 2, 2]
    assert plan.num_microbatches_per_rank.tolist() == [2, 2, 2, 2]


def test_locate_inverts_the_plan():
    plan = make_plan()
    assert [plan.locate(i) for i in range(5)] == [(0, 1, 0), (2, 1, 0), (0, 0, 0), (0, 1, 8), (2, 1, 9)]


@pytest.mark.parametrize("sample_id", [-1, 5])
def test_locate_refuses_an_unknown_sequence(sample_id):
    with pytest.raises(KeyError, match="5 sequences"):
        make_plan().locate(sample_id)


def test_equality_and_digest_follow_the_content():
    plan, same = make_plan(), make_plan()
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan.digest() == same.digest()
    moved = make_plan(ops=[PlanOp(0, 4, (2,)), PlanOp(0, 2, (3, 0)), PlanOp(2, 1, (1, 4)), PlanOp(3, 1)])
    longer = make_plan(seqlens=[6, 9, 30, 0, 7])
    wider = make_plan(layout=ParallelLayout(2, 2, 128, cp_sizes=(1, 2, 4), tail_multiple=4))
    assert len({p.digest() for p in (plan, moved, longer, wider)}) == 4
    assert plan not in (moved, longer, wider)


def test_the_digest_is_pinned():
    """Ranks that run different versions compare digests: a change of format must be deliberate."""
    assert make_plan().digest() == "5705dce894619d7ba098c52eaf10f66b924d3e0164feb94bd0ee0b97c6dc9a23"


def test_arrays_are_read_only_and_own_their_data():
    lengths = np.array(SEQLENS)
    plan = make_plan(seqlens=lengths)
    lengths[0] = 99
    assert plan.seqlens[0] == 5
    with pytest.raises(ValueError, match="read-only"):
        plan.sample_ids[0] = 1


def test_pickle_keeps_the_plan():
    plan = make_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_arrays_and_ops_make_the_same_plan():
    plan = make_plan()
    again = Plan.from_packs(LAYOUT, plan.seqlens, plan.op_first_rank, plan.op_cp_size, plan.op_offsets, plan.sample_ids)
    assert again == plan


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"op_cp_size": [1, 1]}, ValueError, "op_cp_size has 2 entries, expected 1"),
        ({"op_cp_size": [0]}, ValueError, "at least 1, got 0"),
        ({"op_offsets": [0, 1]}, ValueError, "rise from 0 to 2"),
        ({"op_offsets": [1, 2]}, ValueError, "rise from 0 to 2"),
        ({"sample_ids": [0.0, 1.0]}, TypeError, "must hold integers"),
        ({"sample_ids": [[0, 1]]}, ValueError, "one dimension"),
        ({"sample_ids": [0, 2]}, ValueError, r"in \[0, 2\)"),
    ],
)
def test_malformed_arrays_are_refused(changes, error, message):
    arrays = {"op_first_rank": [0], "op_cp_size": [1], "op_offsets": [0, 2], "sample_ids": [0, 1]}
    with pytest.raises(error, match=message):
        Plan.from_packs(ParallelLayout(1), np.array([3, 4]), **{**arrays, **changes})


def test_rank_ops_refuses_a_rank_outside_the_layout():
    with pytest.raises(ValueError, match="rank 4 is outside the 4 ranks"):
        make_plan().rank_ops(4)


def test_costs_follow_the_formula():
    cost = CostModel(a=2.0, b=0.5, c0=1.0)
    plan = make_plan()
    assert cost.plan_costs(plan).tolist() == [1 + 16 + 0.5 * 1024 / 4, 1 + 8 + 0.5 * 64 / 2, 1 + 32 + 0.5 * 130, 1 + 8]
    assert rank_costs(plan, cost).tolist() == [145 + 25, 145 + 25, 145 + 98, 145 + 9]
    assert imbalance(plan, cost) == pytest.approx(243 / ((170 + 170 + 243 + 154) / 4))


def test_communication_hides_under_attention_until_it_is_longer():
    slow = CostModel(a=0.0, b=0.5, layers=2, kv_bytes=10.0, latency=1.0, bandwidth=5.0, internode_bandwidth=1.0)
    plan = make_plan()
    # Ring exchange: 3 * layers * (k - 1) * (latency + T * kv_bytes / bandwidth).
    assert slow.plan_costs(plan)[0] == max(128.0, 3 * 2 * 3 * (1.0 + 8 * 10.0 / 5.0))
    assert slow.plan_costs(plan)[2] == 65.0


def test_a_sliding_window_bounds_attention():
    assert CostModel(a=0.0, b=1.0, window=8).sequence_cost(100) == 100 * 16
    assert CostModel(a=0.0, b=1.0, window=8).sequence_cost(10) == 100


def test_microbatch_cost_equals_the_plan_of_it():
    cost = CostModel(a=2.0, b=0.5, c0=1.0)
    assert cost.microbatch_cost([5, 0], 2, LAYOUT) == cost.plan_costs(make_plan())[1]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"a": -1.0}, ValueError),
        ({"b": float("nan")}, ValueError),
        ({"c0": float("inf")}, ValueError),
        ({"a": "1"}, TypeError),
        ({"window": 10.5}, TypeError),
        ({"bandwidth": 0.0}, ValueError),
    ],
)
def test_a_cost_model_refuses_numbers_that_are_no_times(values, error):
    with pytest.raises(error):
        CostModel(**{"a": 1.0, "b": 1.0, **values})
