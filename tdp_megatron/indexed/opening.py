"""Opening a ``.bin``/``.idx`` pair: both versions pinned, the index checked, the reader chosen."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed.header import Header
from tdp_megatron.indexed.layout import (
    HEAD_SIZE,
    IndexArrays,
    last_sequence_at,
    read_header,
    read_layout,
    wrong_bin_size,
)
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


@dataclass(slots=True)
class OpenedPair:
    """What stays known of a pair of files while the pool may close them."""

    reader: BinReader
    idx_identity: FileIdentity
    idx_name: str
    """The index for messages: its path, or its URL."""
    multimodal: bool
    sequence_count: int
    num_tokens: int
    checked: bool
    """Whether the arrays have been looked at, not only the header."""

    def arrays(self) -> IndexArrays:
        """The checked index, from the pool of open files."""

        def map_again() -> IndexArrays:
            bin_ = self.reader.identity
            data = open_map(self.idx_identity)
            arrays = read_layout(self.idx_name, data, bin_.path, bin_.size, self.multimodal, known=self.checked)
            self.checked = True
            return arrays

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
    check: Callable[[str, Header, int, int], None],
    *,
    header_only: bool = False,
) -> OpenedPair:
    """Open and check a pair.

    Args:
        path_prefix: path or URL without ``.bin`` or ``.idx``.
        multimodal: whether the index has a mode per sequence.
        mmap: whether the data file is mapped.
        config: set for objects.
        check: is given the prefix, the header and the sizes of both files in bytes; raises for what is not wanted.
        header_only: check the sizes of the files against the header and the last sequence now, and the arrays when
            they are first used; objects are checked whole.

    Raises:
        FileNotFoundError: one of the two is missing.
        FormatError: they are not what the index says.
    """
    idx_name, bin_name = get_idx_path(path_prefix), get_bin_path(path_prefix)
    arrays = None
    if config is None:
        if header_only:
            idx_identity, header, needed = _read_ends(path_prefix, idx_name, multimodal)
            bin_identity = _identify(path_prefix, bin_name)
            if bin_identity.size != needed:
                raise wrong_bin_size(bin_name, bin_identity.size, needed, header)
        else:
            idx_identity, bin_identity = _identify(path_prefix, idx_name), _identify(path_prefix, bin_name)
            arrays = read_layout(idx_name, open_map(idx_identity), bin_name, bin_identity.size, multimodal)
            header = arrays.header
        # A writer replaces first the data, then the index: the same index before and after means one pair.
        if _identify(path_prefix, idx_name) != idx_identity:
            raise FormatError(f"{idx_name}: was replaced while it was being opened; open the dataset again")
        reader: type[BinReader] = MMapBinReader if mmap else FileBinReader
        source = reader(bin_identity, header.dtype)
    else:
        from tdp_megatron.indexed.index_cache import local_index
        from tdp_megatron.indexed.object_reader import ObjectBinReader

        bin_object = stat_object(bin_name)
        idx_identity = local_index(idx_name, config)
        arrays = read_layout(idx_name, open_map(idx_identity), bin_name, bin_object.size, multimodal)
        header = arrays.header
        source = ObjectBinReader(bin_object, header.dtype, config)
    check(path_prefix, header, source.identity.size, idx_identity.size)
    if arrays is not None:
        OPEN_FILES.get(("index", idx_identity, source.identity), lambda: arrays)
    num_tokens = source.identity.size // header.dtype.itemsize
    return OpenedPair(
        source, idx_identity, idx_name, multimodal, header.sequence_count, num_tokens, checked=arrays is not None
    )


def _read_ends(path_prefix: str, path: str, multimodal: bool) -> tuple[FileIdentity, Header, int]:
    """The identity of an index file, its header, and the bytes that its last sequence makes the data file have."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        _identify(path_prefix, path)  # raises, with a hint
        raise
    try:
        identity = FileIdentity.of(path, descriptor)
        header = read_header(path, os.read(descriptor, HEAD_SIZE), identity.size, multimodal)
        last = last_sequence_at(header)
        if last is None:
            return identity, header, 0
        length, pointer = (
            int.from_bytes(os.pread(descriptor, size, at), "little", signed=True)
            for size, at in zip((4, 8), last, strict=True)
        )
        return identity, header, pointer + length * header.dtype.itemsize
    finally:
        os.close(descriptor)


def _identify(path_prefix: str, path: str) -> FileIdentity:
    try:
        return FileIdentity.of(path)
    except FileNotFoundError:
        there = [p for p in (get_bin_path(path_prefix), get_idx_path(path_prefix)) if os.path.exists(p)]
        hint = f"only {there[0]} is there: its writing or copying was interrupted" if there else "nor its partner"
        if path_prefix.endswith((".bin", ".idx")):
            hint = f"path_prefix is given without {path_prefix[-4:]}"
        elif not there and (longer := sorted(glob.glob(f"{glob.escape(path_prefix)}_*_document.idx"))):
            hint = f"{longer[0][:-4]} is there"
        raise FileNotFoundError(f"{path} does not exist ({hint})") from None
