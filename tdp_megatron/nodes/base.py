"""What all nodes share: state that checks itself, failures that stay, and blocks of samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes.early_end import refuse_early_end, report_early_end
from tdp_megatron.samples import block_from_items
from tdp_megatron.stats import NodeStats
from tdp_megatron.types import Sample, SampleBlock

__all__ = [
    "ENDLESS",
    "BeyondEndError",
    "Node",
    "SampleSource",
    "draw_block",
    "leaf_count",
    "require_node",
    "skip_samples",
]

T = TypeVar("T")


class BeyondEndError(ValueError):
    """More samples were to be passed over than the data has."""


class Node(BaseNode[T]):
    """A ``BaseNode`` whose state is a position, a version and a fingerprint of its configuration.

    Subclasses write ``fingerprint``, ``_open`` (expensive work, at the first reset), ``_restart`` (go to a position,
    with the sources' states) and ``_next``. An exception is raised again by every later ``next`` until ``reset``.
    """

    VERSION_KEY = "version"
    FINGERPRINT_KEY = "fingerprint"
    POSITION_KEY = "position"
    SOURCE_KEY = "source"
    VERSION = 1
    #: Versions before VERSION whose states it still reads.
    READS_VERSIONS: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.stats = NodeStats()
        self._position = 0
        self._failure: Exception | None = None
        self._is_open = False

    @property
    def position(self) -> int:
        """Items handed out (and passed over) since the beginning of the data."""
        return self._position

    @property
    def is_open(self) -> bool:
        """Whether it has been reset once, so that its files are open."""
        return self._is_open

    @property
    def is_its_position(self) -> bool:
        """Whether its state is its position, beside what never changes."""
        own = type(self)
        return own.get_state is Node.get_state and own._source_state is Node._source_state

    def fingerprint(self) -> dict[str, Any]:
        """What a saved state must agree with: JSON values that decide the order of the data, and nothing per rank."""
        raise NotImplementedError

    def _open(self) -> None:
        """Expensive work, once."""

    #: Where it begins when there is no saved state.
    _begins_at = 0

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        """Go to ``position``; ``state`` is this node's saved state, None at the beginning."""
        raise NotImplementedError

    def _next(self) -> T:
        raise NotImplementedError

    #: Entries of the state beyond the common ones that a saved one must have.
    _source_state_keys: tuple[str, ...] = ()

    def _source_state(self) -> dict[str, Any]:
        """Further entries of the state: the sources'."""
        return {}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._failure = None
        with self._latched():
            if not self._is_open:
                self._open()
                self._is_open = True
            position = self._begins_at if initial_state is None else self._check(initial_state)
            self._restart(position, initial_state)
            self._position = position

    def next(self) -> T:
        if self._failure is not None:
            raise self._failure
        try:  # not _latched, which costs as much as many a node
            return self._next()
        except Exception as error:
            self._failure = error
            raise

    @contextmanager
    def _latched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the end of the data is final too, until reset
            self._failure = error
            raise

    def get_state(self) -> dict[str, Any]:
        return {
            self.VERSION_KEY: self.VERSION,
            self.FINGERPRINT_KEY: {"node": type(self).__name__, **self.fingerprint()},
            self.POSITION_KEY: self._position,
            **self._source_state(),
        }

    def _check(self, state: Mapping[str, Any]) -> int:
        """The position in a saved state.

        Raises:
            StateMismatchError: it belongs to another node, version or configuration.
        """
        name = type(self).__name__
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"{name}: a saved state is a mapping, found {type(state).__name__}")
        wanted = [self.VERSION_KEY, self.FINGERPRINT_KEY, self.POSITION_KEY]
        if self.SOURCE_KEY in self._source_state_keys:
            wanted.append(self.SOURCE_KEY)
        missing = [k for k in wanted if k not in state]
        if missing:
            raise StateMismatchError(f"{name}: the saved state has no {missing[0]!r}; it has {sorted(state)}")
        if self.SOURCE_KEY in wanted and state[self.SOURCE_KEY] is None:
            # It would begin the source anew and repeat what has been trained on.
            raise StateMismatchError(f"{name}: the saved state of the source is None")
        if state[self.VERSION_KEY] not in (self.VERSION, *self.READS_VERSIONS):
            raise StateMismatchError(
                f"{name}: the saved state has version {state[self.VERSION_KEY]!r}, this library reads {self.VERSION}"
            )
        saved, now = state[self.FINGERPRINT_KEY], {"node": name, **self.fingerprint()}
        if not isinstance(saved, Mapping):
            raise StateMismatchError(f"{name}: {self.FINGERPRINT_KEY} must be a mapping, found {saved!r}")
        different = [k for k in {**now, **saved} if saved.get(k) != now.get(k)]
        if different:
            shown = "; ".join(f"{k} was {saved.get(k)!r} and is {now.get(k)!r}" for k in different)
            raise StateMismatchError(
                f"{name}: the saved state belongs to another configuration: {shown}. "
                "Start with the old configuration, or without the saved state"
            )
        position = state[self.POSITION_KEY]
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise StateMismatchError(f"{name}: position must be a non-negative integer, found {position!r}")
        return position


#: ``SampleSource.num_remaining`` of a source without end.
ENDLESS = sys.maxsize


class SampleSource(Node[Sample]):
    """A node of samples that also hands them out in blocks; subclasses write ``_take``."""

    def _take(self, n: int) -> SampleBlock:
        """The next samples, ``n`` or as many as are left, from ``self._position`` on."""
        raise NotImplementedError

    def num_remaining(self) -> int | None:
        """Samples left: ``ENDLESS`` if there is no end, None if only reading on would tell."""
        return None

    def _skip(self, n: int) -> None:
        """Pass over ``n`` samples; subclasses that can do it without drawing them do."""
        self._take(n)

    def skip_to(self, position: int) -> None:
        """Go on with sample number ``position`` of this node; nothing is read, but samples of a user's node are drawn.

        Raises:
            TypeError: it is no integer.
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        position = checked_int("position", position)
        if not self._is_open:
            self.reset(None)
        if position < self._position:
            raise ValueError(
                f"{type(self).__name__}: cannot go back from sample {self._position} to {position}; reset first"
            )
        remaining = self.num_remaining()
        if remaining is not None and position - self._position > remaining:
            raise BeyondEndError(
                f"{type(self).__name__}: sample {position} is beyond the end; {remaining} samples are left after "
                f"{self._position}"
            )
        with self._latched():
            self._skip(position - self._position)
        self._position = position

    @property
    def num_datasets(self) -> int:
        """How many dataset ids the samples of this node use, counting from 0."""
        return 1

    def take(self, n: int) -> SampleBlock:
        """The next ``n`` samples as one block, fewer, or none, at the end of the data.

        Raises:
            ValueError: n is negative. Errors of what is below stay: every later call raises the same one.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if not self._is_open:
            self.reset(None)
        if self._failure is not None:
            if isinstance(self._failure, StopIteration):
                n = 0
            else:
                raise self._failure
        with self._latched(), self.stats.working():
            block = self._take(n)
        self._position += len(block)
        self.stats.items += len(block)
        self.stats.tokens += int(block.seqlens.sum())
        return block

    def _next(self) -> Sample:
        block = self.take(1)
        if not len(block):
            raise StopIteration
        return block[0]


def require_node(source: object) -> None:
    """Refuse what is not a node when the graph is made, not at the first step.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(source, BaseNode):
        raise TypeError(
            f"a source must be a torchdata.nodes.BaseNode, got {type(source).__name__}; wrap an iterable in "
            "torchdata.nodes.IterableWrapper"
        )


def leaf_count(source: BaseNode[Any]) -> int:
    """Dataset ids a source uses: its own word for it; a user's node has those of its source, or one."""
    while not isinstance(source, SampleSource):
        inner = getattr(source, "source", None)
        if not isinstance(inner, BaseNode):
            return 1
        source = inner
    return source.num_datasets


def draw_block(source: BaseNode[Any], n: int, dataset_id: int, number: int, stride: int = 1) -> SampleBlock:
    """The next ``n`` samples of any source, fewer at its end.

    Args:
        source: one of ours, asked for a block, or any node that yields samples or mappings.
        n: samples.
        dataset_id: of plain mappings of a user's node; added to the dataset ids of the samples it passes on.
        number: of the first sample, for plain mappings; how many have been drawn from it before.
        stride: how far the number of the next one is, where ranks draw in turn.
    """
    if isinstance(source, SampleSource):
        return source.take(n)
    items = []
    for _ in range(n):
        try:
            items.append(next(source))
        except StopIteration as end:
            refuse_early_end(end)
            report_early_end(source)
            break
    return block_from_items(items, dataset_id, number, stride)


def skip_samples(source: BaseNode[Any], n: int) -> None:
    """Pass over the next ``n`` items of any source: at once where it is ours, one by one where it is not.

    Raises:
        BeyondEndError: it has fewer.
    """
    if not n:
        return
    if isinstance(source, SampleSource):
        source.skip_to(source.position + n)
        return
    skip_items = getattr(source, "skip_items", None)
    if skip_items is not None:
        skip_items(n)
        return
    for _ in range(n):
        try:
            next(source)
        except StopIteration as end:
            refuse_early_end(end)
            report_early_end(source)
            raise BeyondEndError(f"{type(source).__name__} ended while {n} of its samples were passed over") from None
