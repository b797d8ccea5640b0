"""``check_resume_at_every_step`` finds the kinds of broken state that nodes have had."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, SamplerWrapper

from tdp_megatron.testing import check_resume_at_every_step


class Count(BaseNode[Any]):
    """The numbers from 0 up; the pattern of a good node."""

    N = 7

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]

    def next(self) -> Any:
        if self.at >= self.N:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}


class OneTooFar(Count):
    """Counts what it has read ahead as given."""

    def get_state(self) -> dict[str, Any]:
        return {"at": min(self.at + 1, self.N)}


class OneShort(Count):
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None and self.at:
            self.at -= 1

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}


class Forgetful(Count):
    """Shuffles in a buffer that is no part of the state."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.rng = random.Random(0)

    def next(self) -> Any:
        return super().next(), self.rng.random()


class Live(Count):
    """Gives its own dict, which goes on changing."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.state = {"at": self.at}

    def next(self) -> Any:
        item = super().next()
        self.state["at"] = self.at
        return item

    def get_state(self) -> dict[str, Any]:
        return self.state


class Disturbed(Count):
    """Reads an item whenever it is asked for its state."""

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        self.at = min(self.at + 1, self.N)
        return state


class Endless(Count):
    """Begins again where it should end, once restored."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.again = initial_state is not None

    def next(self) -> Any:
        if self.again and self.at >= self.N:
            self.at, self.again = 0, False
        return super().next()


class EndsEarly(Count):
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.N = 7 if initial_state is None else 6


class NotAgain(Count):
    """Right when fresh; a second reset keeps something of the run before."""

    behind = 0

    def next(self) -> Any:
        item = super().next()
        self.behind += 1
        return item, self.behind - self.at

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.behind += self.at


class OwnState(Count):
    """A state in a form that checkpoints do not keep."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset()
        self.at = 0 if initial_state is None else int(np.asarray(initial_state["at"]).reshape(-1)[0])

    def get_state(self) -> dict[str, Any]:
        return {"at": self.kind(self.at)}


def test_good_nodes_pass() -> None:
    assert check_resume_at_every_step(Count) == Count.N
    assert check_resume_at_every_step(Count, max_items=3) == 3
    assert check_resume_at_every_step(lambda: Batcher(SamplerWrapper(range(10)), 3, drop_last=False)) == 4
    assert check_resume_at_every_step(lambda: IterableWrapper([])) == 0


def test_states_with_tensors_pass_where_json_is_not_asked_for() -> None:
    assert check_resume_at_every_step(lambda: OwnState(torch.tensor), through_json=False) == Count.N
    with pytest.raises(AssertionError, match="step 0: the state cannot be saved"):
        check_resume_at_every_step(lambda: OwnState(np.int64), through_json=False)
    with pytest.raises(AssertionError, match="the state has changed since it was given"):
        check_resume_at_every_step(Live, through_json=False)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (OneTooFar, "the state right after a restore differs|item 1 differs"),
        (OneShort, "step 1: the state right after a restore differs"),
        (Forgetful, "restored at step 1, item 1 differs"),
        (Live, "step 0: the state has changed since it was given"),
        (Disturbed, "is another one when no state is asked for"),
        (Endless, "restored at step 0, the data did not end after item 6"),
        (EndsEarly, "restored at step 0, the data ended before item 6"),
        (NotAgain, "a node that has run, restored at step 4"),
        (lambda: OwnState(np.int64), "step 0: the state cannot be saved"),
        (lambda: OwnState(np.float64), "step 0: the state cannot be saved"),
        (lambda: OwnState(torch.tensor), "step 0: the state cannot be saved"),
        (lambda: OwnState(lambda at: (at,)), "step 0: the state changes on its way through JSON"),
        (lambda: OwnState(lambda at: {at: at}), "step 0: the state changes on its way through JSON"),
    ],
)
def test_broken_nodes_are_found(node: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_resume_at_every_step(node)
