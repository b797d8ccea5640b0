"""How the turns of a conversation become one sequence of tokens, and which of them are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tdp_megatron.datasets.chat_records import Turn
from tdp_megatron.types import Int64Array

__all__ = ["CHATML", "ChatTemplate", "Frame", "TextEncoder"]


class TextEncoder(Protocol):
    """What is asked of a tokenizer; ``tdp_megatron.tokenization.load_tokenizer`` gives such."""

    def token_id(self, token: str) -> int | None:
        """Id of a special token, None if there is none of that spelling."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        """All ids one after the other, and the number of ids of each text. Special tokens are not looked for."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the content of one role's messages."""

    begin: str | None
    """Special token before it; None for none."""
    header: str
    """Text before it, encoded together with it."""
    end: str | None
    """Special token after it; learned with the content. None for none."""
    footer: str = ""
    """Text after that; never learned."""


@dataclass(frozen=True)
class ChatTemplate:
    """Frames by role. Content is only text: special tokens spelled out in it are not special."""

    frames: Mapping[str, Frame]
    """By role: ``system``, ``user``, ``assistant``, ``tool``."""
    start: str | None = None
    """Special token before the first message; None for none."""
    loss_roles: Sequence[str] = field(default=("assistant",))
    """Roles whose content and end token are learned."""

    def encode(self, turns: Sequence[Turn], encoder: TextEncoder) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Tokens of a conversation.

        Args:
            turns: its messages.
            encoder: the tokenizer.

        Returns:
            ids int64 [n], and bool [n], whether each is to be learned.

        Raises:
            ValueError: a role without a frame, or a special token that the tokenizer does not have.
        """
        parts: list[tuple[Int64Array, bool]] = []
        if self.start is not None:
            parts.append((self._special(self.start, encoder), False))
        for turn in turns:
            if turn.role not in self.frames:
                raise ValueError(f"the chat template has no frame for role {turn.role!r}, only {sorted(self.frames)}")
            frame = self.frames[turn.role]
            learned = turn.role in self.loss_roles
            if frame.begin is not None:
                parts.append((self._special(frame.begin, encoder), False))
            parts += _split_header(frame.header, turn.content, learned, encoder)
            if frame.end is not None:
                parts.append((self._special(frame.end, encoder), learned))
            if frame.footer:
                parts.append((encoder.encode_batch([frame.footer])[0], False))
        ids = np.concatenate([part for part, _ in parts]).astype(np.int64)
        return ids, np.concatenate([np.full(len(part), learned) for part, learned in parts])

    @staticmethod
    def _special(token: str, encoder: TextEncoder) -> Int64Array:
        found = encoder.token_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no special token {token!r}, which the chat template needs")
        return np.array([found], dtype=np.int64)


def _split_header(header: str, content: str, learned: bool, encoder: TextEncoder) -> list[tuple[Int64Array, bool]]:
    """Header and content as the tokenizer sees them together; a token of both belongs to the content."""
    ids, counts = encoder.encode_batch([header + content, header])
    whole, alone = ids[: counts[0]], ids[counts[0] :]
    size = min(len(whole), len(alone))
    differing = np.flatnonzero(whole[:size] != alone[:size])
    first = int(differing[0]) if len(differing) else size
    return [(whole[:first], False), (whole[first:], learned)]


def _chatml(role: str) -> Frame:
    return Frame("<|im_start|>", f"{role}\n", "<|im_end|>", "\n")


#: ``<|im_start|>role\ncontent<|im_end|>\n``.
CHATML = ChatTemplate({role: _chatml(role) for role in ("system", "user", "assistant", "tool")})
