"""Finding input files and cutting them into batches that keep their order, places and whole lines."""

from __future__ import annotations

import fnmatch
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tdp_megatron.errors import FormatError, TdpError

__all__ = ["FileBatch", "InputFile", "LineBatch", "find_inputs", "iter_batches", "read_text_file"]

_JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_BLOCK = 1 << 20
_BATCH_FILES = 256
UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    is_jsonl: bool
    """One JSON object per line; otherwise the file is one document."""
    size: int
    """Bytes on disk."""


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Whole lines of one JSONL file."""

    path: str
    first_line: int
    """Number of the first line, from 1."""
    first_byte: int
    """Where it starts, bytes in the decompressed file."""
    data: bytes
    ends_file: bool
    """Whether the last line is the file's last."""
    disk_bytes: int
    """How far this batch moves the reading of the input, bytes on disk."""
    error: str = ""
    """Why the rest of the file cannot be read."""


@dataclass(frozen=True, slots=True)
class FileBatch:
    """Plain-text files, each one document."""

    paths: list[str] = field(default_factory=list)
    disk_bytes: int = 0
    """Bytes on disk."""


def find_inputs(inputs: Sequence[str], text_globs: Sequence[str], exclude: Sequence[str] = ()) -> list[InputFile]:
    """The files of ``--input`` in reading order: as given, and inside a folder by name.

    A file that is named is JSONL unless it ends in .txt or matches a text glob. Of a folder, with text globs the files
    that match one are taken, each a document; without, all files are, those with a JSONL suffix as JSONL. Hidden ones
    are left out.

    Args:
        inputs: files and folders.
        text_globs: patterns relative to a folder, such as ``**/*.py``.
        exclude: files never taken from a folder.

    Raises:
        FileNotFoundError: an input does not exist.
        FormatError: there is no file at all.
    """
    found: list[InputFile] = []
    left_out = {os.path.realpath(path) for path in exclude}
    for path in inputs:
        if os.path.isdir(path):
            found += [file for file in _in_folder(path, text_globs) if os.path.realpath(file.path) not in left_out]
        elif os.path.exists(path):
            name = os.path.basename(path)
            as_text = _plain_suffix(name) == ".txt" or any(fnmatch.fnmatch(name, _last(g)) for g in text_globs)
            found.append(InputFile(path, not as_text, os.path.getsize(path)))
        else:
            raise FileNotFoundError(f"input {path} does not exist")
    if not found:
        globs = f" that match {', '.join(text_globs)}" if text_globs else ""
        raise FormatError(f"no files{globs} in {', '.join(inputs)}")
    return found


def _last(pattern: str) -> str:
    return pattern.rsplit("/", 1)[-1]


def _plain_suffix(name: str) -> str:
    """The suffix in lower case, below a compression suffix."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in _COMPRESSED_SUFFIXES else suffix


def _in_folder(folder: str, text_globs: Sequence[str]) -> list[InputFile]:
    root = Path(folder)
    chosen = {path for pattern in text_globs or ("**/*",) for path in root.glob(pattern)}
    files = []
    for path in chosen:
        relative = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            is_jsonl = not text_globs and _plain_suffix(path.name) in _JSONL_SUFFIXES
            # By bytes: the order must not depend on the locale.
            files.append((os.fsencode(relative), InputFile(str(path), is_jsonl, path.stat().st_size)))
    return [file for _, file in sorted(files, key=lambda pair: pair[0])]


def iter_batches(files: Sequence[InputFile], batch_bytes: int = _BLOCK) -> Iterator[LineBatch | FileBatch]:
    """Batches of about ``batch_bytes``, in order; the cut does not depend on the number of workers."""
    pending = FileBatch()
    for file in files:
        if file.is_jsonl:
            if pending.paths:
                yield pending
                pending = FileBatch()
            yield from _line_batches(file, batch_bytes)
            continue
        pending = FileBatch([*pending.paths, file.path], pending.disk_bytes + file.size)
        if pending.disk_bytes >= batch_bytes or len(pending.paths) >= _BATCH_FILES:
            yield pending
            pending = FileBatch()
    if pending.paths:
        yield pending


def _line_batches(file: InputFile, batch_bytes: int) -> Iterator[LineBatch]:
    parts: list[bytes] = []
    waiting = 0
    line, byte = 1, 0
    disk = disk_given = 0
    at_start = True
    error = ""
    for block, disk in _until_error(file.path, batch_bytes):
        if isinstance(block, FormatError):
            error = str(block)
            break
        if at_start:
            at_start = False
            try:
                block, byte = _without_bom(file.path, block)
            except FormatError as failure:
                error = str(failure)
                break
        # Parts without a newline are only kept, so that one huge line costs no quadratic copying.
        cut = block.rfind(b"\n") + 1
        if not cut:
            parts.append(block)
            waiting += len(block)
            continue
        data = b"".join([*parts, block[:cut]])
        yield LineBatch(file.path, line, byte, data, False, disk - disk_given)
        disk_given = disk
        line += data.count(b"\n")
        byte += len(data)
        parts, waiting = ([block[cut:]], len(block) - cut) if cut < len(block) else ([], 0)
    if waiting or error:
        yield LineBatch(file.path, line, byte, b"".join(parts), True, disk - disk_given, error)


def _until_error(path: str, size: int) -> Iterator[tuple[bytes | FormatError, int]]:
    """The blocks of a file, and what ends it early in place of the rest."""
    disk = 0
    try:
        for block, disk in _blocks(path, size):
            yield block, disk
    except FormatError as error:
        yield error, disk


def _without_bom(path: str, data: bytes) -> tuple[bytes, int]:
    if data.startswith(_UTF16_BOMS):
        raise FormatError(f"{path}: byte 0: the file is UTF-16; convert it to UTF-8 first")
    skipped = len(UTF8_BOM) if data.startswith(UTF8_BOM) else 0
    return data[skipped:], skipped


def read_text_file(path: str) -> tuple[bytes, int]:
    """The content of a plain-text file without its byte order mark, and how many bytes that mark had."""
    return _without_bom(path, b"".join(block for block, _ in _blocks(path, _BLOCK)))


def _blocks(path: str, size: int) -> Iterator[tuple[bytes, int]]:
    """Decompressed blocks, never empty, and how much of the file on disk has been read.

    The first one is long enough for a byte order mark, where the file is.
    """
    start: tuple[bytes, int] | None = (b"", 0)
    for block, disk in _raw_blocks(path, size):
        if start is None:
            yield block, disk
            continue
        start = (start[0] + block, disk)
        if len(start[0]) >= len(UTF8_BOM):
            yield start
            start = None
    if start is not None and start[0]:
        yield start


def _raw_blocks(path: str, size: int) -> Iterator[tuple[bytes, int]]:
    with open(path, "rb") as file:
        suffix = os.path.splitext(path.lower())[1]
        if suffix == ".gz":
            yield from _gzip_blocks(path, file, size)
        elif suffix == ".zst":
            yield from _zstd_blocks(path, file, size)
        else:
            done = 0
            while block := file.read(size):
                done += len(block)
                yield block, done


def _gzip_blocks(path: str, file: IO[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    done = 0
    with gzip.GzipFile(fileobj=file) as stream:
        failure: Exception | None = None
        while failure is None:
            parts: list[bytes] = []
            waiting = 0
            try:
                # In small pieces: one that fails takes what was read before with it.
                while waiting < size and (part := stream.read1(size - waiting)):
                    parts.append(part)
                    waiting += len(part)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                failure = error
            done += waiting
            if waiting:
                yield b"".join(parts), file.tell()
            if waiting < size and failure is None:
                return
    if isinstance(failure, EOFError):
        raise FormatError(f"{path}: the gzip file is cut after {done} decompressed bytes") from failure
    raise FormatError(f"{path}: damaged gzip data after {done} decompressed bytes: {failure}") from failure


def _zstd_blocks(path: str, file: IO[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    try:
        import zstandard
    except ImportError as error:
        raise TdpError(f"{path} needs the package zstandard: pip install 'tdp-megatron[tokenizers]'") from error
    decompressor: Any = None
    done = 0
    # Frame by frame through decompressobj: the package's stream reader takes a cut file for a complete one.
    while data := file.read(size):
        while data:
            decompressor = decompressor or zstandard.ZstdDecompressor().decompressobj()
            try:
                block = decompressor.decompress(data)
            except zstandard.ZstdError as error:
                raise FormatError(f"{path}: damaged zstd data after {done} decompressed bytes: {error}") from error
            data = decompressor.unused_data if decompressor.eof else b""
            if decompressor.eof:
                decompressor = None
            if block:
                done += len(block)
                yield block, file.tell()
    if decompressor is not None:
        raise FormatError(f"{path}: the zstd file is cut after {done} decompressed bytes")
