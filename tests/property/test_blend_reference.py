"""The native blends against the rule written down with ``argmax``, which takes the first of equal values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron import _C

Draws = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

# Around the sizes at which another loop takes over or a vector is only partly filled.
sizes = st.one_of(st.integers(1, 40), st.sampled_from([15, 16, 17, 27, 28, 29, 31, 32, 33, 127, 128, 129, 255, 300]))
kinds = st.sampled_from(["random", "skewed", "integer", "equal", "some zero"])


def weights_of(kind: str, k: int, seed: int) -> npt.NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    if kind == "equal":
        return np.full(k, 1 / k)
    if kind == "integer":  # not normalised: products are exact, so ties abound
        return rng.integers(1, 4, k).astype(np.float64)
    weights = rng.random(k) ** (5 if kind == "skewed" else 1) + 1e-9
    if kind == "some zero":
        weights[rng.random(k) < 0.3] = 0.0
        weights[rng.integers(k)] = 1.0
    return weights / weights.sum()


def reference(weights: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], position: int, n: int) -> Draws:
    datasets, samples = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for j in range(n):
        chosen = int(np.argmax(weights * float(max(position + j, 1)) - counts.astype(np.float64)))
        datasets[j], samples[j] = chosen, counts[chosen]
        counts[chosen] += 1
    return datasets, samples


def exhaustive_reference(left: npt.NDArray[np.int64]) -> Draws:
    total = int(left.sum())
    weights = left / total
    counts = np.zeros(len(left), dtype=np.int64)
    datasets, samples = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    for j in range(total):
        deficits = np.where(counts < left, weights * max(j, 1) - counts, -np.inf)
        chosen = int(np.argmax(deficits))
        datasets[j], samples[j] = chosen, counts[chosen]
        counts[chosen] += 1
    return datasets, samples


@settings(deadline=None, max_examples=150)
@given(kinds, sizes, st.integers(0, 2**31), st.integers(0, 400), st.lists(st.integers(0, 1), max_size=3))
def test_draws_equal_the_rule(kind: str, k: int, seed: int, n: int, cuts: list[int]) -> None:
    weights = weights_of(kind, k, seed)
    ours = np.zeros(k, dtype=np.int64)
    theirs = ours.copy()
    position = 0
    for part in [n // 3, *cuts, n - n // 3]:  # parts of a sample or two take another way than long ones
        datasets, samples = _C.blend_continue(weights, ours, position, part)
        expected = reference(weights, theirs, position, part)
        np.testing.assert_array_equal(datasets, expected[0])
        np.testing.assert_array_equal(samples, expected[1])
        np.testing.assert_array_equal(ours, theirs)
        position += part


@pytest.mark.parametrize("start", [10**6, 2**40, 2**53 - 20, 2**53 + 5])
def test_draws_far_into_a_run(start: int) -> None:
    weights = weights_of("random", 64, 3)
    counts = np.floor(weights * start).astype(np.int64)
    expected = reference(weights, counts.copy(), start, 40)
    datasets, samples = _C.blend_continue(weights, counts, start, 40)
    np.testing.assert_array_equal(datasets, expected[0])
    np.testing.assert_array_equal(samples, expected[1])


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(
        st.lists(st.integers(0, 30), min_size=1, max_size=40),
        st.integers(1, 150).map(lambda k: [3] * k),
        st.integers(1, 60).map(lambda k: list(range(k))),
    )
)
def test_exhaustive_equals_the_rule(left: list[int]) -> None:
    array = np.array(left, dtype=np.int64)
    datasets, samples = _C.blend_exhaustive(array)
    expected: Any = exhaustive_reference(array) if array.sum() else (np.zeros(0), np.zeros(0))
    np.testing.assert_array_equal(datasets, expected[0])
    np.testing.assert_array_equal(samples, expected[1])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one dataset"):
        _C.blend_exhaustive(np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match=r"sizes\[1\] is -1"):
        _C.blend_exhaustive(np.array([1, -1]))
    with pytest.raises(ValueError, match=r"2\*\*53"):
        _C.blend_exhaustive(np.array([2**62, 2**62, 2**62]))
    with pytest.raises(TypeError):
        _C.blend_exhaustive(np.array([1.0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counts has 1 elements, expected 2"):
        _C.blend_continue(np.ones(2), np.zeros(1, dtype=np.int64), 0, 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [1, 27, 28, 33, 300])
def test_weights_that_are_no_numbers(k: int, wrong: float) -> None:
    weights = np.ones(k)
    weights[k // 2] = wrong
    with pytest.raises(ValueError, match=rf"weights\[{k // 2}\] is"):
        _C.blend_continue(weights, np.zeros(k, dtype=np.int64), 0, 10)
