"""How few bytes tokens, labels, loss mask and positions can travel in: what follows from the tokens is not sent.

In pretraining the label of a token is the next token, the loss mask is one and positions count up: then two or four
bytes per token are enough where four keys take 28. All ranks must agree, so each says what holds for its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["TokenForm", "describe_tokens"]

_LABELS_FOLLOW = 1  # every label is the next token, wherever there is one
_LABELS_FOLLOW_LOSS = 2  # the same where there is a loss; elsewhere there is no label
_LOSS_IS_ONE = 4  # a loss wherever there is a label
_LOSS_IS_BINARY = 8
_POSITIONS_COUNT = 16
_EVERYTHING = 31

#: Codes of the .idx format: uint16, int32, int64.
_UINT16, _INT32, _INT64 = 8, 4, 5
_DTYPES: dict[int, np.dtype[Any]] = {
    _UINT16: np.dtype(np.uint16),
    _INT32: np.dtype(np.int32),
    _INT64: np.dtype(np.int64),
}


@dataclass(frozen=True, slots=True)
class TokenForm:
    """What all ranks' samples have in common, and so how they travel."""

    derived_labels: bool
    """Tokens travel with the one that follows them, labels do not."""
    labels_need_loss: bool
    """Labels are taken back where there is no loss."""
    loss: str
    """``derived``, ``binary`` (a byte per token) or ``raw``."""
    derived_positions: bool
    dtype_code: int
    """Of the tokens on the wire."""

    @staticmethod
    def agree(bits: Int64Array, largest: Int64Array) -> TokenForm:
        """The form that fits all ranks.

        Args:
            bits: int64 [R], from ``describe_tokens``.
            largest: int64 [R], largest token id of each rank, or a huge number where some are negative.
        """
        common = int(np.bitwise_and.reduce(bits))
        top = int(largest.max())
        labels = bool(common & (_LABELS_FOLLOW | _LABELS_FOLLOW_LOSS))
        loss = "binary" if common & _LOSS_IS_BINARY else "raw"
        if labels and common & _LOSS_IS_ONE:
            loss = "derived"
        return TokenForm(
            derived_labels=labels,
            labels_need_loss=labels and not common & _LABELS_FOLLOW,
            loss=loss,
            derived_positions=bool(common & _POSITIONS_COUNT),
            dtype_code=_UINT16 if top < 1 << 16 else _INT32 if top < 1 << 31 else _INT64,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens on the wire."""
        return _DTYPES[self.dtype_code]

    def is_sent_raw(self, key: str) -> bool:
        """Whether a key travels as it is."""
        if key in ("tokens", "labels"):
            return not self.derived_labels
        if key == "loss_mask":
            return self.loss == "raw"
        return not (key == "position_ids" and self.derived_positions)


def describe_tokens(
    arrays: Mapping[str, npt.NDArray[Any]], offsets: Int64Array
) -> tuple[int, int, npt.NDArray[np.int64]]:
    """What holds for one rank's samples.

    Args:
        arrays: per key, the samples one after the other.
        offsets: int64 [n + 1], where each begins.

    Returns:
        Bits for ``TokenForm.agree``, the largest token id (2^62 where some are negative), and int64 [n] the label of
        each sample's last token, ``IGNORE_LABEL`` where it has none.
    """
    count = len(offsets) - 1
    if offsets[-1] == 0:
        return _EVERYTHING, 0, np.full(count, IGNORE_LABEL, dtype=np.int64)
    tokens, labels, loss = arrays["tokens"], arrays["labels"], arrays["loss_mask"]
    ends = offsets[1:][offsets[1:] > offsets[:-1]] - 1
    last = np.full(count, IGNORE_LABEL, dtype=np.int64)
    last[offsets[1:] > offsets[:-1]] = labels[ends]
    follows = np.ones(len(tokens), dtype=bool)
    np.equal(labels[:-1], tokens[1:], out=follows[:-1])
    follows[ends] = True
    bits = 0
    known_ends = bool(((last >= 0) | (last == IGNORE_LABEL)).all())
    all_follow = bool(follows.all())
    if known_ends and all_follow:
        bits |= _LABELS_FOLLOW
    absent = loss == 0
    binary = bool((absent | (loss == 1)).all())
    if known_ends:
        fits = np.where(absent, labels == IGNORE_LABEL, follows)
        fits[ends] = (labels[ends] == IGNORE_LABEL) | ~absent[ends]
        if fits.all():
            bits |= _LABELS_FOLLOW_LOSS
    if binary:
        bits |= _LOSS_IS_BINARY
        expected = np.zeros(len(ends), dtype=bool)
        np.equal(labels[ends], IGNORE_LABEL, out=expected)
        without_ends = absent.copy()
        without_ends[ends] = False
        if not without_ends.any() and np.array_equal(absent[ends], expected):
            bits |= _LOSS_IS_ONE
    positions = arrays.get("position_ids")
    if positions is None or np.array_equal(
        positions, np.arange(len(tokens)) - np.repeat(offsets[:-1], np.diff(offsets))
    ):
        bits |= _POSITIONS_COUNT
    least, largest = int(tokens.min()), int(tokens.max())
    largest = max(largest, int(last.max(initial=0)))
    return bits, (1 << 62) if least < 0 else largest, last
