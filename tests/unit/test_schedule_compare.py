"""``compare``, the padding that Megatron's algorithms pay, the bound in lockstep, and cost models as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tdp_megatron.schedule import CostModel, Mode, lower_bound, preset, schedule, simulate, validate
from tdp_megatron.schedule.bounds import lockstep_bound
from tdp_megatron.schedule.compare import compare, plan_as_run
from tdp_megatron.schedule.distributions import global_batch_seqlens
from tdp_megatron.types import ParallelLayout

COST = preset("llama-8b")
LAYOUT = ParallelLayout(2, 2, 4096, cp_sizes=(1, 2, 4), sp=4)


def test_megatrons_padding_is_added_before_its_own_algorithms() -> None:
    lengths = np.array([33, 100, 4001, 8192])
    for algorithm, unit in (("dp_balanced", 16), ("default_dynamic_cp", 32)):
        plan = plan_as_run(algorithm, lengths, LAYOUT, COST, Mode("free"))
        validate(plan)
        assert plan.seqlens.tolist() == lengths.tolist()
        padded = dict(zip(plan.sample_ids.tolist(), plan.padded_lengths.tolist(), strict=True))
        assert padded == {i: -(-int(n) // unit) * unit for i, n in enumerate(lengths)}
    plan = plan_as_run("waves", lengths, LAYOUT, COST, Mode("free"))
    assert plan == schedule(lengths, LAYOUT, COST, "free", "waves")


def test_padding_does_not_make_a_sequence_too_long() -> None:
    layout = ParallelLayout(1, 2, 1008, sp=3, tail_multiple=48)
    plan = plan_as_run("dp_balanced", np.array([2014]), layout, COST, Mode("free"))
    validate(plan)
    assert plan.padded_lengths.tolist() == [2016]


def test_each_result_stands_for_itself() -> None:
    lengths = np.array([9000, 100, 200])
    lpt, waves, hybrid = compare(lengths, LAYOUT, COST, "free", ["lpt", "waves", "balanced_hybrid_cp"])
    assert lpt.simulation is None
    assert re.search("sequence 0 has 9000 tokens, the limit is 8192", lpt.reason)
    assert waves.simulation is not None
    assert waves.simulation.ratio >= 1.0
    assert waves.cp_bytes == waves.simulation.cp_bytes(COST) > 0
    assert hybrid.simulation is not None
    assert hybrid.simulation.mode == Mode("barrier")


@pytest.mark.parametrize("seed", range(120))
def test_no_plan_is_below_the_bound_in_lockstep(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = ParallelLayout(int(rng.choice([2, 4, 8])), 2, 2048, cp_sizes=(1, 2, 4))
    lengths = np.minimum(rng.lognormal(5.5, 1.5, int(rng.integers(1, 80))).astype(np.int64), 8192)
    cost = COST if seed % 2 else CostModel(a=1e-6, b=1e-8, c0=1e-3, window=int(rng.choice([0, 64])))
    if seed % 4 > 1:
        # K and V go over a slow link, so that CP sizes trade time for ranks.
        slow = 10.0 ** rng.uniform(6, 10)
        cost = replace(cost, layers=4, kv_bytes=4096.0, node_ranks=2, bandwidth=4 * slow, internode_bandwidth=slow)
    bound = lockstep_bound(lengths, layout, cost)
    assert bound >= lower_bound(lengths, layout, cost)
    for algorithm in ("auto", "waves", "default_dynamic_cp"):
        plan = schedule(lengths, layout, cost, "lockstep", algorithm)
        assert simulate(plan, cost, "lockstep").step_seconds >= bound * (1 - 1e-12)


def test_one_long_sequence_bounds_the_step_in_lockstep() -> None:
    # Its wave takes 4096 / 2 * 1 s. Each rank can hold 2048 tokens then, and 2048 of the short ones are left for
    # another wave, spread over 4 ranks.
    cost = CostModel(a=1.0, b=0.0)
    layout = ParallelLayout(4, 1, 2048, cp_sizes=(1, 2), tail_multiple=1)
    lengths = np.array([4096] + [1] * 6144)
    assert lockstep_bound(lengths, layout, cost) == pytest.approx(2048 + 2048 / 4)
    quadratic = CostModel(a=1.0, b=1.0)
    # Quadratic work of the long one alone: nothing can fill the other ranks up to it.
    assert lockstep_bound(lengths, layout, quadratic) == pytest.approx(2048 + 4096 * 4096 / 2 + 2048 * 2 / 4)
    assert lockstep_bound([], layout, COST) == lower_bound([], layout, COST)
    assert lockstep_bound(lengths, layout, CostModel(a=0.0, b=0.0)) == 0.0


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        # On 4 ranks the long one takes 400 s there, then the others 8 * 16 s on all: less than 512 s on 2 ranks, with
        # the others beside it.
        (400.0, 400 + 8 * 16 / 4),
        (600.0, 512.0),
    ],
)
def test_exchange_that_outlasts_attention_bounds_the_step_in_lockstep(exchange: float, expected: float) -> None:
    slow = 3 * 3 * 512 / exchange
    cost = CostModel(
        a=0.0, b=2.0**-12, layers=1, kv_bytes=1.0, latency=0.0, node_ranks=2, bandwidth=1e9, internode_bandwidth=slow
    )
    layout = ParallelLayout(4, 1, 1024, cp_sizes=(1, 2, 4), tail_multiple=1)
    lengths = np.array([2048] + [256] * 8)
    assert lower_bound(lengths, layout, cost) == pytest.approx((1024 + 8 * 16) / 4)
    assert lockstep_bound(lengths, layout, cost) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("data", ["github", "sft_chat"])
def test_the_exchange_makes_the_bound_tighter(data: str) -> None:
    cost = preset("qwen-1.7b")
    layout = ParallelLayout(4, 8, 16_384, cp_sizes=(1, 2, 4, 8, 16, 32))
    lengths = global_batch_seqlens(data, 32 * 16_384 * 4, seed=1)
    step = simulate(schedule(lengths, layout, cost, "lockstep"), cost, "lockstep").step_seconds
    assert 1.025 * lower_bound(lengths, layout, cost) < lockstep_bound(lengths, layout, cost) <= step


def test_cost_models_as_json() -> None:
    for cost in (COST, preset("mistral-7b"), CostModel(a=1e-300, b=0.1 + 0.2)):
        assert CostModel.from_json(cost.to_json({"device": "H100"})) == cost
    assert json.loads(COST.to_json({"device": "H100"}))["notes"] == {"device": "H100"}
    assert CostModel.from_json(b'{"cost_model": {"a": 1, "b": 2}}') == CostModel(1, 2)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", ValueError, "not JSON"),
        (b"\xff", ValueError, "not JSON"),
        ("[1]", ValueError, "cost_model"),
        ('{"a": 1, "b": 2}', ValueError, "cost_model"),
        ('{"cost_model": {"a": 1, "c": 2}}', ValueError, "unknown name 'c'"),
        ('{"cost_model": {"a": 1}}', ValueError, "no 'b'"),
        ('{"cost_model": {"a": -1, "b": 1}}', ValueError, "a must be finite and not negative"),
        ('{"cost_model": {"a": NaN, "b": 1}}', ValueError, "a must be finite"),
        ('{"cost_model": {"a": "1", "b": 1}}', TypeError, "a must be a number"),
        ('{"cost_model": {"a": 1, "b": 1, "layers": 1.5}}', TypeError, "layers must be an int"),
    ],
)
def test_json_that_is_no_cost_model(text: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        CostModel.from_json(text)
