"""Indices that no memory of this machine can hold are refused before they are built."""

from __future__ import annotations

import os

__all__ = ["require_memory"]


def require_memory(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse to build what does not fit into the machine's memory.

    Args:
        num_bytes: needed at least.
        what: needs them, with the argument that makes it so large.
        remedy: what to do.

    Raises:
        ValueError: the machine has less memory in all.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > there:
        raise ValueError(
            f"{what} needs {num_bytes} bytes ({num_bytes / 2**30:,.0f} GiB), the memory of this machine has "
            f"{there / 2**30:,.0f} GiB; {remedy}"
        )
