"""The states of a blend's sources, of which there may be thousands, as one: what they share is written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes.base import Node, SampleSource

__all__ = ["SourceStates", "joined_columns", "split_columns"]

_KEYS = "keys"
_SAME = "same"
_EACH = "each"


def joined_columns(values: Sequence[Any]) -> dict[str, Any]:
    """Several JSON values as one: mappings with the same keys key by key, equal values once, others one by one.

    Args:
        values: at least one.
    """
    first = values[0]
    if isinstance(first, dict) and first and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {_KEYS: {key: joined_columns([value[key] for value in values]) for key in first}}
    if all(type(value) is type(first) and value == first for value in values):
        return {_SAME: first}
    return {_EACH: list(values)}


def split_columns(joined: Any, count: int) -> list[Any]:
    """What ``joined_columns`` was given.

    Args:
        joined: its result, from a file that is not trusted.
        count: of the values.

    Raises:
        StateMismatchError: it is something else, or of another number of values.
    """
    kind, value = next(iter(joined.items())) if isinstance(joined, Mapping) and len(joined) == 1 else (None, None)
    if kind == _KEYS and isinstance(value, Mapping):
        columns = {key: split_columns(column, count) for key, column in value.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if kind == _SAME:
        return [value] * count
    if kind == _EACH and isinstance(value, list) and len(value) == count:
        return list(value)
    raise StateMismatchError(f"a saved state of {count} sources written as one cannot be read: {str(joined)[:200]}")


def _copied(value: Any) -> Any:
    """A copy of a JSON value that shares no list or mapping with it; numbers and texts are not looked at one by one."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        holds_others = not {int, float, str, bool, type(None)}.issuperset(map(type, value))
        return [_copied(inner) for inner in value] if holds_others else value.copy()
    return value


class SourceStates:
    """Writes and reads the states of several nodes.

    Sources whose state is their position share one entry for all that never changes; those with more in their states
    (a user's nodes, nested blends) have an entry of their own.

    Args:
        sources: the nodes.
        positions_follow: whether each position is known from elsewhere, so that it is not written.
    """

    ALIKE_KEY = "alike"
    POSITIONS_KEY = "positions"
    OWN_KEY = "own"

    def __init__(self, sources: Sequence[BaseNode[Any]], *, positions_follow: bool) -> None:
        self._sources = sources
        self._positions_follow = positions_follow
        self._plain = {i: s for i, s in enumerate(sources) if isinstance(s, SampleSource) and s.is_its_position}
        self._own = [i for i in range(len(sources)) if i not in self._plain]
        self._alike: dict[str, Any] | None = None

    def reset(self) -> None:
        """Forget what is kept of the sources, which have been reset."""
        self._alike = None

    def save(self) -> dict[str, Any]:
        """The states of all sources, plain data that is shared with nobody."""
        states: dict[str, Any] = {self.OWN_KEY: {str(i): self._sources[i].state_dict() for i in self._own}}
        if self._plain:
            # A state is asked for in every step: what stays the same is gathered once.
            if self._alike is None:
                facts = [source.state_dict() for source in self._plain.values()]
                self._alike = joined_columns([{k: v for k, v in f.items() if k != Node.POSITION_KEY} for f in facts])
            states[self.ALIKE_KEY] = _copied(self._alike)
            if not self._positions_follow:
                states[self.POSITIONS_KEY] = [source.position for source in self._plain.values()]
        return states

    def load(self, saved: Any, positions: Sequence[int]) -> list[Any]:
        """One state per source.

        Args:
            saved: what ``save`` gave; or a list with the state of each source, as older versions wrote.
            positions: of the sources, for those that follow.

        Raises:
            StateMismatchError: it is neither, or of other sources.
        """
        count = len(self._sources)
        if isinstance(saved, list):
            states = saved
        else:
            own = saved.get(self.OWN_KEY) if isinstance(saved, Mapping) else None
            if not isinstance(own, Mapping) or own.keys() != {str(i) for i in self._own}:
                raise StateMismatchError(f"the saved state has no states of {count} sources")
            states = [own.get(str(i)) for i in range(count)]
            for i, state in zip(self._plain, self._load_plain(saved, positions), strict=True):
                states[i] = state
        if len(states) != count or None in states:
            raise StateMismatchError(f"the saved state has no states of {count} sources")
        return states

    def _load_plain(self, saved: Mapping[str, Any], positions: Sequence[int]) -> list[Any]:
        if not self._plain:
            return []
        alike = split_columns(saved.get(self.ALIKE_KEY), len(self._plain))
        places = [positions[i] for i in self._plain] if self._positions_follow else saved.get(self.POSITIONS_KEY)
        if not isinstance(places, list) or len(places) != len(alike):
            raise StateMismatchError(f"the saved positions are {places}; expected those of {len(alike)} sources")
        if not all(isinstance(facts, Mapping) for facts in alike):
            raise StateMismatchError("the saved states of the sources are no mappings")
        return [{**facts, Node.POSITION_KEY: place} for facts, place in zip(alike, places, strict=True)]
