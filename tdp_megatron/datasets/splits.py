"""Train/valid/test splits of one dataset, with Megatron's arithmetic.

Source: Megatron-LM's ``split`` strings ("99,1,0"); the rounding is half to even, on the sequence count.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np

__all__ = ["SPLIT_NAMES", "Split", "SplitMatrix", "bounds_of", "parse_split", "split_bounds", "split_matrix"]


class Split(Enum):
    """The splits, by their place in every list of three."""

    train = 0
    valid = 1
    test = 2


#: Names of the splits, in order.
SPLIT_NAMES = tuple(split.name for split in Split)

#: Per split the half-open share (begin, end) of the dataset, or None for an empty one.
SplitMatrix: TypeAlias = tuple[tuple[float, float] | None, ...]

_NUMBER = re.compile(r"[.0-9]+")


def parse_split(split: str) -> list[float]:
    """Normalised shares of a split string.

    Args:
        split: up to three non-negative numbers with anything but digits and points between them.

    Returns:
        Three shares that sum to 1.

    Raises:
        ValueError: no number, a negative one, more than three, or a sum of zero.
    """
    if not isinstance(split, str):
        raise TypeError(f'split must be a string such as "99,1,0", got {split!r}')
    if re.search(r"-\s*[.0-9]", split):
        raise ValueError(f"split {split!r} has a negative number")
    try:
        numbers = [float(text) for text in _NUMBER.findall(split)]
    except ValueError:
        raise ValueError(f"split {split!r} has a malformed number") from None
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f'split {split!r} must have one to three numbers, such as "99,1,0"; it has {len(numbers)}')
    numbers += [0.0] * (3 - len(numbers))
    # NumPy's sum: Python's compensates for rounding from 3.12 on, and the cache key has every digit.
    total = float(np.sum(numbers))
    if not total > 0 or math.isinf(total):
        raise ValueError(f"split {split!r} sums to {total}; at least one share must be positive")
    return [number / total for number in numbers]


def split_matrix(shares: Sequence[float], within: Sequence[float] | None = None) -> SplitMatrix:
    """Running sums of the shares: per split (begin, end), None where the split is empty.

    The first begin is the integer 0; Megatron's cache key depends on that.

    Args:
        shares: normalised, one per split.
        within: other shares; each split is then what it has in common with the same split of these.
    """
    first, second = (_running_sums(vector) for vector in (shares, shares if within is None else within))
    overlaps = (
        (max(a, c), min(b, d))
        for (a, b), (c, d) in zip(itertools.pairwise(first), itertools.pairwise(second), strict=True)
    )
    return tuple((begin, end) if end > begin else None for begin, end in overlaps)


def _running_sums(shares: Sequence[float]) -> list[float]:
    sums: list[float] = [0]
    for share in shares:
        sums.append(sums[-1] + share)
    return sums


def split_bounds(split: str, name: str, num_sequences: int) -> tuple[int, int]:
    """First and one-past-last sequence of a split.

    Args:
        split: as ``parse_split`` takes it.
        name: ``train``, ``valid`` or ``test``.
        num_sequences: sequences in the file.

    Returns:
        (begin, end); equal when the split has no sequence.

    Raises:
        ValueError: an unknown name or a bad split string.
    """
    if name not in SPLIT_NAMES:
        raise ValueError(f"split name must be one of {', '.join(SPLIT_NAMES)}, got {name!r}")
    entry = split_matrix(parse_split(split))[SPLIT_NAMES.index(name)]
    if entry is None:
        return (0, 0)
    return bounds_of(entry, num_sequences)


def bounds_of(entry: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """First and one-past-last sequence of one entry of a split matrix, rounded half to even."""
    begin, end = (round(bound * float(num_sequences)) for bound in entry)
    return begin, end
