"""Processes that end while a background thread is at work: in native code, in a hanging read, after a shutdown."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from tdp_megatron.nodes import Prefetch

BASE = """
import time
import numpy as np
from tdp_megatron import _C
from tdp_megatron.background import BackgroundThread

random, values = _C.LegacyRandom(1), np.arange(10_000_000, dtype=np.int32)
"""
NODE = """
from torchdata.nodes import BaseNode
from tdp_megatron.nodes import Prefetch

class Busy(BaseNode):
    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.taken = 0
    def next(self):
        self.taken += 1
        if self.taken > 1:
            work()
        return self.taken
    def get_state(self):
        return {}
"""

NATIVE = "def work(): random.shuffle(values)\n"
HANGING = "def work(): time.sleep(3600)\n"
PREFETCH = f"{NODE}node = Prefetch(Busy(), depth=2); node.reset(); print(next(node))\n"
DROPPED = f"{NODE}node = Prefetch(Busy(), depth=2); node.reset(); print(next(node)); del node\n"
PLAIN = "thread = BackgroundThread(work, name='ahead'); thread.start(); print(1)\n"


USES = {"prefetch": PREFETCH, "dropped prefetch": DROPPED, "thread": PLAIN}
WORKS = {"native": NATIVE, "hanging": HANGING}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """All of them side by side: most of their time goes into imports."""
    started = {}
    try:
        for (use, last), (work, first) in itertools.product(USES.items(), WORKS.items()):
            started[work, use] = subprocess.Popen(
                [sys.executable, "-c", BASE + first + last], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("work", WORKS)
def test_process_ends_while_the_thread_works(work: str, use: str, processes: Any) -> None:
    # Without the wait, coming back from native code into an interpreter that is gone means SIGABRT.
    process = processes[work, use]
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "1\n", "")


class Counter(BaseNode[int]):
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.taken = 0 if initial_state is None else initial_state["taken"]

    def next(self) -> int:
        self.taken += 1
        return self.taken

    def get_state(self) -> dict[str, Any]:
        return {"taken": self.taken}


def test_a_prefetch_that_was_shut_down() -> None:
    node = Prefetch(Counter(), depth=2)
    node.reset()
    assert [next(node), next(node)] == [1, 2]
    state = node.state_dict()
    node.shutdown()
    node.shutdown()
    with pytest.raises(RuntimeError, match="was shut down; reset it first"):
        next(node)
    copy = pickle.loads(pickle.dumps(node))
    for again in (copy, node):
        again.reset(state)
        assert [next(again), next(again)] == [3, 4]
        again.shutdown()
