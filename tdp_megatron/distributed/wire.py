"""How samples travel: the schema all ranks agree on, and per-sample values as self-describing bytes (no pickle)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["KeySpec", "WireSchema", "decode_values", "encode_values"]

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


_LENGTH = struct.Struct("<q")


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Tensors, arrays, numbers, strings, bytes, and lists or dicts of plain values, by key.

    Raises:
        TypeError: a value of another type; the message names its key.
    """
    if not values:
        return b""
    header: list[list[Any]] = []
    chunks: list[bytes] = []
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            cpu = value.detach().cpu().contiguous()
            # bfloat16 has no NumPy dtype: raw bytes and torch's name carry any dtype.
            chunks.append(cpu.reshape(-1).view(torch.uint8).numpy().tobytes())
            header.append([key, "tensor", str(cpu.dtype).removeprefix("torch."), list(cpu.shape)])
        elif isinstance(value, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(value)
            if array.dtype.hasobject:
                raise TypeError(f"key {key!r} is an array of Python objects; only plain dtypes can be exchanged")
            chunks.append(array.tobytes())
            header.append([key, "array", array.dtype.str, list(np.shape(value))])
        elif isinstance(value, bytes):
            chunks.append(value)
            header.append([key, "bytes"])
        else:
            try:
                chunks.append(json.dumps(value).encode())
            except (TypeError, ValueError):
                raise TypeError(
                    f"key {key!r} has type {type(value).__name__}; tensors, arrays, numbers, strings and bytes "
                    "can be exchanged"
                ) from None
            header.append([key, "json"])
        header[-1].append(len(chunks[-1]))
    head = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *chunks])


def decode_values(data: bytes) -> dict[str, Any]:
    """Inverse of ``encode_values``."""
    if not data:
        return {}
    (size,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + size
    values: dict[str, Any] = {}
    for entry in json.loads(data[_LENGTH.size : at]):
        key, kind, length = entry[0], entry[1], entry[-1]
        chunk = data[at : at + length]
        at += length
        if kind == "tensor":
            flat = torch.frombuffer(bytearray(chunk), dtype=torch.uint8) if chunk else torch.empty(0, dtype=torch.uint8)
            values[key] = flat.view(getattr(torch, entry[2])).reshape(entry[3])
        elif kind == "array":
            values[key] = np.frombuffer(chunk, dtype=np.dtype(entry[2])).reshape(entry[3]).copy()
        elif kind == "bytes":
            values[key] = chunk
        else:
            values[key] = json.loads(chunk)
    return values
