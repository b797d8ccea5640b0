"""Index caches under Megatron's file names, with what makes them safe to share and to trust.

A cache is a few ``.npy`` files and a description. Beside them lies a manifest that records what the name leaves out:
settings, a fingerprint of the data, sizes and times of the files. Files appear under their names only when complete,
one builder works while the others wait, and nothing is used that was not checked once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.errors import CacheError
from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.indexed.paths import fsync_folder

__all__ = ["Arrays", "CacheKey", "Provenance", "load_existing", "load_or_build"]

logger = logging.getLogger(__name__)

Arrays: TypeAlias = "dict[str, npt.NDArray[Any]]"

_MANIFEST_FORMAT = 1
_LONGEST_POLL_S = 0.25
_LONGEST_HEADER = 4096
_SECONDS_BETWEEN_NOTICES = 30.0


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
        return os.path.join(self.folder, f"{self.base}-{suffix}")

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the arrays' files."""
        return [f"{name}.npy" for name in self.names]


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a cache was made from, beyond what its name says."""

    settings: Mapping[str, Any]
    """Settings that the name leaves out, as JSON values."""
    stamp: Mapping[str, Any] | None = None
    """Cheap facts about the data, such as size and time; the same stamp means the same data. None: there are none."""
    fingerprint: Callable[[], Mapping[str, Any]] = dict
    """What has to be equal when the stamp is not, such as checksums; may take a while."""


#: Looks at arrays nobody vouches for, and says what is wrong with them; None when nothing is.
Check: TypeAlias = "Callable[[Arrays], str | None]"


class _UnusableError(Exception):
    """A cache is there, but not to be used; the message says why."""


def load_or_build(
    key: CacheKey, provenance: Provenance, build: Callable[[], Arrays], check_shape: Check, check_content: Check
) -> Arrays:
    """The arrays of a cache: those that are there, or new ones.

    Args:
        key: where the cache is.
        provenance: what it must have been made from.
        build: makes the arrays.
        check_shape: cheap; is asked about every cache.
        check_content: thorough; is asked about caches without a manifest, once: they get one.

    Returns:
        Read-only maps of the files, by name.

    Raises:
        CacheError: the folder cannot be written, or what was written cannot be read back.
    """
    try:
        with contextlib.suppress(FileNotFoundError, _UnusableError):
            return _load(key, provenance, check_shape, check_content)
        os.makedirs(key.folder, exist_ok=True)
        with _locked(key):
            try:
                return _load(key, provenance, check_shape, check_content)
            except FileNotFoundError:
                logger.info("building the index cache %s", key.path(""))
            except _UnusableError as why:
                logger.warning("the index cache %s is not used and built again: %s", key.path(""), why)
            _write(key, provenance, build())
            return _load(key, provenance, check_shape, check_content)
    except _UnusableError as why:
        raise CacheError(f"{key.path('')}: the index cache that was just written cannot be used: {why}") from None
    except OSError as error:
        raise CacheError(
            f"cannot keep the index cache {key.path('')}: {error}. Set path_to_cache to a folder with room that this "
            "process may write, or to '' for indices without a cache"
        ) from error


def load_existing(key: CacheKey, provenance: Provenance, check_shape: Check, remedy: str) -> Arrays:
    """The arrays of a cache that must be there, for a fast start.

    Raises:
        CacheError: it is missing, damaged or belongs to other data; the message ends with ``remedy``.
    """
    try:
        return _load(key, provenance, check_shape, check_shape)
    except FileNotFoundError as error:
        raise CacheError(f"{error.filename} is missing. {remedy}") from None
    except _UnusableError as why:
        raise CacheError(f"the index cache {key.path('')} cannot be used: {why}. {remedy}") from None


def _load(key: CacheKey, provenance: Provenance, check_shape: Check, check_content: Check) -> Arrays:
    manifest = _read_manifest(key)
    os.stat(key.path("description.txt"))
    stamps = _file_stamps(key)
    arrays = {name: _open(key.path(suffix)) for name, suffix in zip(key.names, key.suffixes, strict=True)}
    if _file_stamps(key) != stamps:
        raise _UnusableError("its files were replaced while they were being opened")
    vouched = manifest is not None and manifest["files"] == stamps
    if vouched and manifest is not None:
        _compare(manifest, provenance)
    complaint = check_shape(arrays) or (None if vouched else check_content(arrays))
    if complaint is not None:
        raise _UnusableError(complaint)
    if not vouched and check_content is not check_shape:
        # A cache in a folder that is not ours to write is checked at every start.
        with contextlib.suppress(OSError):
            _write_manifest(key, provenance, stamps)
    return arrays


def _open(path: str) -> npt.NDArray[Any]:
    data = _C.map_file(path)  # not np.memmap, which holds a descriptor for as long as the array lives
    try:
        begin, dtype, shape = _array_header(data[:_LONGEST_HEADER].tobytes())
        count = math.prod(shape)
        if dtype.hasobject or count * dtype.itemsize != len(data) - begin:
            raise ValueError(f"{len(data)} bytes do not hold an array of shape {shape} and dtype {dtype}")
        array: npt.NDArray[Any] = data[begin:].view(dtype).reshape(shape)
    except Exception as error:  # a damaged header makes NumPy raise almost anything
        raise _UnusableError(f"{path} is damaged: {error}") from None
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


def _file_stamps(key: CacheKey) -> dict[str, list[int]]:
    stamps = {}
    for suffix in key.suffixes:
        status = os.stat(key.path(suffix))
        stamps[suffix] = [status.st_size, status.st_mtime_ns]
    return stamps


def _read_manifest(key: CacheKey) -> dict[str, Any] | None:
    try:
        with open(key.path("manifest.json"), encoding="utf-8") as file:
            manifest = json.load(file)
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != _MANIFEST_FORMAT:
        return None
    if not all(isinstance(manifest.get(part), dict) for part in ("settings", "fingerprint", "files")):
        return None
    return manifest


def _compare(manifest: Mapping[str, Any], provenance: Provenance) -> None:
    same_data = provenance.stamp is not None and manifest.get("stamp") == dict(provenance.stamp)
    for part, expected in (
        ("settings", provenance.settings),
        ("fingerprint", {} if same_data else provenance.fingerprint()),
    ):
        for name, value in expected.items():
            found = manifest[part].get(name)
            if found != value:
                raise _UnusableError(f"it was made with {name} {found}, now {name} is {value}")


def _write(key: CacheKey, provenance: Provenance, arrays: Arrays) -> None:
    # A cache counts as complete with its description: that goes first and comes last, so that no reader,
    # Megatron's included, takes new and old files for one cache.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(key.path("description.txt"))
    for name, suffix in zip(key.names, key.suffixes, strict=True):
        output = TemporaryOutput(key.path(suffix))
        np.save(output.file, arrays[name], allow_pickle=False)
        output.sync()
        output.rename()
    _write_manifest(key, provenance, _file_stamps(key))
    _write_text(key.path("description.txt"), key.description)
    fsync_folder(key.folder)


def _write_manifest(key: CacheKey, provenance: Provenance, stamps: dict[str, list[int]]) -> None:
    manifest = {
        "format": _MANIFEST_FORMAT,
        "settings": dict(provenance.settings),
        "stamp": None if provenance.stamp is None else dict(provenance.stamp),
        "fingerprint": dict(provenance.fingerprint()),
        "files": stamps,
    }
    _write_text(key.path("manifest.json"), json.dumps(manifest, indent=1))


def _write_text(path: str, text: str) -> None:
    output = TemporaryOutput(path)
    output.file.write(text.encode())
    output.sync()
    output.rename()


@contextlib.contextmanager
def _locked(key: CacheKey) -> Iterator[None]:
    """One holder per cache among all threads and processes that see the folder; a dead holder's lock is free."""
    path = key.path("lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = _wait_for_lock(descriptor, path)
            # Whoever held it before has removed the name: a lock on that file keeps nobody out.
            if not locked or os.fstat(descriptor).st_nlink:
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        if locked:
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: str) -> bool:
    started = notified = time.monotonic()
    pause = 0.005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            now = time.monotonic()
            if now - notified > _SECONDS_BETWEEN_NOTICES:
                notified = now
                logger.warning("waiting for %s since %.0f s: another process builds this cache", path, now - started)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        except OSError as error:
            # Without locks several may build; each still replaces whole files by equal ones.
            logger.warning("%s: this file system has no locks (%s); several processes may build", path, error)
            return False
