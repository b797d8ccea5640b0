"""Weights of a blend: what is allowed, and Megatron's normalisation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["check_weights", "normalise_weights"]


def check_weights(weights: Sequence[Any], names: Sequence[str]) -> list[float]:
    """Weights as floats.

    Args:
        weights: one per source; 0 is allowed and means the source is never drawn from.
        names: the sources' names, for messages.

    Raises:
        TypeError: a weight is not a number.
        ValueError: the number of weights is wrong; one is negative, NaN or infinite; or all are zero.
    """
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} sources; give one weight per source")
    checked: list[float] = []
    for i, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if isinstance(weight, bool) or not isinstance(weight, (numbers.Real, np.number)):
            raise TypeError(f"weight {i} of source {name} must be a number, got {weight!r}")
        value = float(weight)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"weight {i} of source {name} is {value}; weights must be finite and not negative")
        checked.append(value)
    if not sum(checked) > 0:
        raise ValueError(f"all {len(checked)} weights are zero; at least one source needs a positive weight")
    if math.isinf(sum(checked)):
        raise ValueError("the sum of the weights is infinite; scale them down")
    return checked


def normalise_weights(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights that sum to 1, float64 [k]; divided twice, because Megatron does and the bits differ."""
    values = list(weights)
    for _ in range(2):
        total = sum(values)
        values = [value / total for value in values]
    return np.array(values, dtype=np.float64)
