"""Cost models by name, from dimensions and from measurements."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.schedule import PRESETS, CostModel, cost_from_dimensions, fit_cost, preset


def test_presets_place_the_crossover_of_linear_and_quadratic_work():
    crossover = {name: cost.a / cost.b for name, cost in PRESETS.items()}
    assert crossover["llama-8b"] == pytest.approx(49_000, rel=0.01)
    assert crossover["llama-70b"] == pytest.approx(101_000, rel=0.01)
    assert crossover["qwen-1.7b"] == pytest.approx(30_000, rel=0.01)
    assert PRESETS["mistral-7b"].window == 4096
    assert set(PRESETS) >= {"qwen-30b-a3b", "deepseek-v2-lite"}
    assert preset("llama-8b") is PRESETS["llama-8b"]
    with pytest.raises(ValueError, match=r"'gpt-5'; known are deepseek-v2-lite, .*qwen-30b-a3b"):
        preset("gpt-5")


def test_dimensions_give_the_published_flops():
    cost = cost_from_dimensions(
        active_parameters=1e9, attention_width=1024, layers=10, kv_width=256, tp=2, peak_flops=1e12, mfu_linear=1.0
    )
    assert cost.a == 6e9 / 2e12
    assert cost.b == 7 * 1024 * 10 / 1e12
    assert cost.kv_bytes == 2 * 256 * 2 / 2
    assert cost.layers == 10


def test_linear_attention_has_no_quadratic_part():
    cost = cost_from_dimensions(
        active_parameters=1e9, attention_width=1024, layers=10, kv_width=256, linear_attention=True
    )
    assert cost.b == 0.0


@pytest.mark.parametrize("name", ["active_parameters", "tp", "mfu_attention", "peak_flops"])
def test_dimensions_must_be_positive(name):
    good = {"active_parameters": 1e9, "attention_width": 1024, "layers": 10, "kv_width": 256}
    with pytest.raises(ValueError, match=name):
        cost_from_dimensions(**{**good, name: 0})


def grid(cost: CostModel) -> tuple[np.ndarray, ...]:
    tokens = np.array([1024, 2048, 4096, 8192, 8192, 8192, 4096])
    lengths = np.array([512, 2048, 1024, 8192, 1024, 16384, 8192])
    sizes = np.array([1, 1, 1, 1, 1, 2, 2])
    squares = (tokens * sizes // lengths) * lengths.astype(float) ** 2
    return tokens, squares, sizes, cost.op_costs(tokens, squares, sizes)


@pytest.mark.parametrize(
    "cost", [CostModel(a=9e-5, b=1.9e-9, c0=5e-3), CostModel(a=9e-5, b=0.0, c0=0.0), CostModel(a=0.0, b=1e-9, c0=1e-3)]
)
def test_fit_finds_the_coefficients(cost):
    found = fit_cost(*grid(cost))
    assert found.a == pytest.approx(cost.a, abs=1e-12)
    assert found.b == pytest.approx(cost.b, abs=1e-16)
    assert found.c0 == pytest.approx(cost.c0, abs=1e-9)


def test_fit_of_noisy_times_is_close_and_never_negative():
    truth = CostModel(a=9e-5, b=1.9e-9, c0=0.0)
    tokens, squares, sizes, seconds = (np.tile(column, 50) for column in grid(truth))
    noisy = seconds * np.random.default_rng(0).lognormal(0.0, 0.05, len(seconds))
    found = fit_cost(tokens, squares, sizes, noisy)
    assert found.a == pytest.approx(truth.a, rel=0.05)
    assert found.b == pytest.approx(truth.b, rel=0.1)
    assert min(found.a, found.b, found.c0) >= 0.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1, 4], [1, 1], [1.0, 2.0]), "at least 3 measurements, got 2"),
        (([1, 2, 3], [1, 4], [1, 1, 1], [1.0, 2.0, 3.0]), "one length"),
        (([1, 2, 3], [1, 4, 9], [1, 1, 1], [1.0, 0.0, 3.0]), "above 0"),
        (([1, 2, float("inf")], [1, 4, 9], [1, 1, 1], [1.0, 2.0, 3.0]), "finite"),
        (([8, 8, 8, 8], [64, 64, 64, 64], [1, 1, 1, 1], [1.0, 1.1, 1.0, 1.2]), "too alike"),
    ],
)
def test_fit_refuses_measurements_that_tell_nothing(columns, message):
    with pytest.raises(ValueError, match=message):
        fit_cost(*columns)
