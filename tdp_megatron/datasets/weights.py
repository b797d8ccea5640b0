"""Blend weights that change over training: how many samples each source should have given by now."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.datasets.blend import check_weights

__all__ = ["CallableWeights", "PiecewiseLinearWeights", "WeightSchedule"]

Float64Array = npt.NDArray[np.float64]


class WeightSchedule:
    """Weights as a function of the global sample number.

    A blend draws from the source that is furthest behind its *target*: the sum of its weights over all samples so
    far. Targets are a pure function of the sample number, so a blend can go on from any of them.
    """

    num_sources: int

    def fingerprint(self) -> Any:
        """A JSON value that differs where the weights do."""
        raise NotImplementedError

    def weights(self, begin: int, end: int) -> Float64Array:
        """Normalised weights of the samples [begin, end), float64 [end - begin, k]."""
        raise NotImplementedError

    def targets(self, begin: int, end: int, before: Float64Array) -> Float64Array:
        """Targets when each of the samples [begin, end) is drawn, that sample included, float64 [end - begin, k].

        Added up one by one, so that blocks of any size give the same bits.

        Args:
            begin: first sample.
            end: one past the last.
            before: float64 [k], targets before ``begin``; zeros at the start.
        """
        summed: Float64Array = np.cumsum(np.vstack([before, self.weights(begin, end)]), axis=0)[1:]
        return summed


class PiecewiseLinearWeights(WeightSchedule):
    """Weights given at some sample numbers, on straight lines between them and constant outside.

    Args:
        points: (sample number, weights) in rising order, such as ``[(0, [0.9, 0.1]), (1_000_000, [0.5, 0.5])]``.

    Raises:
        ValueError: no points, numbers that do not rise, or bad weights.
    """

    def __init__(self, points: Sequence[tuple[int, Sequence[float]]]) -> None:
        if not points:
            raise ValueError("weights over training need at least one point (sample number, weights)")
        numbers = [int(n) for n, _ in points]
        if numbers[0] < 0 or any(b <= a for a, b in itertools.pairwise(numbers)):
            raise ValueError(f"the sample numbers of the points must rise from 0 on, got {numbers}")
        self.num_sources = len(points[0][1])
        rows = [check_weights(list(w), [str(i) for i in range(self.num_sources)]) for _, w in points]
        self._numbers = np.array(numbers, dtype=np.float64)
        self._rows = np.array([[v / sum(row) for v in row] for row in rows], dtype=np.float64)

    def fingerprint(self) -> Any:
        return [[int(n), row] for n, row in zip(self._numbers.tolist(), self._rows.tolist(), strict=True)]

    def weights(self, begin: int, end: int) -> Float64Array:
        at = np.arange(begin, end, dtype=np.float64)
        columns = [np.interp(at, self._numbers, self._rows[:, i]) for i in range(self.num_sources)]
        return np.stack(columns, axis=1)


class CallableWeights(WeightSchedule):
    """Weights from a function of the global sample number; it must be deterministic and the same on every rank.

    Args:
        function: sample number -> weights.
        name: what states are compared by, since functions cannot be; None takes the function's own name.
    """

    def __init__(self, function: Callable[[int], Sequence[float]], name: str | None = None) -> None:
        self._function = function
        self._name = name or getattr(function, "__qualname__", type(function).__name__)
        self.num_sources = len(function(0))

    def fingerprint(self) -> Any:
        return f"function {self._name}"

    def weights(self, begin: int, end: int) -> Float64Array:
        names = [str(i) for i in range(self.num_sources)]
        rows = []
        for n in range(begin, end):
            checked = check_weights(list(self._function(n)), names)
            total = sum(checked)
            rows.append([value / total for value in checked])
        return np.array(rows, dtype=np.float64).reshape(end - begin, self.num_sources)
