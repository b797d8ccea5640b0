"""The files of an index cache: their names, the manifest beside them, and how their arrays are opened."""

from __future__ import annotations

import functools
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C

__all__ = [
    "Arrays",
    "CacheKey",
    "Manifest",
    "Provenance",
    "UnusableError",
    "describe_arrays",
    "file_stamps",
    "manifest_bytes",
    "open_arrays",
    "read_manifest",
]

Arrays: TypeAlias = "dict[str, npt.NDArray[Any]]"

_MANIFEST_FORMAT = 1
_LONGEST_HEADER = 4096
_READ_BYTES = 1 << 16


class UnusableError(Exception):
    """A cache is there, but not to be used; the message says why."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Where a cache is."""

    folder: str
    base: str
    """``<md5>-<ClassName>-<split>``, what all its file names begin with."""
    description: str
    """Text of ``description.txt``; the md5 is its digest."""
    names: tuple[str, ...]
    """The arrays, such as ``document_index``."""

    def path(self, suffix: str) -> str:
        """Path of one file of the cache."""
        return f"{self.folder}/{self.base}-{suffix}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a cache was made from, beyond what its name says."""

    settings: Mapping[str, Any]
    """Settings that the name leaves out, as JSON values."""
    stamp: Mapping[str, Any] | None = None
    """Cheap facts about the data, such as size and time; the same stamp means the same data. None: there are none."""
    fingerprint: Callable[[], Mapping[str, Any]] = dict
    """What has to be equal when the stamp is not, such as checksums; may take a while."""
    facts: Callable[[Arrays], Mapping[str, Any]] = lambda _: {}
    """What is to be known of the arrays at later starts without opening them, as JSON values."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the file beside a cache says; nothing of it is older than the files whose stamps it has."""

    settings: Mapping[str, Any]
    stamp: Any
    fingerprint: Mapping[str, Any]
    files: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each array."""
    facts: Mapping[str, Any]

    def compare(self, provenance: Provenance) -> None:
        """Raise UnusableError for another provenance."""
        same_data = provenance.stamp is not None and self.stamp == dict(provenance.stamp)
        for recorded, expected in (
            (self.settings, provenance.settings),
            (self.fingerprint, {} if same_data else provenance.fingerprint()),
        ):
            for name, value in expected.items():
                found = recorded.get(name)
                if found != value:
                    raise UnusableError(f"it was made with {name} {found}, now {name} is {value}")


def file_stamps(key: CacheKey, path_of: Callable[[str], str] | None = None) -> dict[str, list[int]]:
    """Size and time of each array's file.

    Args:
        key: the cache.
        path_of: suffix -> path, where the files do not have their names yet.

    Raises:
        FileNotFoundError: one is missing.
    """
    stamps = {}
    for name in key.names:
        suffix = f"{name}.npy"
        status = os.stat((path_of or key.path)(suffix))
        stamps[suffix] = [status.st_size, status.st_mtime_ns]
    return stamps


def describe_arrays(provenance: Provenance, arrays: Arrays) -> dict[str, Any]:
    """What a manifest says of arrays, all but the stamps of their files."""
    return {
        "format": _MANIFEST_FORMAT,
        "settings": dict(provenance.settings),
        "stamp": None if provenance.stamp is None else dict(provenance.stamp),
        "fingerprint": dict(provenance.fingerprint()),
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "facts": dict(provenance.facts(arrays)),
    }


def manifest_bytes(description: Mapping[str, Any], stamps: Mapping[str, list[int]]) -> bytes:
    """The manifest of files with these stamps, from what ``describe_arrays`` says of their arrays."""
    return json.dumps({**description, "files": stamps}).encode()


def read_manifest(key: CacheKey) -> Manifest | None:
    """The manifest of a cache; None when there is none, or one that says nothing."""
    try:
        descriptor = os.open(key.path("manifest.json"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = json.loads(b"".join(iter(lambda: os.read(descriptor, _READ_BYTES), b"")))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != _MANIFEST_FORMAT:
        return None
    settings, fingerprint, files, shapes, facts = (
        found.get(part) for part in ("settings", "fingerprint", "files", "shapes", "facts")
    )
    if not (
        isinstance(settings, dict)
        and isinstance(fingerprint, dict)
        and isinstance(files, dict)
        and isinstance(shapes, dict)
        and isinstance(facts, dict)
    ):
        return None
    for name in key.names:
        shape = shapes.get(name)
        if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 0 for n in shape):
            return None
    return Manifest(settings, found.get("stamp"), fingerprint, files, {n: tuple(shapes[n]) for n in key.names}, facts)


def open_arrays(key: CacheKey) -> Arrays:
    """Read-only maps of the arrays.

    Raises:
        FileNotFoundError: one is missing.
        UnusableError: one is damaged.
    """
    return {name: _open(key.path(f"{name}.npy")) for name in key.names}


def _open(path: str) -> npt.NDArray[Any]:
    data = _C.map_file(path)  # not np.memmap, which holds a descriptor for as long as the array lives
    try:
        begin, dtype, shape = _array_header(data[:_LONGEST_HEADER].tobytes())
        count = math.prod(shape)
        if dtype.hasobject or count * dtype.itemsize != len(data) - begin:
            raise ValueError(f"{len(data)} bytes do not hold an array of shape {shape} and dtype {dtype}")
        array: npt.NDArray[Any] = data[begin:].view(dtype).reshape(shape)
    except Exception as error:  # a damaged header makes NumPy raise almost anything
        raise UnusableError(f"{path} is damaged: {error}") from None
    return array


def _array_header(head: bytes) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Where the data of a ``.npy`` file begins, its dtype and shape."""
    if len(head) < 10 or not head.startswith(b"\x93NUMPY"):
        raise ValueError("it does not begin like a .npy file")
    size = 10 + int.from_bytes(head[8:10], "little") if head[6] == 1 else len(head)
    return _parsed_header(head[:size])


# The files of a thousand datasets have few different headers.
@functools.lru_cache(maxsize=256)
def _parsed_header(head: bytes) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if fortran_order and len(shape) > 1:
        raise ValueError("its array is in Fortran order")
    return file.tell(), dtype, shape
