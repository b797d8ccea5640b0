"""The schema of the per-token keys, on which all ranks agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["KeySpec", "WireSchema"]

#: dtype string and shape of one token's entry.
KeySpec: TypeAlias = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WireSchema:
    """Per-token keys in wire order, the same on every rank."""

    keys: tuple[tuple[str, KeySpec], ...]

    @staticmethod
    def of(specs: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> WireSchema:
        """Schema of keys with their dtypes and per-token shapes."""
        return WireSchema(tuple((key, (dtype.str, tuple(shape))) for key, (dtype, shape) in sorted(specs.items())))

    def to_json(self) -> str:
        """Text form, for the agreement."""
        return json.dumps(self.keys)

    @staticmethod
    def from_json(text: str) -> WireSchema:
        """Inverse of ``to_json``."""
        return WireSchema(tuple((key, (spec[0], tuple(spec[1]))) for key, spec in json.loads(text)))

    def dtype(self, key: str) -> np.dtype[Any]:
        """dtype of ``key``."""
        return np.dtype(dict(self.keys)[key][0])

    def token_bytes(self, key: str) -> int:
        """Bytes of one token's entry of ``key``."""
        dtype, shape = dict(self.keys)[key]
        return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
