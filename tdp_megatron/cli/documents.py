"""From a batch of input to the tokens of its documents: what each worker process does."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tdp_megatron.cli.inputs import FileBatch, LineBatch, read_text_file
from tdp_megatron.errors import FormatError
from tdp_megatron.tokenization import load_tokenizer

__all__ = ["MAX_BAD_EXAMPLES", "BadDocument", "DocumentEncoder", "EncodedBatch"]

#: A file of another kind can have millions of bad lines; only the first are told one by one.
MAX_BAD_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class BadDocument:
    """A line or file that gives no document."""

    reason: str
    """Kind of fault, for counting."""
    message: str
    """File, line, byte offset and what is wrong."""


@dataclass(slots=True)
class EncodedBatch:
    """Tokens of the documents of one batch, by output key."""

    tokens: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """All tokens of the key's documents."""
    lengths: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """int64 [documents], tokens of each; 0 for an empty document."""
    documents: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the texts."""
    bad: Counter[str] = field(default_factory=Counter)
    """Lines and files left out, by reason."""
    bad_examples: list[str] = field(default_factory=list)
    """Messages of the first of them."""
    disk_bytes: int = 0


class _BadTextError(Exception):
    def __init__(self, reason: str, text: str, position: int | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.position = position
        """Bytes from the start of the line or file."""


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Parses and tokenizes batches; the tokenizer is loaded once per process.

    Policy for JSON, whatever the library underneath accepts: a byte order mark only at the start of a file, no NaN or
    Infinity, no lone surrogates in a text, one object per line; blank lines are no documents.
    """

    tokenizer: str
    """Path, or "bytes"."""
    keys: tuple[str, ...]
    """JSON keys; a plain-text file counts as the first."""
    eod: int | None
    """Put after every document that is not empty."""
    dtype: str
    """Element type of the output."""
    stop_at_bad: bool
    """Whether the batch ends at its first bad document."""

    def __call__(self, batch: LineBatch | FileBatch) -> EncodedBatch:
        """Encode one batch; bad documents are returned, not raised."""
        result = EncodedBatch(disk_bytes=batch.disk_bytes)
        texts: dict[str, list[str]] = {key: [] for key in self.keys}
        source = self._lines(batch) if isinstance(batch, LineBatch) else self._files(batch)
        for item in source:
            if isinstance(item, BadDocument):
                result.bad[item.reason] += 1
                if len(result.bad_examples) < MAX_BAD_EXAMPLES:
                    result.bad_examples.append(item.message)
                if self.stop_at_bad:
                    break
                continue
            for key, text in zip(self.keys, item, strict=True):
                texts[key].append(text)
        tokenizer = _tokenizer(self.tokenizer)
        for key, documents in texts.items():
            flat, lengths = tokenizer.encode_batch(documents)
            if self.eod is not None:
                flat = np.insert(flat, np.cumsum(lengths)[lengths > 0], self.eod)
                lengths = lengths + (lengths > 0)
            result.tokens[key] = self._narrow(flat)
            result.lengths[key] = lengths
            result.documents = len(documents)
            result.text_bytes += sum(len(text.encode()) for text in documents)
        return result

    def _narrow(self, flat: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        limits = np.iinfo(self.dtype)
        if len(flat) and not limits.min <= flat.min() <= flat.max() <= limits.max:
            raise FormatError(f"the tokenizer gave ids {flat.min()} to {flat.max()}, which do not fit {self.dtype}")
        return flat.astype(self.dtype)

    def _files(self, batch: FileBatch) -> Iterator[list[str] | BadDocument]:
        for path in batch.paths:
            shown = _shown(path)
            try:
                data, skipped = read_text_file(path)
                text = _decode(data)
            except FormatError as error:
                yield BadDocument("unreadable_file", str(error))
            except _BadTextError as bad:
                offset = skipped + (bad.position or 0)
                yield BadDocument(bad.reason, f"{shown}: byte {offset}: {bad}; is it a text file?")
            else:
                yield [text]

    def _lines(self, batch: LineBatch) -> Iterator[list[str] | BadDocument]:
        if batch.error:
            yield BadDocument("unreadable_file", batch.error)
        start = 0
        number = batch.first_line - 1
        while start < len(batch.data):
            end = batch.data.find(b"\n", start)
            unterminated = end < 0
            line = batch.data[start:] if unterminated else batch.data[start:end]
            number += 1
            if line.strip():
                try:
                    yield self._parse(line, unterminated and batch.ends_file)
                except _BadTextError as bad:
                    offset = batch.first_byte + start + (bad.position or 0)
                    compressed = batch.path.lower().endswith((".gz", ".zst"))
                    where = f"byte {offset}{' of the decompressed text' if compressed else ''}"
                    yield BadDocument(bad.reason, f"{_shown(batch.path)}: line {number}, {where}: {bad}")
            start += len(line) + 1

    def _parse(self, line: bytes, unterminated: bool) -> list[str]:
        text = _decode(line)
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            position = len(text[: error.pos].encode())
            if error.msg == "Extra data":
                raise _BadTextError(
                    "two_objects", "more follows the first JSON value; one object per line", position
                ) from None
            if unterminated:
                raise _BadTextError(
                    "cut_line", f"the last line is cut, it has no newline: {error.msg}", position
                ) from None
            raise _BadTextError("invalid_json", f"invalid JSON: {error.msg}", position) from None
        except (ValueError, RecursionError) as error:
            raise _BadTextError("invalid_json", f"invalid JSON: {error}") from None
        if not isinstance(value, dict):
            raise _BadTextError("not_an_object", f"expected a JSON object, found {_kind(value)}")
        return [self._text(value, key) for key in self.keys]

    @staticmethod
    def _text(value: dict[str, Any], key: str) -> str:
        if key not in value:
            present = ", ".join(sorted(value)[:10]) or "none"
            raise _BadTextError("missing_key", f"no key {key!r}; the object has: {present}")
        text = value[key]
        if text is None:
            raise _BadTextError("null_text", f"{key!r} is null")
        if not isinstance(text, str):
            raise _BadTextError("not_a_string", f"{key!r} must be a string, found {_kind(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _BadTextError(
                "lone_surrogate",
                f"{key!r} has the lone surrogate \\u{ord(text[error.start]):04x}, which is no character",
            ) from None
        return text


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wrong = data[error.start : error.start + 1].hex()
        raise _BadTextError("invalid_utf8", f"invalid UTF-8: byte 0x{wrong}, {error.reason}", error.start) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(path: str) -> str:
    # File names may hold bytes that are not UTF-8; messages must not.
    return os.fsencode(path).decode(errors="backslashreplace")


_loaded: dict[str, Any] = {}


def _tokenizer(path: str) -> Any:
    if path not in _loaded:
        _loaded[path] = load_tokenizer(path)
    return _loaded[path]
