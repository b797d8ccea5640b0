"""Whether there is a Triton that can run the kernels."""

from __future__ import annotations

import functools
import re

__all__ = ["has_triton"]

#: The first that takes tuples of tensors as arguments.
NEEDED = (3, 3)


@functools.cache
def has_triton() -> bool:
    """Whether Triton 3.3 or later can be imported, under whatever package name."""
    try:
        import triton
    except ImportError:
        return False
    return is_new_enough(triton.__version__)


def is_new_enough(version: str) -> bool:
    """Whether a version such as "3.9.0" or "3.3.0+git1234" is at least 3.3."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= NEEDED
