"""The errors that data, caches, state, schedules and exchanges raise.

Bad arguments are ``ValueError``/``TypeError``; everything here is about the outside world. Each message
carries the value found, the limit, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ExchangeError",
    "FormatError",
    "ScheduleError",
    "StateMismatchError",
    "TdpError",
]


class TdpError(RuntimeError):
    """Base class of the package's own errors."""


class FormatError(TdpError):
    """A file is not what its header, its index or its neighbour says it is."""


class CacheError(TdpError):
    """An index cache is missing, damaged or belongs to other data."""


class StateMismatchError(TdpError):
    """A saved state belongs to another configuration; the message names the field that differs."""


class ScheduleError(TdpError):
    """No valid plan exists for these lengths, or a plan breaks one of its constraints."""


class ExchangeError(TdpError):
    """A collective step failed on some rank; the message names the first cause and the rank."""
