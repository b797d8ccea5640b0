"""Opening a ``.bin``/``.idx`` pair: both versions pinned, the index checked, the reader chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.layout import IndexArrays, read_layout
from tdp_megatron.indexed.object_storage import (
    ObjectStorageConfig,
    default_config,
    is_object_storage_path,
    stat_object,
    store_of,
)
from tdp_megatron.indexed.paths import get_bin_path, get_idx_path
from tdp_megatron.indexed.pool import OPEN_FILES
from tdp_megatron.indexed.readers import BinReader, FileBinReader, FileIdentity, MMapBinReader, open_map

__all__ = ["OpenedPair", "check_storage", "open_pair"]

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """What stays known of a pair of files while the pool may close them."""

    reader: BinReader
    idx_identity: FileIdentity
    idx_name: str
    """The index for messages: its path, or its URL."""
    multimodal: bool
    sequence_count: int
    num_tokens: int

    def arrays(self) -> IndexArrays:
        """The index, from the pool of open files."""

        def map_again() -> IndexArrays:
            bin_ = self.reader.identity
            data = open_map(self.idx_identity)
            return read_layout(self.idx_name, data, bin_.path, bin_.size, self.multimodal, known=True)

        arrays: IndexArrays = OPEN_FILES.get(("index", self.idx_identity, self.reader.identity), map_again)
        return arrays


def check_storage(path_prefix: str, mmap: bool, config: ObjectStorageConfig | None) -> ObjectStorageConfig | None:
    """How the objects of a prefix are read; None for files.

    Raises:
        ValueError: objects cannot be mapped, files need no such configuration, other stores are not read.
    """
    if not is_object_storage_path(path_prefix):
        if _URL.match(path_prefix):
            store_of(path_prefix)
        if config is not None:
            raise ValueError(f"{path_prefix} is no s3:// or msc:// path; leave object_storage_config unset")
        return None
    if mmap:
        raise ValueError(f"{path_prefix}: objects cannot be mapped; set mmap=False (mmap_bin_files=False in configs)")
    return config or default_config()


def open_pair(
    path_prefix: str,
    multimodal: bool,
    mmap: bool,
    config: ObjectStorageConfig | None,
    check: Callable[[str, IndexArrays, int, int], None],
) -> OpenedPair:
    """Open and check a pair.

    Args:
        path_prefix: path or URL without ``.bin`` or ``.idx``.
        multimodal: whether the index has a mode per sequence.
        mmap: whether the data file is mapped.
        config: set for objects.
        check: is given the prefix, the arrays and the sizes of both files in bytes; raises for what is not wanted.

    Raises:
        FileNotFoundError: one of the two is missing.
        FormatError: they are not what the index says.
    """
    idx_name, bin_name = get_idx_path(path_prefix), get_bin_path(path_prefix)
    if config is None:
        idx_identity = _identify(path_prefix, idx_name)
        bin_identity = _identify(path_prefix, bin_name)
        reader: type[BinReader] = MMapBinReader if mmap else FileBinReader
        data = open_map(idx_identity)
        arrays = read_layout(idx_name, data, bin_name, bin_identity.size, multimodal)
        # A writer replaces first the data, then the index: the same index before and after means one pair.
        if _identify(path_prefix, idx_name) != idx_identity:
            raise FormatError(f"{idx_name}: was replaced while it was being opened; open the dataset again")
        source = reader(bin_identity, arrays.dtype)
    else:
        from tdp_megatron.indexed.index_cache import local_index
        from tdp_megatron.indexed.object_reader import ObjectBinReader

        bin_object = stat_object(bin_name)
        idx_identity = local_index(idx_name, config)
        arrays = read_layout(idx_name, open_map(idx_identity), bin_name, bin_object.size, multimodal)
        source = ObjectBinReader(bin_object, arrays.dtype, config)
    check(path_prefix, arrays, source.identity.size, idx_identity.size)
    OPEN_FILES.get(("index", idx_identity, source.identity), lambda: arrays)
    return OpenedPair(source, idx_identity, idx_name, multimodal, len(arrays.sequence_lengths), arrays.num_tokens)


def _identify(path_prefix: str, path: str) -> FileIdentity:
    try:
        return FileIdentity.of(path)
    except FileNotFoundError:
        there = [p for p in (get_bin_path(path_prefix), get_idx_path(path_prefix)) if os.path.exists(p)]
        hint = f"only {there[0]} is there: its writing or copying was interrupted" if there else "nor its partner"
        if path_prefix.endswith((".bin", ".idx")):
            hint = f"path_prefix is given without {path_prefix[-4:]}"
        raise FileNotFoundError(f"{path} does not exist ({hint})") from None
