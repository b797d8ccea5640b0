"""What a ``Loader`` takes for a saved state, and what it says of something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes.loader import LoaderIterator

from tdp_megatron.errors import StateMismatchError

__all__ = ["check_loader_state"]

_KEYS = (LoaderIterator.ROOT_KEY, LoaderIterator.NUM_YIELDED_KEY)
_MOST_SHOWN = 8


def check_loader_state(state: Any) -> None:
    """Refuse what ``Loader.state_dict`` has not given, when it is loaded and not at the first step.

    Raises:
        TypeError: it is no mapping. None would begin the data anew.
        StateMismatchError: it is another mapping, such as the checkpoint that the state is a part of.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_state_dict needs what Loader.state_dict() gave, got {_shown(state)}; to begin at the first sample, "
            "do not call it"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        parts = [key for key, value in state.items() if isinstance(value, Mapping) and all(k in value for k in _KEYS)]
        if parts:
            remedy = f"its part {parts[0]!r} is one: load that"
        elif not state:
            remedy = "to begin at the first sample, do not load one"
        else:
            remedy = "load what Loader.state_dict() gave when the checkpoint was written"
        keys = [repr(key) for key in state]
        found = ", ".join(keys[:_MOST_SHOWN]) + (", ..." if len(keys) > _MOST_SHOWN else "")
        raise StateMismatchError(
            f"this is no state of a Loader: it has no {missing[0]!r}, but {found or 'nothing at all'}; {remedy}"
        )
    root, num_yielded = (state[key] for key in _KEYS)
    if not isinstance(root, Mapping):
        raise StateMismatchError(
            f"the state of a Loader holds {_shown(root)} under {_KEYS[0]!r}, not the state of its root; it is damaged"
        )
    if isinstance(num_yielded, bool) or not isinstance(num_yielded, int) or num_yielded < 0:
        raise StateMismatchError(
            f"the state of a Loader: {_KEYS[1]!r} must be a number from 0 up, found {num_yielded!r}"
        )


def _shown(value: Any) -> str:
    return "None" if value is None else type(value).__name__
