"""Per-sample values as self-describing bytes (no pickle), from which the same values of the same types come back."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["decode_values", "encode_values"]

_LENGTH = struct.Struct("<q")
_JSON_TYPES = (bool, int, str, type(None))
#: Built-in containers, by the letter that stands for them in the header.
_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_BUILD: dict[str, Callable[[Any], Any]] = {letter: kind for kind, letter in _CONTAINERS.items()}
#: Longer ones would meet Python's limit on digits.
_PLAIN_INT_BITS = 4096

#: What the header says of a value: itself, or a letter and what belongs to it.
_Spec: TypeAlias = Any


class _RefusedError(Exception):
    """Why a value cannot travel."""


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Tensors, arrays, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them, by key.

    Raises:
        TypeError: a value of another type, which would not arrive as what it is; the message names its key.
    """
    if not values:
        return b""
    chunks: list[bytes] = []
    header = []
    for key, value in values.items():
        try:
            header.append([_spec(key, chunks), _spec(value, chunks)])
        except _RefusedError as refusal:
            raise TypeError(
                f"key {key!r} {refusal}; what can be exchanged are tensors, arrays, numbers, strings, bytes, None, and "
                "lists, tuples, sets and dicts of them"
            ) from None
        except RecursionError:
            raise TypeError(f"key {key!r} contains itself, or is nested too deeply to be exchanged") from None
    head = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *chunks])


def decode_values(data: bytes) -> dict[str, Any]:
    """Inverse of ``encode_values``; tensors and arrays are new ones, tensors on the CPU."""
    if not data:
        return {}
    (size,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size
    chunks = _Chunks(data, begin + size)
    return {_value(key, chunks): _value(spec, chunks) for key, spec in json.loads(data[begin : begin + size])}


class _Chunks:
    """The bytes behind the header, taken one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]


def _spec(value: Any, chunks: list[bytes]) -> _Spec:
    """What the header says of a value; bytes go to ``chunks``. Exact types only: a subclass would come back as its
    base."""
    kind = type(value)
    if kind in _JSON_TYPES:
        if kind is int and value.bit_length() > _PLAIN_INT_BITS:
            return ["i", hex(value)]
        return value
    if kind is float:
        # JSON keeps every finite double; its writers do not agree about the others.
        return value if math.isfinite(value) else ["g", value.hex()]
    if kind in _CONTAINERS:
        return [_CONTAINERS[kind], [_spec(item, chunks) for item in value]]
    if kind is dict:
        return ["d", [[_spec(k, chunks), _spec(v, chunks)] for k, v in value.items()]]
    if kind is torch.Tensor:
        return _tensor_spec(value, chunks)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _array_spec(value, chunks)
    if kind is bytes:
        chunks.append(value)
        return ["b", len(value)]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    raise _RefusedError(f"holds a {kind.__module__}.{kind.__qualname__}")


def _tensor_spec(value: torch.Tensor, chunks: list[bytes]) -> _Spec:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise _RefusedError(f"holds a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}")
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.copy_(value.detach().reshape(-1))  # from any device, and conjugated or negated where that is still to be done
    # bfloat16 has no NumPy dtype: raw bytes and torch's name carry any dtype.
    chunks.append(flat.view(torch.uint8).numpy().tobytes())
    return ["T", str(flat.dtype).removeprefix("torch."), list(value.shape), len(chunks[-1])]


def _array_spec(value: Any, chunks: list[bytes]) -> _Spec:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise _RefusedError(f"holds an array of dtype {array.dtype}")
    chunks.append(array.tobytes())
    shape = None if isinstance(value, np.generic) else list(array.shape)
    return ["a", array.dtype.str, shape, len(chunks[-1])]


def _value(spec: _Spec, chunks: _Chunks) -> Any:
    if type(spec) is not list:
        return spec
    letter = spec[0]
    if letter in _BUILD:
        return _BUILD[letter](_value(item, chunks) for item in spec[1])
    if letter == "d":
        return {_value(k, chunks): _value(v, chunks) for k, v in spec[1]}
    if letter == "T":
        _, dtype, shape, size = spec
        # frombuffer takes no empty buffer.
        raw = torch.frombuffer(bytearray(chunks.take(size)), dtype=torch.uint8) if size else torch.empty(0).byte()
        return raw.view(getattr(torch, dtype)).reshape(shape)
    if letter == "a":
        _, dtype, shape, size = spec
        array: Any = np.ndarray(shape or (), dtype=dtype, buffer=bytearray(chunks.take(size)))
        return array[()] if shape is None else array
    if letter == "b":
        return chunks.take(spec[1])
    if letter == "c":
        return complex(float.fromhex(spec[1]), float.fromhex(spec[2]))
    return int(spec[1], 16) if letter == "i" else float.fromhex(spec[1])
