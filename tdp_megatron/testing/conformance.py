"""Does a node keep its promises about state? For our nodes and for anybody's."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchdata.nodes import BaseNode

__all__ = ["check_resume_at_every_step"]

_ENDED = object()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    return bool(a == b)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state as a checkpoint keeps it."""

    step: int
    state: Any
    """As it was then."""
    text: str | None
    """As JSON."""
    stored: bytes
    """By ``torch.save``."""

    @staticmethod
    def of(state: Any, step: int, through_json: bool) -> _Saved:
        buffer = io.BytesIO()
        try:
            text = json.dumps(state) if through_json else None
            torch.save(state, buffer)
            loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            raise AssertionError(f"step {step}: the state cannot be saved: {error}; it is {state!r}") from error
        saved = _Saved(step, copy.deepcopy(state), text, buffer.getvalue())
        if text is not None and not _same(json.loads(text), state):
            raise AssertionError(f"step {step}: the state changes on its way through JSON: {state!r}")
        if not saved.is_equal(loaded):
            raise AssertionError(f"step {step}: the state changes on its way through torch.save: {state!r}")
        return saved

    def is_equal(self, state: Any) -> bool:
        # JSON also tells 1 from True.
        return _same(state, self.state) and (self.text is None or json.dumps(state) == self.text)

    def restored(self) -> Any:
        """In turn from either."""
        if self.text is None or self.step % 2:
            return torch.load(io.BytesIO(self.stored), weights_only=True)
        return json.loads(self.text)


def _next(node: BaseNode[Any], describe: Callable[[Any], Any]) -> Any:
    try:
        return describe(next(node))
    except StopIteration:
        return _ENDED


def check_resume_at_every_step(
    make_node: Callable[[], BaseNode[Any]],
    *,
    describe: Callable[[Any], Any] = lambda item: item,
    max_items: int = 1000,
    through_json: bool = True,
) -> int:
    """Save the state before every item, restore it into a fresh node, and compare all that follows.

    The state goes through JSON and through ``torch.save`` / ``torch.load(weights_only=True)``. Asking for it must
    change nothing, it must not change once it was given, and a node that has run may be restored like a fresh one.

    Args:
        make_node: makes a fresh node each time.
        describe: turns an item into something comparable (tensors, numbers, lists, tuples, dicts).
        max_items: stop there with an endless node.
        through_json: whether the state must survive JSON; torchdata's MultiNodeWeightedSampler, for one, has tensors in
            its own.

    Returns:
        How many items the node gave.

    Raises:
        AssertionError: a promise is broken; the message names the step.
    """
    node = make_node()
    node.reset(None)
    items: list[Any] = []
    given: list[Any] = []
    saved: list[_Saved] = []
    while True:
        given.append(node.state_dict())
        saved.append(_Saved.of(given[-1], len(items), through_json))
        item = _next(node, describe) if len(items) < max_items else _ENDED
        if item is _ENDED:
            break
        # What is yielded may be the node's own, and change; what it was then counts.
        items.append(copy.deepcopy(item))
    for state, entry in zip(given, saved, strict=True):
        if not entry.is_equal(state):
            raise AssertionError(
                f"step {entry.step}: the state has changed since it was given; checkpoints are written later, so "
                "give a copy of what changes"
            )
    _check_undisturbed(make_node(), describe, items)
    ended = len(items) < max_items
    for entry in saved:
        _check_restored(make_node(), entry, describe, items, ended)
    for entry in (saved[len(saved) // 2], saved[0]):
        _check_restored(node, entry, describe, items, ended, "a node that has run, ")
    return len(items)


def _check_undisturbed(node: BaseNode[Any], describe: Callable[[Any], Any], items: list[Any]) -> None:
    """Nobody asks this one for its state."""
    node.reset(None)
    for step, expected in enumerate(items):
        item = _next(node, describe)
        if item is _ENDED or not _same(item, expected):
            raise AssertionError(
                f"item {step} is another one when no state is asked for: the order is not fixed, or state_dict "
                "changes it"
            )


def _check_restored(
    node: BaseNode[Any],
    saved: _Saved,
    describe: Callable[[Any], Any],
    items: list[Any],
    ended: bool,
    which: str = "",
) -> None:
    step = saved.step
    node.reset(saved.restored())  # which is the node's from now on: torchdata's change what they are given
    if not saved.is_equal(node.state_dict()):
        raise AssertionError(f"step {step}: {which}the state right after a restore differs from the restored one")
    for expected_step in range(step, len(items)):
        item = _next(node, describe)
        if item is _ENDED:
            raise AssertionError(f"{which}restored at step {step}, the data ended before item {expected_step}")
        if not _same(item, items[expected_step]):
            raise AssertionError(f"{which}restored at step {step}, item {expected_step} differs")
    if ended and _next(node, describe) is not _ENDED:
        raise AssertionError(f"{which}restored at step {step}, the data did not end after item {len(items) - 1}")
