"""What the adapters refuse: ranks that cannot read, and states that are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.loops.groups import LoopGroups

__all__ = ["check_goes_on", "check_reader", "check_state"]


def check_reader(data_iterator: Any, groups: LoopGroups) -> None:
    """Refuse what a rank that reads cannot read from.

    Raises:
        ValueError: it has no data iterator.
        TypeError: it has something that is no iterator.
    """
    if not groups.reads:
        return
    if data_iterator is None:
        raise ValueError(
            f"TP rank {groups.tp_rank} of pipeline stage {groups.pp_rank} reads data; its data_iterator is None"
        )
    if not hasattr(data_iterator, "__next__"):
        raise TypeError(
            f"data_iterator must be an iterator, got {type(data_iterator).__name__}; give iter() of it, made once, "
            "since every iter() begins anew"
        )


def check_goes_on(failure: Exception | None) -> None:
    """Refuse to move where there is no next step.

    Raises:
        ValueError: the data has ended.
        Exception: the failure that has ended the steps.
    """
    if isinstance(failure, StopIteration):
        raise ValueError("the data has ended; to go on, load a saved state")
    if failure is not None:
        raise failure


def check_state(state: Any, version: int, counts: tuple[str, ...]) -> None:
    """Refuse what is no saved state.

    Raises:
        StateMismatchError: it is no mapping, of another version, or one of ``counts`` is missing or no count.
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"a saved state is a mapping, found {type(state).__name__}")
    if state.get("version") != version:
        raise StateMismatchError(f"saved state has version {state.get('version')!r}, expected {version}")
    for name in counts:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StateMismatchError(f"saved state: {name} must be a number from 0 up, found {value!r}")
