"""Random batches through megatron-core's hybrid CP scheduler and through this one: the same groups, or both refuse.

2,000 examples; ``TDP_DIFFERENTIAL_EXAMPLES=50000`` for more.
"""

from __future__ import annotations

import importlib
import os
import warnings

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import schedule, validate
from tdp_megatron.schedule.hybrid_cp import first_ranks, hybrid_blocks
from tdp_megatron.schedule.megatron import BalancedCPScheduler
from tdp_megatron.schedule.problem import pack_token_cap
from tdp_megatron.types import ParallelLayout

EXAMPLES = int(os.environ.get("TDP_DIFFERENTIAL_EXAMPLES", "2000"))
SETTINGS = {
    "deadline": None,
    "database": None,
    # The same examples in every run of the default size, others in long runs.
    "derandomize": "TDP_DIFFERENTIAL_EXAMPLES" not in os.environ,
    "suppress_health_check": list(HealthCheck),
}


class Group:
    """All that Megatron asks of a process group here."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks


@pytest.fixture(scope="module")
def theirs(megatron):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule")
        except ModuleNotFoundError:
            pytest.skip(f"megatron-core {megatron.version} has no hybrid CP scheduler")
    return module.BalancedCPScheduler


@st.composite
def batches(draw):
    """Lengths, cap and ranks: also more tokens than the ranks hold, and ranks that are no power of two."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 8, 10, 12, 14, 16, 16, 32]))
    cap = draw(st.sampled_from([7, 16, 64, 100, 1000]))
    longest = max(int(cap * num_ranks * draw(st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.0, 1.1]))), 2)
    length = draw(
        st.sampled_from(
            [
                st.integers(1, longest),
                st.one_of(st.integers(1, min(cap, longest)), st.integers(1, longest)),
                st.sampled_from([longest, max(longest // 2, 1), max(longest // 3, 1), min(cap, longest), 1]),
                st.floats(0.0, 1.0).map(lambda x: max(int(longest * x**6), 1)),
            ]
        )
    )
    return draw(st.lists(length, min_size=1, max_size=60)), cap, num_ranks


@settings(max_examples=EXAMPLES, **SETTINGS)
@given(batch=batches())
@example(batch=([112, 112], 100, 10))
@example(batch=([264], 64, 6))
@example(batch=([25, 536, 389, 799, 277], 128, 12))
def test_groups_equal_those_of_megatron_core(theirs, batch):
    seqlens, cap, num_ranks = batch
    samples = [(1000 + i, seqlen) for i, seqlen in enumerate(seqlens)]
    ours = BalancedCPScheduler(cap, Group(num_ranks))
    peer = theirs(cap, Group(num_ranks))
    assert [ours.gpus_needed(s) for s in seqlens] == [peer.gpus_needed(s) for s in seqlens]
    assert [ours.get_total_workload(s) for s in seqlens] == [peer.get_total_workload(s) for s in seqlens]
    try:
        expected = peer.get_groups_and_subsamples(samples, None)
    except (AssertionError, IndexError):
        with pytest.raises(ScheduleError, match=r"sequence \d+ "):
            ours.get_groups_and_subsamples(samples, None)
        return
    lengths, ids = ours.get_groups_and_subsamples(samples, None)
    blocks = hybrid_blocks(seqlens, cap, num_ranks)
    assert lengths == [[[seqlens[i - 1000] for i in rank] for rank in group] for group in ids]
    for group, placed in enumerate(blocks):
        assert [[1000 + i for i in b.sample_ids] for b in placed for _ in range(b.cp_size)] == expected[1][group]
        if all(first % block.cp_size == 0 for first, block in first_ranks(placed)):
            assert (lengths[group], ids[group]) == (expected[0][group], expected[1][group])
        else:
            assert all(ids[group].index(rank) % ids[group].count(rank) == 0 for rank in ids[group])
            assert sorted(ids[group]) == sorted(expected[1][group])


def can_run(groups, seqlens, layout):
    """Whether every sample has aligned ranks of an allowed CP size, and fits under their cap when padded."""
    for group in groups:
        for sample_id in {i for rank in group for i in rank}:
            ranks = [rank for rank, ids in enumerate(group) if sample_id in ids]
            k = len(ranks)
            if k not in layout.cp_sizes or ranks != list(range(ranks[0], ranks[0] + k)) or ranks[0] % k:
                return False
            padded = layout.padded_seqlen(seqlens[sample_id], k)
            if layout.tokens_per_rank(padded, k) > layout.tokens_per_rank_limit:
                return False
    return True


@settings(max_examples=EXAMPLES // 2, **SETTINGS)
@given(batch=batches(), widest=st.sampled_from([4, 32, 32]), tail=st.sampled_from([1, 1, 2, 4]))
def test_plans_are_those_of_megatron_core_exactly_where_these_can_be_run(theirs, batch, widest, tail):
    seqlens, cap, num_ranks = batch
    sizes = tuple(k for k in (1, 2, 4, 8, 16, 32) if num_ranks % k == 0 and k <= widest)
    layout = ParallelLayout(num_ranks, 1, cap, cp_sizes=sizes, tail_multiple=tail)
    arguments = {"seqlens": seqlens, "layout": layout, "algorithm": "balanced_hybrid_cp"}
    if max(seqlens) > max(pack_token_cap(layout, k) for k in sizes):
        for strict in (True, False):
            with pytest.raises(ScheduleError, match=r"sequence \d+ has \d+ tokens, the limit is"):
                schedule(**arguments, strict=strict)
        return
    plan = schedule(**arguments)
    validate(plan)
    try:
        _, expected = theirs(cap, Group(num_ranks)).get_groups_and_subsamples(list(enumerate(seqlens)), None)
    except (AssertionError, IndexError):
        expected = None
    if expected is None or not can_run(expected, seqlens, layout):
        with pytest.raises(ScheduleError, match=r"sequence \d+ .*ranks? \d|sequence \d+ runs on"):
            schedule(**arguments, strict=True)
        return
    assert schedule(**arguments, strict=True) == plan
    got = [[[] for _ in range(num_ranks)] for _ in expected]
    for op, group in zip(plan.ops, plan.op_group.tolist(), strict=True):
        for rank in op.ranks:
            got[group][rank].extend(op.sample_ids)
    assert got == expected
