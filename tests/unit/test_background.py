"""Processes that end while a background thread is at work: in native code, in a hanging read, after a shutdown."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from tdp_megatron.nodes import Prefetch

NODE = """
import time
import numpy as np
from torchdata.nodes import BaseNode
from tdp_megatron import _C
from tdp_megatron.background import BackgroundThread
from tdp_megatron.nodes import Prefetch

random, values = _C.LegacyRandom(1), np.arange(10_000_000, dtype=np.int32)

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
PREFETCH = "node = Prefetch(Busy(), depth=2); node.reset(); print(next(node))\n"
DROPPED = "node = Prefetch(Busy(), depth=2); node.reset(); print(next(node)); del node\n"
PLAIN = "thread = BackgroundThread(work, name='ahead'); thread.start(); print(1)\n"


@pytest.mark.parametrize("use", [PREFETCH, DROPPED, PLAIN], ids=["prefetch", "dropped prefetch", "thread"])
@pytest.mark.parametrize("work", [NATIVE, HANGING], ids=["native", "hanging"])
def test_process_ends_while_the_thread_works(work: str, use: str) -> None:
    # Without the wait, coming back from native code into an interpreter that is gone means SIGABRT.
    done = subprocess.run(
        [sys.executable, "-c", NODE + work + use], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


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
