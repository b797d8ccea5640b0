"""Cost models from a model's dimensions, for models by name, and from measurements."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

from tdp_megatron.schedule.cost import CostModel

__all__ = ["PRESETS", "cost_from_dimensions", "fit_cost", "preset"]

#: Dense bfloat16 of one H100 SXM, FLOP per second.
H100_PEAK_FLOPS = 989e12
_BFLOAT16_BYTES = 2


def cost_from_dimensions(
    *,
    active_parameters: float,
    attention_width: int,
    layers: int,
    kv_width: int,
    tp: int = 1,
    window: int = 0,
    peak_flops: float = H100_PEAK_FLOPS,
    mfu_linear: float = 0.5,
    mfu_attention: float = 0.5,
    overhead_per_layer: float = 150e-6,
    linear_attention: bool = False,
) -> CostModel:
    """A cost model from what a model card says, forward and backward.

    Per token 6 FLOP for each active parameter. Attention takes, for each pair of tokens and layer, 4 FLOP per element
    of its width forward and 10 backward (Dao, FlashAttention-2, 2023), and the causal mask halves the pairs: 7.

    Args:
        active_parameters: parameters that one token is multiplied with: the output head included, the embedding,
            which is only looked up, not.
        attention_width: heads * head dimension; for unequal key and value dimensions (MLA) their mean.
        layers: of attention.
        kv_width: elements of K, and of V, of one token in one layer; for unequal dimensions their mean.
        tp: tensor-parallel size, which divides all of it.
        window: sliding attention window, tokens; 0 for full attention.
        peak_flops: of one device, FLOP per second.
        mfu_linear, mfu_attention: share of the peak that matrix products and attention reach.
        overhead_per_layer: seconds per microbatch and layer whatever it holds.
        linear_attention: attention costs nothing beyond its parameters.
    """
    for name, value in (
        ("active_parameters", active_parameters),
        ("attention_width", attention_width),
        ("layers", layers),
        ("tp", tp),
        ("peak_flops", peak_flops),
        ("mfu_linear", mfu_linear),
        ("mfu_attention", mfu_attention),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    return CostModel(
        a=6.0 * active_parameters / (tp * peak_flops * mfu_linear),
        b=0.0 if linear_attention else 7.0 * attention_width * layers / (tp * peak_flops * mfu_attention),
        c0=overhead_per_layer * layers,
        window=window,
        layers=layers,
        kv_bytes=2.0 * kv_width * _BFLOAT16_BYTES / tp,
    )


#: Dimensions by name, from the published configurations.
PRESETS: dict[str, CostModel] = {
    "llama-8b": cost_from_dimensions(active_parameters=7.5e9, attention_width=4096, layers=32, kv_width=1024),
    "llama-70b": cost_from_dimensions(
        active_parameters=69.5e9, attention_width=8192, layers=80, kv_width=1024, tp=8, mfu_linear=0.45
    ),
    "qwen-1.7b": cost_from_dimensions(
        active_parameters=1.72e9, attention_width=2048, layers=28, kv_width=1024, mfu_linear=0.43
    ),
    "qwen-30b-a3b": cost_from_dimensions(
        active_parameters=3.04e9, attention_width=4096, layers=48, kv_width=512, mfu_linear=0.3
    ),
    "mistral-7b": cost_from_dimensions(
        active_parameters=7.1e9, attention_width=4096, layers=32, kv_width=1024, window=4096
    ),
    # MLA: 16 heads, keys of 192 and values of 128, both made anew from the latent before attention.
    "deepseek-v2-lite": cost_from_dimensions(
        active_parameters=2.45e9, attention_width=2560, layers=27, kv_width=2560, mfu_linear=0.35
    ),
}


def preset(name: str) -> CostModel:
    """The cost model of a known model on H100; the names are those of ``PRESETS``."""
    if name not in PRESETS:
        raise ValueError(f"unknown cost preset {name!r}; known are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def fit_cost(
    tokens_per_rank: npt.ArrayLike,
    squares: npt.ArrayLike,
    cp_size: npt.ArrayLike,
    seconds: npt.ArrayLike,
) -> CostModel:
    """Least squares of ``c0 + a * T + b * Q / k`` on measured microbatches, relative to their time, none negative.

    Args:
        tokens_per_rank: [n], tokens each rank held.
        squares: [n], sum of the squared padded lengths, tokens^2.
        cp_size: [n], ranks that shared each microbatch.
        seconds: [n], forward and backward.

    Raises:
        ValueError: too few, not finite, or too alike measurements.
    """
    columns = [np.asarray(values, dtype=np.float64) for values in (tokens_per_rank, squares, cp_size, seconds)]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"measurements must be four flat arrays of one length, got {[c.shape for c in columns]}")
    tokens, square_sums, sizes, times = columns
    if len(times) < 3:
        raise ValueError(f"3 coefficients need at least 3 measurements, got {len(times)}")
    if not all(bool(np.all(np.isfinite(column))) for column in columns):
        raise ValueError("measurements must be finite")
    if float(times.min()) <= 0 or float(sizes.min()) < 1 or float(tokens.min()) < 0 or float(square_sums.min()) < 0:
        raise ValueError("seconds must be above 0, cp_size at least 1, tokens and squares not negative")
    design = np.stack([np.ones_like(times), tokens, square_sums / sizes], axis=1) / times[:, None]
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    scaled = design / scale
    if np.linalg.matrix_rank(scaled, tol=1e-9) < 3:
        raise ValueError("measurements are too alike to tell a, b and c0 apart: vary the lengths and their number")
    # Three unknowns: the best of all subsets without a negative one is the non-negative solution.
    best, best_error = np.zeros(3), float("inf")
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            solution, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(times)), rcond=None)
            error = float(((scaled[:, chosen] @ solution - 1.0) ** 2).sum())
            if float(solution.min()) >= 0.0 and error < best_error:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = solution
    c0, a, b = (best / scale).tolist()
    return CostModel(a=a, b=b, c0=c0)
