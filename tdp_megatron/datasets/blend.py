"""Weights of a blend: what is allowed, Megatron's normalisation, and the sizes that follow."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Blend", "blend_from_list", "check_weights", "normalise_once", "normalise_weights", "sizes_per_dataset"]

#: Prefixes, and one weight per prefix or None for shares in proportion to the datasets' sizes.
Blend: TypeAlias = tuple[list[str], "list[float] | None"]


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


def normalise_once(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights divided by their sum, float64 [k].

    The sum is NumPy's pairwise one: from eight weights on its last bit differs from a plain running sum.
    """
    values = np.array(weights, dtype=np.float64)
    scaled: npt.NDArray[np.float64] = values / np.sum(values)
    return scaled


def normalise_weights(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Weights that sum to 1, float64 [k]; divided twice, because Megatron does and the bits differ."""
    return normalise_once(normalise_once(weights).tolist())


def blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Prefixes and weights from the flat list of a command line.

    Args:
        blend: ``["30", "a", "70", "b"]``, or prefixes alone; None for none.

    Returns:
        (prefixes, weights), weights None when the list has prefixes alone.

    Raises:
        ValueError: an empty list, or some but not all even places hold a number.
    """
    if blend is None:
        return None
    if not blend:
        raise ValueError("the blend list is empty; give prefixes, or weights and prefixes in turn")
    prefixes = [item.strip() for item in blend]
    if len(blend) % 2:
        return prefixes, None
    weights = [_number(text) for text in blend[::2]]
    known = [weight for weight in weights if weight is not None]
    if not known:
        return prefixes, None
    if len(known) < len(weights):
        place = weights.index(None)
        raise ValueError(
            f"the blend list mixes weights and prefixes: item {2 * place} is {blend[2 * place]!r}, not a number; "
            "give a weight before every prefix, or none at all"
        )
    return prefixes[1::2], known


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def sizes_per_dataset(weights: Sequence[float], sizes: Sequence[int | None], surplus: float = 0.0) -> list[list[int]]:
    """Samples to take from, or with a surplus to build for, each dataset and split.

    Args:
        weights: normalised, one per dataset.
        sizes: samples wanted of the blend, per split.
        surplus: share to add.

    Returns:
        One list per dataset with one number per split.

    Raises:
        ValueError: a size is None, or negative.
    """
    known = [size for size in sizes if size is not None and size >= 0]
    if len(known) < len(sizes):
        raise ValueError(f"the sizes of a weighted blend must be numbers of samples, 0 or more; got {list(sizes)}")
    return [[math.ceil(math.ceil(size * weight) * (1 + surplus)) for size in known] for weight in weights]
