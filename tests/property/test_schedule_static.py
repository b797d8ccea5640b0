"""Random batches on random layouts: every plan of a static algorithm keeps every constraint."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.schedule import CostModel, imbalance, rank_costs, schedule, validate
from tdp_megatron.types import ParallelLayout


@st.composite
def batches(draw):
    """Lengths that the layout can hold, the layout, and limits."""
    cp = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))
    tail = draw(st.sampled_from([1, 2, 16, 48]))
    layout = ParallelLayout(draw(st.integers(1, 12)), cp, draw(st.integers(max(tail, 2), 300)), tail_multiple=tail)
    unit = layout.pad_multiple(cp)
    longest = layout.tokens_per_rank_limit * cp // unit * unit
    length = st.one_of(
        st.integers(0, longest),
        st.sampled_from([0, 1, longest, max(longest - 1, 0), longest // 2, longest // 2 + 1]),
        st.integers(0, min(longest, 20)),
    )
    limits = {
        "equal_count": draw(st.booleans()),
        "microbatches_multiple": draw(st.integers(1, 3)),
        "max_sequences_per_microbatch": draw(st.sampled_from([0, 0, 1, 3])),
    }
    return draw(st.lists(length, max_size=60)), layout, limits


@settings(max_examples=300, deadline=None)
@given(batches(), st.sampled_from(["dp_balanced", "lpt"]))
def test_static_plans_keep_every_constraint(batch, algorithm):
    seqlens, layout, limits = batch
    plan = schedule(seqlens, layout, algorithm=algorithm, **limits)
    validate(plan, **limits)
    cost = CostModel(a=1e-4, b=1e-8, c0=1e-3)
    assert 1.0 <= imbalance(plan, cost) <= layout.num_ranks + 1e-9
    assert rank_costs(plan, cost).min() > 0


@settings(max_examples=100, deadline=None)
@given(batches())
def test_locate_finds_every_sequence_where_the_ops_say(batch):
    seqlens, layout, limits = batch
    plan = schedule(seqlens, layout, algorithm="lpt", **limits)
    found = 0
    for rank in range(0, layout.num_ranks, layout.cp):
        for microbatch, op in enumerate(plan.rank_ops(rank).tolist()):
            offset = 0
            for sample_id, padded in zip(plan.ops[op].sample_ids, plan.ops[op].padded_lengths, strict=True):
                assert plan.locate(sample_id) == (rank, microbatch, offset)
                offset += padded
                found += 1
    assert found == len(seqlens)
