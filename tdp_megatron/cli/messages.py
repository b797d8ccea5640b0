"""Errors as the command line tells them."""

from __future__ import annotations

import os

__all__ = ["message_of"]


def message_of(error: Exception) -> str:
    """The message of an error, that of the system without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {os.fsdecode(error.filename)!r}"
