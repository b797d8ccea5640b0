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


def attention(hidden: int, heads: int, kv_heads: int, head: int) -> int:
    return hidden * head * (2 * heads + 2 * kv_heads)


def gated_mlp(hidden: int, width: int) -> int:
    return 3 * hidden * width


#: By preset: parameters that a token is multiplied with in the layers, and in the output head; heads * head dimension;
#: elements of K in one layer; layers; window. From the config.json of Llama-3.1-8B and -70B, Qwen3-1.7B and -30B-A3B,
#: Mistral-7B-v0.1 and DeepSeek-V2-Lite.
PUBLISHED = {
    "llama-8b": (
        32 * (attention(4096, 32, 8, 128) + gated_mlp(4096, 14336)),
        4096 * 128256,
        32 * 128,
        8 * 128,
        32,
        0,
    ),
    "llama-70b": (
        80 * (attention(8192, 64, 8, 128) + gated_mlp(8192, 28672)),
        8192 * 128256,
        64 * 128,
        8 * 128,
        80,
        0,
    ),
    "qwen-1.7b": (
        28 * (attention(2048, 16, 8, 128) + gated_mlp(2048, 6144)),
        2048 * 151936,
        16 * 128,
        8 * 128,
        28,
        0,
    ),
    "qwen-30b-a3b": (
        48 * (attention(2048, 32, 4, 128) + 8 * gated_mlp(2048, 768) + 2048 * 128),
        2048 * 151936,
        32 * 128,
        4 * 128,
        48,
        0,
    ),
    "mistral-7b": (
        32 * (attention(4096, 32, 8, 128) + gated_mlp(4096, 14336)),
        4096 * 32000,
        32 * 128,
        8 * 128,
        32,
        4096,
    ),
    # Q of 16 heads of 192; a latent of 512 and 64 rotary elements; K of 128 and V of 128 made from the latent; output.
    "deepseek-v2-lite": (
        27 * (2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048)
        + gated_mlp(2048, 10944)
        + 26 * (8 * gated_mlp(2048, 1408) + 2048 * 64),
        2048 * 102400,
        16 * (192 + 128) // 2,
        16 * (192 + 128) // 2,
        27,
        0,
    ),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_published_dimensions(name):
    layer_parameters, head, width, kv_width, layers, window = PUBLISHED[name]
    cost = preset(name)
    tp = 8 if name == "llama-70b" else 1
    assert (cost.layers, cost.window, cost.kv_bytes) == (layers, window, 4.0 * kv_width / tp)
    assert cost.b == pytest.approx(7 * width * layers / (tp * 989e12 * 0.5))
    # Their shares of the peak are assumptions.
    share = {"llama-70b": 0.45, "qwen-1.7b": 0.43, "qwen-30b-a3b": 0.3, "deepseek-v2-lite": 0.35}.get(name, 0.5)
    assert cost.a == pytest.approx(6 * (layer_parameters + head) / (tp * 989e12 * share), rel=0.005)


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
