"""Does a node keep its promises about state? For our nodes and for anybody's."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import torch
from torchdata.nodes import BaseNode

__all__ = ["check_resume_at_every_step"]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    return bool(a == b)


def check_resume_at_every_step(
    make_node: Callable[[], BaseNode[Any]],
    *,
    describe: Callable[[Any], Any] = lambda item: item,
    max_items: int = 1000,
) -> int:
    """Save the state before every item, restore it into a fresh node, and compare all that follows.

    The state goes through JSON and through ``torch.save`` / ``torch.load(weights_only=True)``.

    Args:
        make_node: makes a fresh node each time.
        describe: turns an item into something comparable (tensors, numbers, lists, tuples, dicts).
        max_items: stop there with an endless node.

    Returns:
        How many items the node gave.

    Raises:
        AssertionError: a restored node goes on differently; the message names the step.
    """
    node = make_node()
    node.reset(None)
    items: list[Any] = []
    states: list[dict[str, Any]] = []
    ended = False
    while len(items) < max_items:
        state = node.state_dict()
        states.append(json.loads(json.dumps(state)))
        if states[-1] != state:
            raise AssertionError(f"step {len(items)}: the state changes on its way through JSON: {state}")
        try:
            items.append(describe(next(node)))
        except StopIteration:
            ended = True
            break
    if states and json.loads(json.dumps(states[0])) != states[0]:
        raise AssertionError("the state is not plain data")
    for step, state in enumerate(states):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        fresh = make_node()
        fresh.reset(torch.load(buffer, weights_only=True))
        if json.loads(json.dumps(fresh.state_dict())) != state:
            raise AssertionError(f"step {step}: the state right after a restore differs from the restored one")
        for expected_step in range(step, len(items)):
            try:
                item = describe(next(fresh))
            except StopIteration:
                raise AssertionError(f"restored at step {step}, the data ended before item {expected_step}") from None
            if not _same(item, items[expected_step]):
                raise AssertionError(f"restored at step {step}, item {expected_step} differs")
        if ended:
            try:
                next(fresh)
            except StopIteration:
                continue
            raise AssertionError(f"restored at step {step}, the data did not end after item {len(items) - 1}")
    return len(items)
