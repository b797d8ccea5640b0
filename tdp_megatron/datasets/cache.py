"""Index caches under Megatron's file names, with what makes them safe to share and to trust.

A cache is a few ``.npy`` files and a description. Beside them lies a manifest that records what the name leaves out:
settings, a fingerprint of the data, sizes and times of the files. Files appear under their names only when complete,
one builder works while the others wait, and nothing is used that was not checked once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tdp_megatron.datasets.cache_files import (
    Arrays,
    CacheKey,
    Provenance,
    UnusableError,
    describe_arrays,
    file_stamps,
    manifest_bytes,
    open_arrays,
    read_manifest,
)
from tdp_megatron.datasets.cache_lock import CacheLock
from tdp_megatron.datasets.cache_writer import CacheWriter, current_writer, unwritable, write_beside
from tdp_megatron.datasets.giving_up import current_stop
from tdp_megatron.errors import CacheError

__all__ = ["Arrays", "CacheKey", "Known", "Provenance", "load_existing", "load_or_build", "prepare"]

logger = logging.getLogger(__name__)

#: Looks at arrays nobody vouches for, and says what is wrong with them; None when nothing is.
Check: TypeAlias = "Callable[[Arrays], str | None]"


@dataclass(frozen=True, slots=True)
class Known:
    """What a cache holds, without opening it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each array."""
    facts: Mapping[str, Any]
    """What ``Provenance.facts`` gave when it was built; read from a file, so to be checked."""


def prepare(
    key: CacheKey, provenance: Provenance, build: Callable[[], Arrays], check_shape: Check, check_content: Check
) -> Known:
    """Make sure that a cache is there; inside ``grouped_writes`` a new one may still wait for its name.

    One that its manifest vouches for is not opened: a start with thousands of them takes a few system calls each.

    Args:
        key: where the cache is.
        provenance: what it must have been made from.
        build: makes the arrays.
        check_shape: cheap; is asked about every cache that is opened.
        check_content: thorough; is asked about caches without a manifest, once: they get one.

    Raises:
        CacheError: the folder cannot be written.
    """
    with _errors_named(key):
        return _ensure(key, provenance, build, check_shape, check_content, openly=False)[0]


def load_or_build(
    key: CacheKey, provenance: Provenance, build: Callable[[], Arrays], check_shape: Check, check_content: Check
) -> Arrays:
    """The arrays of a cache: those that are there, or new ones. Arguments and errors as of ``prepare``.

    Returns:
        Read-only maps of the files, by name.

    Raises:
        CacheError: the folder cannot be written, or what was written cannot be read back.
    """
    with _errors_named(key):
        writer = current_writer()
        if writer is not None:
            writer.commit()
        arrays = _ensure(key, provenance, build, check_shape, check_content, openly=True)[1]
        if arrays is None:
            if writer is not None:
                writer.commit()
            arrays = _open(key, provenance, check_shape, check_content)
        return arrays


def load_existing(key: CacheKey, provenance: Provenance, check_shape: Check, remedy: str) -> Arrays:
    """The arrays of a cache that must be there, for a fast start.

    Raises:
        CacheError: it is missing, damaged or belongs to other data; the message ends with ``remedy``.
    """
    try:
        return _open(key, provenance, check_shape, check_shape)
    except FileNotFoundError as error:
        raise CacheError(f"{error.filename} is missing. {remedy}") from None
    except UnusableError as why:
        raise CacheError(f"the index cache {key.path('')} cannot be used: {why}. {remedy}") from None


def _ensure(
    key: CacheKey,
    provenance: Provenance,
    build: Callable[[], Arrays],
    check_shape: Check,
    check_content: Check,
    *,
    openly: bool,
) -> tuple[Known, Arrays | None]:
    """What ``_look`` gives for a cache that is there; of one that is built and written, no arrays."""
    with contextlib.suppress(FileNotFoundError, UnusableError):
        return _look(key, provenance, check_shape, check_content, openly=openly)
    group = current_writer()
    writer = group or CacheWriter()
    held = _lock(key, writer)
    lock: CacheLock | None = held
    try:
        try:
            return _look(key, provenance, check_shape, check_content, openly=openly)
        except FileNotFoundError:
            logger.info("building the index cache %s", key.path(""))
        except UnusableError as why:
            logger.warning("the index cache %s is not used and built again: %s", key.path(""), why)
        arrays = build()
        described = describe_arrays(provenance, arrays)
        lock = None  # the writer releases it
        writer.write(key, described, arrays, held)
        if group is None:
            writer.close()
    finally:
        if lock is not None:
            lock.release()
    return Known({name: array.shape for name, array in arrays.items()}, described["facts"]), None


def _open(key: CacheKey, provenance: Provenance, check_shape: Check, check_content: Check) -> Arrays:
    arrays = _look(key, provenance, check_shape, check_content, openly=True)[1]
    if arrays is None:
        raise RuntimeError("a cache that was looked into gave no arrays")
    return arrays


def _look(
    key: CacheKey, provenance: Provenance, check_shape: Check, check_content: Check, *, openly: bool
) -> tuple[Known, Arrays | None]:
    """What is in a cache; the arrays too if ``openly``, or when nobody vouches for them."""
    manifest = read_manifest(key)
    os.stat(key.path("description.txt"))
    stamps = file_stamps(key)
    vouched = manifest is not None and manifest.files == stamps
    if vouched and manifest is not None:
        manifest.compare(provenance)
        if not openly:
            return Known(manifest.shapes, manifest.facts), None
    arrays = open_arrays(key)
    if file_stamps(key) != stamps:
        raise UnusableError("its files were replaced while they were being opened")
    complaint = check_shape(arrays)
    if complaint is None and vouched and manifest is not None:
        shapes = {name: array.shape for name, array in arrays.items()}
        if shapes != manifest.shapes:
            complaint = f"its manifest says {dict(manifest.shapes)}, its arrays are {shapes}"
    elif complaint is None:
        complaint = check_content(arrays)
    if complaint is not None:
        raise UnusableError(complaint)
    if vouched and manifest is not None:
        return Known(manifest.shapes, manifest.facts), arrays
    described = describe_arrays(provenance, arrays)
    if check_content is not check_shape:
        # A cache in a folder that is not ours to write is checked at every start.
        with contextlib.suppress(OSError):
            write_beside(key, manifest_bytes(described, stamps))
    return Known({name: array.shape for name, array in arrays.items()}, described["facts"]), arrays


def _lock(key: CacheKey, writer: CacheWriter) -> CacheLock:
    stop = current_stop()

    def while_waiting() -> None:
        # Nobody waits while others wait for what it holds: what is written gets its name first.
        writer.commit()
        if stop is not None:
            stop()

    try:
        return CacheLock(key.path("lock"), while_waiting)
    except FileNotFoundError:
        os.makedirs(key.folder, exist_ok=True)
        return CacheLock(key.path("lock"), while_waiting)


@contextlib.contextmanager
def _errors_named(key: CacheKey) -> Iterator[None]:
    try:
        yield
    except UnusableError as why:
        raise CacheError(f"{key.path('')}: the index cache that was just written cannot be used: {why}") from None
    except OSError as error:
        raise unwritable(key.path(""), error) from error
