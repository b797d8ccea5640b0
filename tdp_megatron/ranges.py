"""Ranges of numbers that a run leaves out, such as a stretch of data that made the loss spike."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.arguments import checked_int
from tdp_megatron.types import Int64Array

__all__ = ["NumberRanges"]


class NumberRanges:
    """Ranges [begin, end) of numbers, in rising order and apart from each other.

    Args:
        name: of the argument, for messages.
        ranges: pairs (begin, end) in any order; they may overlap.

    Raises:
        TypeError: something else than pairs of ints.
        ValueError: a pair without 0 <= begin <= end.
    """

    def __init__(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        if not isinstance(ranges, Iterable):
            raise TypeError(f"{name} must hold pairs (begin, end) of ints, got {ranges!r}")
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(_range(name, pair) for pair in ranges):
            if joined and begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            elif begin < end:
                joined.append((begin, end))
        self.ranges = tuple(joined)
        self._bounds = np.array([min(bound, sys.maxsize) for pair in joined for bound in pair], dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def next_run(self, number: int) -> tuple[int, int]:
        """The first number from ``number`` on that is not left out, and how many follow before one that is."""
        place = int(np.searchsorted(self._bounds, number, side="right"))
        if place % 2:
            number = int(self._bounds[place])
            place += 1
        end = int(self._bounds[place]) if place < len(self._bounds) else sys.maxsize
        return number, end - number

    def end_of(self, number: int, count: int) -> int | None:
        """Behind the next ``count`` numbers, from ``number`` on, that are not left out; None where there are fewer."""
        while count > 0:
            number, run = self.next_run(number)
            if not run:
                return None
            number += min(run, count)
            count -= run
        return number

    def contains(self, numbers: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of the numbers are left out, bool [n]."""
        inside: npt.NDArray[np.bool_] = np.searchsorted(self._bounds, numbers, side="right") % 2 == 1
        return inside


def _range(name: str, pair: Any) -> tuple[int, int]:
    try:
        begin, end = (checked_int(f"a number of {name}", number) for number in pair)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold pairs (begin, end) of ints, got {pair!r}") from error
    if not 0 <= begin <= end:
        raise ValueError(f"{name} must hold (begin, end) with 0 <= begin <= end, got ({begin}, {end})")
    return begin, end
