"""Conversations and plain texts from JSON lines, whatever fine-tuning layout the records have."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np

from tdp_megatron.errors import FormatError
from tdp_megatron.types import Int64Array

__all__ = ["ChatFormat", "JsonLines", "Record", "Turn", "parse_record"]

#: Layout of a record; ``auto`` decides by its keys.
ChatFormat = Literal["auto", "openai", "sharegpt", "alpaca", "text"]

_SCAN_BYTES = 1 << 24

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str


#: A conversation, or a text to train on as it is.
Record: TypeAlias = "list[Turn] | str"


class JsonLines:
    """Random access to the records of a JSON-lines file; empty lines are no records.

    Only where lines begin is kept in memory; a dataset pickles as its path.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._size = os.path.getsize(self.path)
        self._begins, self._ends, self._numbers = _find_lines(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self.path,)

    def __len__(self) -> int:
        return len(self._begins)

    def where(self, idx: int) -> str:
        """File, line and byte offset of a record, for messages."""
        return f"{self.path}, line {int(self._numbers[idx])}, byte {int(self._begins[idx])}"

    def __getitem__(self, idx: int) -> Mapping[str, Any]:
        """One record.

        Raises:
            FormatError: the line is not one JSON object, or the file has changed.
        """
        begin, end = int(self._begins[idx]), int(self._ends[idx])
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise FormatError(f"{self.path}: its size has changed since it was opened; open it again")
            file.seek(begin)
            line = file.read(end - begin)
        try:
            record = json.loads(line.decode("utf-8-sig" if begin == 0 else "utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.where(idx)}: byte {error.start} of the line is no UTF-8") from None
        except ValueError as error:
            raise FormatError(f"{self.where(idx)}: no JSON object on a line of its own: {error}") from None
        if not isinstance(record, dict):
            raise FormatError(f"{self.where(idx)}: a record is a JSON object, found {type(record).__name__}")
        return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _find_lines(path: str) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Begins and ends of the lines that are not blank, and their numbers from 1."""
    breaks = []
    offset = 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            breaks.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + offset)
            offset += len(chunk)
        ends = np.concatenate([*breaks, [offset]]).astype(np.int64)
        begins = np.concatenate([[0], ends[:-1] + 1])
        keep = ends > begins
        # Only short lines can be blank; long ones are not read for that.
        for i in np.flatnonzero(keep & (ends - begins <= 8)).tolist():
            file.seek(begins[i])
            keep[i] = bool(file.read(int(ends[i] - begins[i])).strip(b" \t\r\n\xef\xbb\xbf"))
    return begins[keep], ends[keep], np.flatnonzero(keep) + 1


def parse_record(record: Mapping[str, Any], layout: ChatFormat, where: str) -> Record:
    """The conversation or text of a record.

    Args:
        record: a JSON object with ``messages`` (openai), ``conversations`` (sharegpt), ``instruction`` and ``output``
            (alpaca) or ``text``.
        layout: which of them, or ``auto``.
        where: how messages name the record.

    Raises:
        FormatError: the record is not of that layout; the message says what is wrong where.
    """
    chosen = _detect(record, where) if layout == "auto" else layout
    if chosen == "text":
        return _text(record, "text", where)
    if chosen == "openai":
        turns = [
            _openai_turn(message, f"{where}, message {i}") for i, message in enumerate(_list(record, "messages", where))
        ]
    elif chosen == "sharegpt":
        turns = [
            _sharegpt_turn(message, f"{where}, message {i}")
            for i, message in enumerate(_list(record, "conversations", where))
        ]
    else:
        turns = _alpaca_turns(record, where)
    if not turns:
        raise FormatError(f"{where}: the conversation has no message")
    return turns


def _detect(record: Mapping[str, Any], where: str) -> ChatFormat:
    if "messages" in record:
        return "openai"
    if "conversations" in record:
        return "sharegpt"
    if "instruction" in record and "output" in record:
        return "alpaca"
    if "text" in record:
        return "text"
    raise FormatError(
        f"{where}: none of messages, conversations, instruction with output, text is among the keys {sorted(record)}; "
        f"the layouts are {', '.join(get_args(ChatFormat)[1:])}"
    )


def _list(record: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list):
        raise FormatError(f"{where}: {key} must be a list of messages, found {value!r:.80}")
    return value


def _text(record: Any, key: str, where: str) -> str:
    value = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(value, str):
        raise FormatError(f"{where}: {key} must be a text, found {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{where}: {key} has a lone surrogate, which is no text") from None
    return value


def _role(message: Any, key: str, roles: Mapping[str, str], where: str) -> str:
    name = _text(message, key, where)
    if name not in roles:
        raise FormatError(f"{where}: role {name!r} is unknown; roles are {', '.join(roles)}")
    return roles[name]


def _openai_turn(message: Any, where: str) -> Turn:
    role = _role(message, "role", _OPENAI_ROLES, where)
    if message.get("tool_calls"):
        raise FormatError(f"{where}: tool_calls are not supported; write calls into content")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise FormatError(f"{where}: a part of the content is no text: {part!r:.80}")
            texts.append(_text(part, "text", where))
        return Turn(role, "".join(texts))
    return Turn(role, _text(message, "content", where))


def _sharegpt_turn(message: Any, where: str) -> Turn:
    role_key, text_key = (
        ("from", "value") if isinstance(message, Mapping) and "from" in message else ("role", "content")
    )
    return Turn(_role(message, role_key, _SHAREGPT_ROLES, where), _text(message, text_key, where))


def _alpaca_turns(record: Mapping[str, Any], where: str) -> list[Turn]:
    turns = []
    if record.get("system"):
        turns.append(Turn("system", _text(record, "system", where)))
    for i, pair in enumerate(record.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise FormatError(f"{where}: history[{i}] must be a pair of texts, found {pair!r:.80}")
        question, answer = (_text({"history": text}, "history", where) for text in pair)
        turns += [Turn("user", question), Turn("assistant", answer)]
    question = _text(record, "instruction", where)
    if record.get("input"):
        question = f"{question}\n\n{_text(record, 'input', where)}"
    return [*turns, Turn("user", question), Turn("assistant", _text(record, "output", where))]
