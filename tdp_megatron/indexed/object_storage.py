"""Objects in S3 or behind the Multi-Storage Client: names, versions, and reads that are tried again."""

from __future__ import annotations

import errno
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tdp_megatron.errors import FormatError

__all__ = [
    "ObjectIdentity",
    "ObjectStorageConfig",
    "ObjectStore",
    "TransientError",
    "default_config",
    "fetch",
    "is_object_storage_path",
    "object_exists",
    "stat_object",
    "store_of",
]

S3_PREFIX = "s3://"
MSC_PREFIX = "msc://"

TRIES = 8
"""Attempts per request before it counts as failed."""
BACKOFF_SECONDS = 0.1
"""Wait before the second attempt; it doubles with each further one, and is shortened at random."""
LONGEST_BACKOFF_SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectStorageConfig:
    """How files in object storage are read.

    Raises:
        ValueError: a field is empty or not positive.
    """

    path_to_idx_cache: str
    """Local folder that ``.idx`` files are downloaded to; processes may share it."""

    bin_chunk_nbytes: int = 256 * 1024 * 1024
    """Bytes of ``.bin`` files that the process keeps in memory, shared by all its datasets. Sequential reads fetch
    ahead up to half of it, scattered ones only what they need."""

    def __post_init__(self) -> None:
        if not self.path_to_idx_cache:
            raise ValueError("path_to_idx_cache is empty; give a local folder with room for the .idx files")
        if self.bin_chunk_nbytes < 1:
            raise ValueError(f"bin_chunk_nbytes must be at least 1, got {self.bin_chunk_nbytes}")


def default_config() -> ObjectStorageConfig:
    """Index files go to the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return ObjectStorageConfig(os.path.join(cache, "tdp_megatron", "idx"))


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """One version of an object."""

    path: str
    """Its URL."""
    size: int
    """Bytes."""
    version: str
    """ETag, or the time of its last change where there is none."""

    def changed(self, now: str) -> FormatError:
        """The error that tells of another version."""
        return FormatError(
            f"{self.path}: changed while in use ({self.size} bytes, version {self.version} when opened; {now}); open "
            "the dataset again"
        )


class TransientError(Exception):
    """A request failed in a way that may pass; the message says how."""


class ObjectStore(ABC):
    """Where objects are; every call is one attempt."""

    @abstractmethod
    def stat(self, url: str) -> ObjectIdentity:
        """The object as it is now.

        Raises:
            FileNotFoundError: there is none.
            PermissionError: the credentials do not allow to know.
            TransientError: worth another try.
        """

    @abstractmethod
    def stream(self, identity: ObjectIdentity, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """Bytes from ``offset`` on, in pieces; fewer than ``length`` when the connection breaks.

        Raises:
            FormatError: the object is another version by now.
            TransientError: worth another try.
        """

    @abstractmethod
    def check_unchanged(self, identity: ObjectIdentity, at_once: bool) -> None:
        """Raise FormatError for another version, where ``stream`` cannot know.

        Args:
            identity: the version in use.
            at_once: whether to ask now; otherwise only if it has been long since.
        """


def is_object_storage_path(path: str) -> bool:
    """Whether a path is an object's URL."""
    return path.startswith((S3_PREFIX, MSC_PREFIX))


def store_of(url: str) -> ObjectStore:
    """The store of a URL.

    Raises:
        TdpError: the package that reads it is not installed.
        ValueError: no such kind of store.
    """
    if url.startswith(S3_PREFIX):
        from tdp_megatron.indexed.s3 import S3Store

        return S3Store.shared()
    if url.startswith(MSC_PREFIX):
        from tdp_megatron.indexed.multi_storage import MultiStorageStore

        return MultiStorageStore.shared()
    raise ValueError(
        f"{url}: only {S3_PREFIX} and {MSC_PREFIX} are read; other stores are reached through a profile of the "
        f"Multi-Storage Client, as {MSC_PREFIX}PROFILE/PATH"
    )


def stat_object(url: str) -> ObjectIdentity:
    """The object of a URL as it is now, tried several times.

    Raises:
        FileNotFoundError, PermissionError: as the store says.
        OSError: no answer.
    """
    store = store_of(url)
    return _with_retries(f"asking for {url}", url, lambda: store.stat(url))


def object_exists(url: str) -> bool:
    """Whether there is an object.

    Raises:
        PermissionError: the credentials do not allow to know.
        OSError: no answer.
    """
    try:
        stat_object(url)
    except FileNotFoundError:
        return False
    return True


def fetch(store: ObjectStore, identity: ObjectIdentity, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the object's bytes from ``offset`` on; a broken transfer goes on where it broke.

    Raises:
        FormatError: the object is another version by now.
        OSError: no success after several tries.
    """
    done = 0

    def attempt() -> None:
        nonlocal done
        for piece in store.stream(identity, offset + done, len(target) - done):
            if len(piece) > len(target) - done:
                raise TransientError(f"more than the {len(target)} bytes asked for came")
            target[done : done + len(piece)] = piece
            done += len(piece)
        if done < len(target):
            # Cut on its way, or another object by now.
            store.check_unchanged(identity, at_once=True)
            raise TransientError(f"only {done} of {len(target)} bytes came")

    if len(target):
        _with_retries(f"reading {len(target)} bytes from byte {offset}", identity.path, attempt)
        store.check_unchanged(identity, at_once=False)


def _with_retries(what: str, url: str, attempt: Callable[[], T]) -> T:
    failures = 0
    while True:
        try:
            return attempt()
        except TransientError as error:
            failures += 1
            if failures >= TRIES:
                raise OSError(errno.EIO, f"{what} failed {failures} times, last: {error}", url) from error
        # At random, so that the ranks of a job do not come back all at once.
        time.sleep(min(BACKOFF_SECONDS * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS) * random.uniform(0.5, 1.0))
