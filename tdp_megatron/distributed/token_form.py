"""How few bytes tokens, labels, loss mask and positions can travel in: what follows from the tokens is not sent.

In pretraining the label of a token is the next token, the loss mask is one and positions count up: then two or four
bytes per token are enough where four keys take 28. All ranks must agree, so each says what holds for its samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tdp_megatron.types import Int64Array

__all__ = ["NOTHING_TO_SEND", "TokenForm"]

# The bits of csrc/wire.h.
_LABELS_FOLLOW = 1  # every label is the next token, wherever there is one
_LABELS_FOLLOW_LOSS = 2  # the same where there is a loss; elsewhere there is no label
_LOSS_IS_ONE = 4  # a loss wherever there is a label
_LOSS_IS_BINARY = 8
_POSITIONS_COUNT = 16
#: What a rank without samples says: anything is true of them.
NOTHING_TO_SEND = 31

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
            bits: int64 [R], from ``TokenFacts``; ``NOTHING_TO_SEND`` of a rank without samples.
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
