"""Exchanges that leave fewer tokens of padding: what they gain, and what they must not touch."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron import _C
from tdp_megatron.schedule import CostModel, Limits, Mode, Problem, preset, schedule, simulate, validate
from tdp_megatron.schedule.distributions import DISTRIBUTIONS, global_batch_seqlens
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, plan_of_ops, plan_of_placed_ops
from tdp_megatron.schedule.tails import fill_tails, fill_tails_reference
from tdp_megatron.types import ParallelLayout

COST = CostModel(a=1.0, b=0.0)


def exchanged(seqlens, ops: list[PlacedOp], layout, cost=COST, mode="pipeline(2)", **limits) -> list[list[int]]:
    problem = Problem(np.array(seqlens, dtype=np.int64), layout, cost, Mode.parse(mode), Limits(**limits))
    return [sorted(ids) for _, _, ids in fill_tails_reference(problem, ops)]


def held(plan) -> int:
    """Tokens of all ranks, tails and dummies included."""
    return int((plan.op_tokens_per_rank * plan.op_cp_size).sum())


def test_two_microbatches_swap_what_one_has_too_much():
    # 8 + 9 = 17 and 7 + 5 = 12: with 16 and 13 both hold 16.
    layout = ParallelLayout(1, 1, 64, tail_multiple=16)
    assert exchanged([8, 9, 8, 4], [(0, 1, [0, 1]), (0, 1, [2, 3])], layout) == [[0, 2], [1, 3]]


def test_a_short_sequence_moves_into_the_tail_of_a_wide_microbatch():
    layout = ParallelLayout(2, 1, 64, tail_multiple=16, cp_sizes=(1, 2))
    ops = [(0, 2, [0]), (0, 1, [1, 2]), (1, 1, [3])]
    assert exchanged([48, 14, 12, 16], ops, layout) == [[0, 1], [2], [3]]


def test_a_sequence_alone_gives_way_to_one_that_fills_its_tail():
    # The other rank takes longest: one that the step waits for must gain by a swap.
    layout = ParallelLayout(2, 1, 64, tail_multiple=16)
    ops: list[PlacedOp] = [(0, 1, [0]), (0, 1, [1, 2]), (1, 1, [3]), (1, 1, [4])]
    assert exchanged([30, 32, 20, 64, 64], ops, layout)[:2] == [[1], [0, 2]]


def test_what_the_step_waits_for_does_not_grow():
    # Attention makes the swap cost more than the tail it saves.
    layout = ParallelLayout(2, 1, 64, tail_multiple=16)
    ops: list[PlacedOp] = [(0, 1, [0, 1]), (1, 1, [2, 3])]
    before = [[0, 1], [2, 3]]
    lengths = [24, 9, 8, 20]
    assert exchanged(lengths, ops, layout, CostModel(a=1.0, b=0.0), "lockstep") != before
    steep = CostModel(a=0.0, b=1.0)
    problem = Problem(np.array(lengths, dtype=np.int64), layout, steep, Mode("lockstep"), Limits())
    after = fill_tails_reference(problem, ops)
    for op in after:
        assert sum(lengths[i] ** 2 for i in op[2]) <= 24**2 + 9**2


def test_the_limit_on_sequences_holds():
    layout = ParallelLayout(2, 1, 64, tail_multiple=16, cp_sizes=(1, 2))
    ops: list[PlacedOp] = [(0, 2, [0]), (0, 1, [1]), (1, 1, [3]), (0, 1, [2])]
    assert exchanged([48, 14, 12, 16], ops, layout, max_sequences_per_microbatch=1)[0] == [0]


def random_ops(rng: np.random.Generator) -> tuple[Problem, list[PlacedOp]]:
    """A batch of which the ops are laid out at random, waves of equal numbers on all ranks."""
    ranks = int(rng.choice([2, 4, 8]))
    sizes = tuple(k for k in (1, 2, 4, 8) if k <= ranks)
    tail = int(rng.choice([2, 16, 32]))
    layout = ParallelLayout(ranks, 1, 40 * tail, tail_multiple=tail, cp_sizes=sizes)
    lengths: list[int] = []
    ops: list[PlacedOp] = []
    for _ in range(int(rng.integers(1, 6))):
        first = 0
        while first < ranks:
            k = int(rng.choice([k for k in sizes if first % k == 0]))
            ids = []
            room = layout.tokens_per_rank_limit * k
            for _ in range(int(rng.integers(0, 5))):
                length = int(rng.integers(0, 12 * tail * k))
                if length + 2 * k > room:
                    break
                room -= length + 2 * k
                ids.append(len(lengths))
                lengths.append(length)
            ops.append((first, k, ids))
            first += k
    cost = CostModel(a=1e-4, b=10.0 ** rng.uniform(-8, -5), c0=1e-3)
    mode = Mode.parse(str(rng.choice(["free", "barrier", "lockstep", "pipeline(4)", "pipeline(3, 2)"])))
    limits = Limits(max_sequences_per_microbatch=int(rng.choice([0, 0, 4])))
    return Problem(np.array(lengths, dtype=np.int64), layout, cost, mode, limits), ops


def test_random_plans_hold_fewer_tokens_and_take_no_longer():
    saved = 0
    for case in range(300):
        problem, ops = random_ops(np.random.default_rng(case))
        after = fill_tails_reference(problem, ops)
        old, new = plan_of_placed_ops(problem, ops, "old"), plan_of_placed_ops(problem, after, "new")
        validate(new, max_sequences_per_microbatch=problem.limits.max_sequences_per_microbatch)
        if problem.mode.name in ("free", "barrier"):
            assert all(ids for _, _, ids in after)
            assert not [op for op in after if op[:2] not in {op[:2] for op in ops}]
        else:
            assert [op[:2] for op in after] == [op[:2] for op in ops]
        assert held(new) <= held(old), f"case {case}"
        steps = [simulate(plan, problem.cost, problem.mode).step_seconds for plan in (old, new)]
        assert steps[1] <= steps[0] * (1 + 1e-12), f"case {case}"
        saved += held(old) - held(new)
        native = fill_tails(
            problem,
            old.op_first_rank[: len(ops)],
            old.op_cp_size[: len(ops)],
            old.op_offsets[: len(ops) + 1],
            old.sample_ids,
        )
        expected = plan_of_placed_ops(problem, after, "native")
        assert plan_of_ops(problem, *native, "native").digest() == expected.digest(), f"case {case}"
    assert saved > 0


#: Most padding of the 70B model on 128 ranks; alone in their microbatches, reasoning traces keep their tails.
MOST = {
    "lockstep": {"github": 0.0035, "prolong": 0.0035, "reasoning": 0.003, "sft_chat": 0.001},
    "pipeline(4)": {"github": 0.0045, "prolong": 0.0045, "reasoning": 0.014, "sft_chat": 0.0045},
}


@pytest.mark.parametrize("data", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("mode", MOST)
def test_padding_with_sequence_parallelism(mode, data):
    layout = ParallelLayout(16, 8, 16_384, cp_sizes=tuple(1 << shift for shift in range(8)), sp=8)
    seqlens = global_batch_seqlens(data, 128 * 16_384 * 4, seed=0)
    cost = preset("llama-70b")
    assert simulate(schedule(seqlens, layout, cost, mode), cost, mode).padding <= MOST[mode][data]


def test_the_binding_refuses_what_would_be_unsafe():
    layout = ParallelLayout(2, 1, 64, cp_sizes=(1, 2))
    problem = Problem(np.array([3, 4], dtype=np.int64), layout, COST, Mode("lockstep"), Limits())

    def call(first, size, offsets, ids):
        arrays = (np.array(values, dtype=np.int64) for values in (first, size, offsets, ids))
        return _C.schedule_fill_tails(native_input(problem), True, False, 0.0, *arrays)

    call([0, 1], [1, 1], [0, 1, 2], [0, 1])
    for bad in (
        ([0, 2], [1, 1], [0, 1, 2], [0, 1]),
        ([0, -1], [1, 1], [0, 1, 2], [0, 1]),
        ([0, 1], [1, 3], [0, 1, 2], [0, 1]),
        ([0, 1], [1, 1], [0, 2, 1], [0, 1]),
        ([0, 1], [1, 1], [1, 1, 2], [0, 1]),
        ([0, 1], [1, 1], [0, 1, 2], [0, 2]),
        ([0, 1], [1, 1], [0, 1, 2], [1, 1]),
        ([0, 1], [1, 1], [0, 1, 2], [0]),
        ([0, 1], [1], [0, 1, 2], [0, 1]),
    ):
        with pytest.raises(ValueError, match="must|expected"):
            call(*bad)
