"""Thousands of steps and restarts: memory, descriptors and threads stay what they were."""

from __future__ import annotations

import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import BaseNode, IterableWrapper

from tdp_megatron.nodes import (
    Batch,
    Blend,
    DocumentSample,
    GPTSample,
    IndexedRead,
    Loader,
    LookAhead,
    Pack,
    Prefetch,
    Reroute,
    Shard,
    StreamPack,
)
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(1, 1, 128, tail_multiple=1)

Make = Callable[[str], BaseNode[Any]]


def documents(prefix: str) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=64, num_epochs=None)


def users(prefix: str) -> BaseNode[Any]:
    tokens = np.arange(30)
    return IterableWrapper({"tokens": tokens[: 1 + i % 30], "name": str(i)} for i in range(10**9))


GRAPHS: dict[str, Make] = {
    "blend": lambda p: Reroute(Pack(Blend([documents(p), documents(p)], [2, 1]), LAYOUT, global_batch_size=4)),
    "read ahead": lambda p: Prefetch(Reroute(Pack(documents(p), LAYOUT, global_batch_size=4))),
    "look ahead": lambda p: Reroute(
        Pack(LookAhead(documents(p), global_batch_size=4, num_batches=3), LAYOUT, global_batch_size=4)
    ),
    "stream": lambda p: Reroute(StreamPack(Shard(documents(p), rank=0, num_ranks=2), LAYOUT, window=8)),
    "users": lambda p: Reroute(StreamPack(users(p), LAYOUT, window=8)),
    "batch": lambda p: Batch(
        Blend([GPTSample(IndexedRead(p), sequence_length=16, order="instant", num_samples=10**9) for _ in range(2)]),
        micro_batch_size=2,
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = np.random.default_rng(2).integers(1, 60, 100)
    return write_corpus(tmp_path_factory.mktemp("soak") / "d", [np.arange(n) for n in lengths])


@pytest.mark.parametrize("graph", GRAPHS)
def test_steps_leave_nothing_behind(prefix: str, graph: str) -> None:
    loader = Loader(GRAPHS[graph](prefix))
    steps = iter(loader)

    def walk(n: int) -> int:
        for _ in range(n):
            next(steps)
            loader.state_dict()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = walk(240)
        late = walk(240)
    finally:
        tracemalloc.stop()
        if isinstance(loader.root, Prefetch):
            loader.root.shutdown()
    # 240 steps of 4 samples and more: a leak of one small object per sample would be more.
    assert late - early < 50_000


def test_restarts_leave_nothing_behind(prefix: str) -> None:
    def restart() -> None:
        loader = Loader(GRAPHS["read ahead"](prefix))
        steps = iter(loader)
        next(steps)
        loader.load_state_dict(loader.state_dict())
        next(iter(loader))
        loader.skip_to(7)

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    restart()
    descriptors, threads = held()
    for _ in range(20):
        restart()
    deadline = time.monotonic() + 30
    while held()[1] > threads and time.monotonic() < deadline:  # threads notice soon, not at once
        time.sleep(0.05)
    now = held()
    assert now[0] <= descriptors
    assert now[1] <= threads
