"""The schema of the per-token keys, on which all ranks agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tdp_megatron.torch_dtypes import dtype_name, dtype_named, shown

__all__ = ["KeySpec", "WireSchema", "different_keys"]

#: Name of the dtype and shape of one token's entry.
KeySpec: TypeAlias = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WireSchema:
    """Per-token keys in wire order, the same on every rank."""

    keys: tuple[tuple[str, KeySpec], ...]

    @staticmethod
    def of(specs: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> WireSchema:
        """Schema of keys with their dtypes and per-token shapes."""
        return WireSchema(
            tuple((key, (dtype_name(dtype), tuple(shape))) for key, (dtype, shape) in sorted(specs.items()))
        )

    def to_json(self) -> str:
        """Text form, for the agreement."""
        return json.dumps(self.keys)

    @staticmethod
    def from_json(text: str) -> WireSchema:
        """Inverse of ``to_json``."""
        return WireSchema(tuple((key, (spec[0], tuple(spec[1]))) for key, spec in json.loads(text)))

    def dtype(self, key: str) -> np.dtype[Any]:
        """dtype of ``key``."""
        return dtype_named(dict(self.keys)[key][0])

    def token_bytes(self, key: str) -> int:
        """Bytes of one token's entry of ``key``."""
        name, shape = dict(self.keys)[key]
        return int(dtype_named(name).itemsize * np.prod(shape, dtype=np.int64))


def different_keys(schemas: Mapping[int, WireSchema]) -> str:
    """In which keys the samples of some ranks differ, in words."""
    keys_of = {rank: dict(schema.keys) for rank, schema in schemas.items()}
    parts = []
    for key in sorted(set().union(*keys_of.values())):
        have = {rank: _spec_text(keys.get(key)) for rank, keys in keys_of.items()}
        if len(set(have.values())) > 1:
            parts.append(f"{key!r} is " + " and ".join(f"{text} on rank {rank}" for rank, text in have.items()))
    return "; ".join(parts)


def _spec_text(spec: KeySpec | None) -> str:
    if spec is None:
        return "missing"
    shape = f" {spec[1]} per token" if spec[1] else ""
    return shown(dtype_named(spec[0])) + shape
