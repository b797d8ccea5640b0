"""Blend weights that change over training: how many samples each source should have given by now."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.blend import check_weights
from tdp_megatron.types import Int64Array

__all__ = ["CallableWeights", "PiecewiseLinearWeights", "WeightSchedule"]

Float64Array = npt.NDArray[np.float64]

# Weights of a function that are held at once: 2 MB as an array, ten times that as the function's lists.
_VALUES_AT_ONCE = 1 << 18

# Doubles count exactly up to here.
_EXACT = 2**53


class WeightSchedule:
    """Weights as a function of the global sample number; subclasses write ``fingerprint`` and ``weights``.

    A blend draws from the source that is furthest behind its *target*: the sum of its weights over all samples so
    far, that sample included. Targets are added up one by one, so that blocks of any size give the same bits, and a
    blend can go on from any of them.
    """

    #: Weights per sample.
    num_sources: int

    def fingerprint(self) -> Any:
        """A JSON value that differs where the weights do."""
        raise NotImplementedError

    def weights(self, begin: int, end: int) -> Float64Array:
        """Weights of the samples [begin, end), float64 [end - begin, k]: not negative, the sum of each row 1."""
        raise NotImplementedError

    def draw(
        self, begin: int, n: int, targets: Float64Array, counts: Int64Array, active: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], Int64Array]:
        """Which source gives each of the samples [begin, begin + n).

        Sources of weight 0 are left out, unless no active one has more; the first of equals is taken.

        Args:
            begin: first sample.
            n: samples.
            targets: float64 [k], targets before ``begin``, zeros at the start; updated.
            counts: int64 [k], samples drawn from each source before; updated.
            active: bool [k], sources that may be drawn from, at least one.

        Returns:
            sources int32 [n], and the running number of each sample in its source, int64 [n].

        Raises:
            ValueError: weights are not in [0, 1].
        """
        size = max(_VALUES_AT_ONCE // self.num_sources, 1)
        drawn = [
            _C.blend_weighted(self.weights(first, min(first + size, begin + n)), targets, counts, active)
            for first in range(begin, begin + n, size)
        ]
        if len(drawn) == 1:
            return drawn[0]
        empty = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))
        sources, numbers = (np.concatenate(column) for column in zip(empty, *drawn, strict=True))
        return sources, numbers


class PiecewiseLinearWeights(WeightSchedule):
    """Weights given at some sample numbers, on straight lines between them and constant outside.

    Args:
        points: (sample number, weights) in rising order, such as ``[(0, [0.9, 0.1]), (1_000_000, [0.5, 0.5])]``. The
            weights of each point are divided by their sum.

    Raises:
        ValueError: no points, numbers that do not rise from 0 on or reach 2**53, or bad weights.
        TypeError: a weight that is no number.
    """

    def __init__(self, points: Sequence[tuple[int, Sequence[float]]]) -> None:
        if not points:
            raise ValueError("weights over training need at least one point (sample number, weights)")
        numbers = [int(n) for n, _ in points]
        if numbers[0] < 0 or numbers[-1] >= _EXACT or any(b <= a for a, b in itertools.pairwise(numbers)):
            raise ValueError(f"the sample numbers of the points must rise from 0 on, below 2**53, got {numbers}")
        self.num_sources = len(points[0][1])
        names = _names(self.num_sources)
        self._numbers = np.array(numbers, dtype=np.float64)
        self._rows = _normalised(np.array([check_weights(list(w), names) for _, w in points], dtype=np.float64))

    def fingerprint(self) -> Any:
        return [[int(n), row] for n, row in zip(self._numbers.tolist(), self._rows.tolist(), strict=True)]

    def weights(self, begin: int, end: int) -> Float64Array:
        at = np.arange(begin, end, dtype=np.float64)
        if len(self._numbers) == 1:
            return np.repeat(self._rows, len(at), axis=0)
        # Not np.interp, which may round products and sums together where the processor can.
        slopes = np.diff(self._rows, axis=0) / np.diff(self._numbers)[:, None]
        here = np.clip(np.searchsorted(self._numbers, at, side="right") - 1, 0, len(slopes) - 1)
        weights: Float64Array = slopes[here] * (at - self._numbers[here])[:, None] + self._rows[here]
        weights[at < self._numbers[0]] = self._rows[0]
        weights[at >= self._numbers[-1]] = self._rows[-1]
        return weights

    def draw(
        self, begin: int, n: int, targets: Float64Array, counts: Int64Array, active: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], Int64Array]:
        return _C.blend_linear(self._numbers, self._rows, targets, counts, active, begin, n)


class CallableWeights(WeightSchedule):
    """Weights from a function of the global sample number; it must be deterministic and the same on every rank.

    Args:
        function: sample number -> weights, one per source; they are divided by their sum. It is called once for every
            sample, and for sample 0 when this is made.
        name: what states are compared by, since functions cannot be; None takes the function's own name.

    Raises:
        ValueError, TypeError: at a draw, weights of another number than those of sample 0, or bad ones; the message
            names the sample.
    """

    def __init__(self, function: Callable[[int], Sequence[float]], name: str | None = None) -> None:
        self._function = function
        self._name = name or getattr(function, "__qualname__", type(function).__name__)
        self.num_sources = len(function(0))

    def fingerprint(self) -> Any:
        return f"function {self._name}"

    def weights(self, begin: int, end: int) -> Float64Array:
        rows = [list(self._function(n)) for n in range(begin, end)]
        found = _as_weights(rows, self.num_sources)
        return _normalised(self._checked(rows, begin) if found is None else found)

    def _checked(self, rows: Sequence[Sequence[Any]], begin: int) -> Float64Array:
        names = _names(self.num_sources)
        checked = []
        for number, row in enumerate(rows, start=begin):
            try:
                checked.append(check_weights(row, names))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.fingerprint()}, sample {number}: {error}") from error
        return np.array(checked, dtype=np.float64).reshape(len(rows), self.num_sources)


def _names(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def _normalised(rows: Float64Array) -> Float64Array:
    """Rows divided by their sums, which are added up one by one: Python's and NumPy's own sums differ by version."""
    scaled: Float64Array = rows / np.cumsum(rows, axis=1)[:, -1:]
    return scaled


def _as_weights(rows: Sequence[Sequence[Any]], count: int) -> Float64Array | None:
    """Rows that are good weights at first sight, float64 [n, count]; None for a closer look."""
    if not rows or any(len(row) != count or not {float, int}.issuperset(map(type, row)) for row in rows):
        return None
    values = np.array(rows, dtype=np.float64)
    with np.errstate(over="ignore"):
        sums = values.sum(axis=1)
    return values if values.min() >= 0 and sums.min() > 0 and np.isfinite(sums).all() else None
