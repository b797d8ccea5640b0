"""Is the order without an index as random as a shuffle, and its blend as even as can be?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.datasets.instant import InstantBlend, derive_key, permute

Int64Array = npt.NDArray[np.int64]


def order(size: int, seed: int) -> Int64Array:
    return permute(np.arange(size), size, derive_key("test", seed))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_each_exactly_once(size: int, key: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@settings(deadline=None, max_examples=50)
@given(st.integers(2**40, 2**62), st.integers(0, 2**64 - 1))
def test_large_ranges_are_left_by_nobody(size: int, key: int) -> None:
    places = np.unique(np.random.default_rng(key).integers(0, size, 2000))
    found = permute(places, size, key)
    assert len(np.unique(found)) == len(places)
    assert found.min() >= 0
    assert found.max() < size


def z_scores_of_serial_correlation(values: Int64Array) -> list[float]:
    """Correlation of an order with itself at several distances; about N(0, 1) each for a true shuffle."""
    centred = values - values.mean()
    return [
        float((centred[:-lag] * centred[lag:]).sum() / (centred**2).sum() * np.sqrt(len(values)))
        for lag in (1, 2, 3, 7, 16, 64)
    ]


@pytest.mark.parametrize("size", [4096, 5000, 65_536, 100_003])
def test_serial_correlation_is_that_of_a_shuffle(size: int) -> None:
    scores = np.array([z_scores_of_serial_correlation(order(size, seed)) for seed in range(40)])
    shuffled = np.array(
        [z_scores_of_serial_correlation(np.random.default_rng(seed).permutation(size)) for seed in range(40)]
    )
    # 240 draws of about N(0, 1): beyond 4.5 once in 600 such tests, and the seeds are fixed.
    for z in (scores, shuffled):
        assert np.abs(z).max() < 4.5
        assert 0.8 < z.std() < 1.2
        assert abs(z.mean()) < 0.3


@pytest.mark.parametrize("size", [4096, 10_000, 100_003])
def test_places_and_values_are_independent(size: int) -> None:
    # 16 x 16 boxes of (place, value): chi-square of 225 degrees of freedom, for every seed.
    boxes = 16
    statistics = []
    for seed in range(40):
        values = order(size, seed)
        counts = np.zeros((boxes, boxes))
        np.add.at(counts, (np.arange(size) * boxes // size, values * boxes // size), 1)
        expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / size
        statistics.append(float(((counts - expected) ** 2 / expected).sum()))
    degrees = (boxes - 1) ** 2
    z = (np.array(statistics) - degrees) / np.sqrt(2 * degrees)
    assert abs(z.mean()) < 0.6
    assert np.abs(z).max() < 4.5
    assert 0.6 < z.std() < 1.5


def test_steps_between_neighbours_are_uniform() -> None:
    # The differences of neighbouring values, taken modulo the size, fall evenly into 64 boxes.
    size = 1 << 16
    z = []
    for seed in range(40):
        steps = np.diff(order(size, seed)) % size
        counts = np.bincount(steps * 64 // size, minlength=64)
        z.append((float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) - 63) / np.sqrt(126))
    assert abs(np.mean(z)) < 0.6
    assert np.abs(z).max() < 4.5


def test_small_orders_reach_every_permutation_evenly() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(24_000):
        found = tuple(order(4, seed).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    statistic = sum((n - 1000) ** 2 / 1000 for n in counts.values())
    assert statistic < 60  # chi-square of 23 degrees of freedom: 49.7 once in a thousand


def test_keys_are_independent() -> None:
    first, second = order(100_003, 1), order(100_003, 2)
    assert np.sum(first == second) < 10  # 1 is expected
    centred = first - first.mean()
    correlation = (centred * (second - second.mean())).sum() / (centred**2).sum()
    assert abs(correlation) * np.sqrt(len(first)) < 4.5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60).filter(lambda weights: sum(weights) > 1e-3))
def test_every_dataset_is_within_one_sample_of_its_share(weights: list[float]) -> None:
    blend = InstantBlend(weights)
    n = min(blend.period, 20_000)
    # The beginning, and the seam between two periods.
    for begin in (0, max(blend.period - n // 2, 0)):
        datasets, samples = blend.locate(np.arange(begin, begin + n))
        before = blend.counts(begin)
        share = blend.shares / blend.period
        for i in range(len(weights)):
            counts = before[i] + np.cumsum(datasets == i)
            assert np.abs(counts - np.arange(begin + 1, begin + n + 1) * share[i]).max() < 1
            np.testing.assert_array_equal(samples[datasets == i], before[i] + np.arange(counts[-1] - before[i]))
        np.testing.assert_array_equal(blend.counts(begin + n), before + np.bincount(datasets, minlength=len(weights)))


def test_shares_are_the_weights() -> None:
    weights = np.random.default_rng(0).random(1000) ** 3
    blend = InstantBlend(weights.tolist())
    shares = blend.shares / blend.period
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=1.5e-6)  # one part in 720,720
    assert InstantBlend([2, 1]).period == 3
    assert InstantBlend([0, 3, 0]).shares.tolist() == [0, 1, 0]
    assert (InstantBlend([1e-12, 1.0]).shares > 0).all()
