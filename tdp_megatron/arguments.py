"""What is asked of the numbers and names that a user gives."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["checked_int", "checked_names"]


def checked_int(name: str, value: Any, *, least: int | None = None) -> int:
    """A number as Python's own int: NumPy's would stay in states, which then neither compare nor save as JSON.

    Args:
        name: what the message calls it.
        value: any integer, NumPy's and torch's included.
        least: smallest value allowed; None for no limit.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too small.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if least is not None and number < least:
        limit = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"{name} must {limit}, got {number}")
    return number


def checked_names(name: str, value: Iterable[str]) -> tuple[str, ...]:
    """Several names; a lone text, which would be taken letter by letter, is refused.

    Raises:
        TypeError: it is a text, or holds something else than texts.
    """
    names = () if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(one, str) for one in names):
        raise TypeError(f"{name} must be a sequence of names, such as ('reward',), got {value!r}")
    return names
