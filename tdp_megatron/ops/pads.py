"""What stands where a pack has no token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tdp_megatron.types import IGNORE_LABEL

__all__ = ["DEFAULT_PADS", "MEGATRON_PADS", "PadRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PadRules:
    """Values at pads. Their loss is 0 in every case."""

    token: int = 0
    """Token id; in the vocabulary, since the embedding looks it up."""
    label: int = IGNORE_LABEL
    """Label."""
    positions: Literal["run_on", "zero"] = "run_on"
    """Position ids run on through the padding of a sequence, or are 0 there."""

    def __post_init__(self) -> None:
        for name in ("token", "label"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if self.positions not in ("run_on", "zero"):
            raise ValueError(f"positions must be 'run_on' or 'zero', got {self.positions!r}")


DEFAULT_PADS = PadRules()

#: What Megatron's packed batches hold at pads: 0 for tokens, labels and position ids.
MEGATRON_PADS = PadRules(label=0, positions="zero")
