"""The eight element types a ``.bin`` file can have, and their codes in the ``.idx`` header."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DType"]

#: Vocabularies from here on are written as int32 although uint16 would reach to 65536 (Megatron's writer).
UINT16_VOCAB_LIMIT = 65500


class DType(Enum):
    """Element types and their codes in the index header, under Megatron's names."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype: npt.DTypeLike) -> int:
        """The header code of ``dtype``.

        Raises:
            ValueError: the format has no code for ``dtype``.
        """
        name = np.dtype(dtype).name
        if name not in cls.__members__:
            raise ValueError(f"dtype {name} cannot be stored; the format knows {', '.join(cls.__members__)}")
        return int(cls[name].value)

    @classmethod
    def dtype_from_code(cls, code: int) -> np.dtype[Any]:
        """The numpy dtype of a header code.

        Raises:
            ValueError: ``code`` is not 1 to 8.
        """
        try:
            return np.dtype(cls(code).name)
        except ValueError:
            known = ", ".join(f"{member.value}={member.name}" for member in cls)
            raise ValueError(f"dtype code {code} is unknown; the format has {known}") from None

    @classmethod
    def size(cls, key: int | npt.DTypeLike) -> int:
        """Bytes per element of a header code or dtype."""
        return (cls.dtype_from_code(key) if isinstance(key, int) else np.dtype(key)).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> np.dtype[Any]:
        """The dtype Megatron's writer picks for a vocabulary: uint16 when known and below 65500, else int32."""
        small = cardinality is not None and cardinality < UINT16_VOCAB_LIMIT
        return np.dtype(np.uint16 if small else np.int32)
