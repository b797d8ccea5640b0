"""Local copies of ``.idx`` objects: downloaded once, by one of the processes that share the folder."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import numpy as np

from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.indexed.object_storage import (
    MSC_PREFIX,
    S3_PREFIX,
    ObjectIdentity,
    ObjectStorageConfig,
    fetch,
    stat_object,
    store_of,
)
from tdp_megatron.indexed.paths import fsync_folder, locked_file
from tdp_megatron.indexed.readers import FileIdentity
from tdp_megatron.indexed.transfers import run_in_threads

__all__ = ["get_index_cache_path", "local_index"]

_PART = 16 * 1024 * 1024


def get_index_cache_path(idx_url: str, config: ObjectStorageConfig) -> str:
    """Where the local copy of an index is, the same place as Megatron's.

    Raises:
        ValueError: the URL would lead out of the folder.
    """
    name = idx_url.removeprefix(S3_PREFIX).removeprefix(MSC_PREFIX)
    if ".." in name.split("/"):
        raise ValueError(f"{idx_url}: a name with '..' in it cannot be kept below {config.path_to_idx_cache}")
    return os.path.join(config.path_to_idx_cache, *[part for part in name.split("/") if part])


def local_index(idx_url: str, config: ObjectStorageConfig) -> FileIdentity:
    """A local copy of the index as it is now in the store.

    Raises:
        FileNotFoundError: there is no such object.
        OSError: no answer, or no room.
    """
    remote = stat_object(idx_url)
    path = get_index_cache_path(idx_url, config)
    with contextlib.suppress(_StaleError, FileNotFoundError):
        return _copy(path, remote)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with locked_file(path + ".lock"):
        # Another process may have brought it meanwhile.
        with contextlib.suppress(_StaleError, FileNotFoundError):
            return _copy(path, remote)
        _download(path, remote)
    return _copy(path, remote)


class _StaleError(Exception):
    """The local copy is of another version, or nothing says of which."""


def _describe(path: str, remote: ObjectIdentity, local: FileIdentity) -> dict[str, Any]:
    return {
        "url": remote.path,
        "size": remote.size,
        "version": remote.version,
        "file": [local.size, local.mtime_ns],
    }


def _copy(path: str, remote: ObjectIdentity) -> FileIdentity:
    local = FileIdentity.of(path)
    try:
        with open(path + ".source.json", encoding="utf-8") as file:
            described = json.load(file)
    except ValueError:
        raise _StaleError from None
    if described != _describe(path, remote, local):
        raise _StaleError
    return local


def _download(path: str, remote: ObjectIdentity) -> None:
    store = store_of(remote.path)
    output = TemporaryOutput(path)
    try:
        descriptor = output.file.fileno()

        def bring(start: int) -> None:
            part = np.empty(min(_PART, remote.size - start), dtype=np.uint8)
            fetch(store, remote, start, part.data)
            done = 0
            while done < len(part):
                done += os.pwrite(descriptor, part[done:].data, start + done)

        if remote.size:
            run_in_threads(bring, range(0, remote.size, _PART))
        output.sync()
        output.rename()
    finally:
        output.discard()
    note = TemporaryOutput(path + ".source.json")
    note.file.write(json.dumps(_describe(path, remote, FileIdentity.of(path)), indent=1).encode())
    note.sync()
    note.rename()
    fsync_folder(path)
