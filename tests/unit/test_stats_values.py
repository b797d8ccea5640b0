"""Statistics of small graphs whose every number is known: counts, shares, times by a clock that only they move."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode

from tdp_megatron.datasets.weights import PiecewiseLinearWeights
from tdp_megatron.nodes import (
    Batch,
    Blend,
    DocumentSample,
    IndexedRead,
    Loader,
    LookAhead,
    Pack,
    Prefetch,
    Reroute,
    Shard,
    StreamPack,
)
from tdp_megatron.schedule import CostModel
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout

LONG, SHORT = 30, 10
GBS = 8
#: Work is tokens.
COST = CostModel(a=1.0, b=0.0)
LAYOUT = ParallelLayout(2, 1, 64)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("stats")
    lengths = {"long": LONG, "short": SHORT}
    return [str(write_corpus(folder / name, [np.arange(n)] * 24)) for name, n in lengths.items()]


def blend(prefixes: list[str], num_samples: int | None = 4 * GBS, weights: Any = (3, 1)) -> Blend:
    sources = [DocumentSample(IndexedRead(p), max_seqlen=64, num_epochs=None) for p in prefixes]
    return Blend(sources, weights, num_samples=num_samples)


TOKENS = 6 * LONG + 2 * SHORT  # of a global batch


class Clock:
    """Stands for ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


class Slow(BaseNode[Any]):
    """Samples of 4 tokens that take 2 seconds each."""

    def __init__(self, clock: Clock, count: int = 24) -> None:
        super().__init__()
        self.clock, self.count = clock, count

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self.at = 0

    def next(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.clock.now += 2.0
        return {"tokens": torch.full((4,), self.at)}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}


def test_counts_and_shares_of_a_known_graph(prefixes: list[str]) -> None:
    roots = [Reroute(Pack(blend(prefixes), LAYOUT, global_batch_size=GBS, cost=COST), rank=r) for r in (0, 1)]
    loaders = [Loader(root) for root in roots]
    steps = [list(loader) for loader in loaders]
    held = np.array([[sum(b.num_tokens for b in step.batches) for step in of_rank] for of_rank in steps])
    pads = np.array([[sum(int(b.padding_mask.sum()) for b in s.batches) for s in of_rank] for of_rank in steps])
    for rank, loader in enumerate(loaders):
        stats = loader.stats()
        assert {name: (values["items"], values["tokens"]) for name, values in stats.items()} == {
            "Reroute": (4, held[rank].sum()),
            "Pack": (4, 4 * TOKENS),
            "Blend": (4 * GBS, 4 * TOKENS),
            "DocumentSample": (24, 24 * LONG),
            "DocumentSample.1": (8, 8 * SHORT),
            "IndexedRead": (0, 0),
            "IndexedRead.1": (0, 0),
        }
        assert stats["Pack"]["imbalance"] == pytest.approx((held.max(0) / held.mean(0)).mean())
        assert stats["Reroute"]["padding"] == pytest.approx((pads.sum(0) / held.sum(0)).mean())
        long, short = stats["Blend"]["sources"].values()
        assert (long["drawn"], long["requested"], long["actual"], long["epochs"]) == (24, 0.75, 0.75, 1.0)
        assert (short["drawn"], short["requested"], short["actual"]) == (8, 0.25, 0.25)
        assert short["epochs"] == pytest.approx(8 / 24)


def test_pads_and_unequal_work_are_what_they_are(prefixes: list[str]) -> None:
    """Three equal samples on two pairs of ranks, each padded from 10 to 12 tokens."""
    source = DocumentSample(IndexedRead(prefixes[1]), max_seqlen=64, num_epochs=None)
    layout = ParallelLayout(2, 2, 6, tail_multiple=1)
    loader = Loader(Reroute(Pack(source, layout, global_batch_size=3, cost=COST)))
    steps = iter(loader)
    for _ in range(5):
        next(steps)
    stats = loader.stats()
    # One pair runs two packs of 6 tokens per rank, the other one of them and an empty one of 2 pads per rank.
    assert stats["Pack"]["imbalance"] == pytest.approx(12 / 10)
    assert stats["Reroute"]["padding"] == pytest.approx(1 - 30 / 40)


def test_shares_of_changing_weights_are_those_of_the_next_sample(prefixes: list[str]) -> None:
    weights = PiecewiseLinearWeights([(0, [1.0, 0.0]), (40, [0.0, 1.0])])
    loader = Loader(blend(prefixes, None, weights))
    samples = iter(loader)
    for _ in range(30):
        next(samples)
    long, short = loader.stats()["Blend"]["sources"].values()
    assert (long["requested"], short["requested"]) == pytest.approx((0.25, 0.75))
    assert long["drawn"] + short["drawn"] == 30
    target = sum(1 - n / 40 for n in range(30))
    assert long["drawn"] == pytest.approx(target, abs=1)
    assert long["actual"] == long["drawn"] / 30
    # A restart counts items anew, but what has been drawn is in the state.
    again = Loader(blend(prefixes, None, weights))
    again.load_state_dict(loader.state_dict())
    iter(again)
    restored = again.stats()["Blend"]
    assert restored["items"] == 0
    assert [s["drawn"] for s in restored["sources"].values()] == [long["drawn"], short["drawn"]]


def test_batches_shards_and_windows(prefixes: list[str]) -> None:
    loader = Loader(Batch(blend(prefixes), micro_batch_size=2, dp_rank=1, dp_size=2, sequence_length=32))
    assert len(list(loader)) == 8
    stats = loader.stats()
    assert stats["Batch"]["items"] == 8
    rows = [LONG if seqlen == LONG else SHORT for seqlen in blend(prefixes).take(32).seqlens.tolist()]
    mine = [n for i, n in enumerate(rows) if i // 2 % 2 == 1]
    assert stats["Batch"]["tokens"] == sum(mine)
    shard = Loader(LookAhead(Shard(blend(prefixes), rank=2, num_ranks=4), global_batch_size=2, num_batches=2))
    assert len(list(shard)) == 8
    stats = shard.stats()
    assert (stats["Shard"]["items"], stats["Shard"]["tokens"]) == (8, sum(rows[2::4]))
    assert (stats["LookAhead"]["items"], stats["LookAhead"]["tokens"]) == (8, sum(rows[2::4]))
    assert stats["Blend"]["items"] == 32


def test_waiting_and_working_by_the_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    import tdp_megatron.nodes.pack as pack

    schedule, read = pack.schedule, pack.build_pack_table

    def slow_schedule(*args: Any, **options: Any) -> Any:
        clock.now += 5.0
        return schedule(*args, **options)

    def slow_read(*args: Any) -> Any:
        clock.now += 7.0
        return read(*args)

    loader = Loader(Reroute(Pack(Slow(clock), LAYOUT, global_batch_size=4)))
    monkeypatch.setattr(pack, "schedule", slow_schedule)
    monkeypatch.setattr(pack, "build_pack_table", slow_read)
    loader.root.source.stats.began = clock.now  # type: ignore[attr-defined]
    steps = iter(loader)
    for _ in range(3):
        next(steps)
    clock.now += 40.0  # the loop trains
    stats = loader.stats()
    assert stats["Slow"] == {}
    assert stats["Pack"]["wait_seconds"] == 3 * 4 * 2.0
    assert stats["Pack"]["work_seconds"] == 3 * 5.0
    assert stats["Reroute"]["wait_seconds"] == 3 * (4 * 2.0 + 5.0)
    assert stats["Reroute"]["work_seconds"] == 3 * 7.0
    assert stats["Pack"]["items_per_second"] == pytest.approx(3 / 100)
    assert stats["Pack"]["tokens_per_second"] == pytest.approx(48 / 100)


def test_a_stream_works_and_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    node = StreamPack(Slow(clock), LAYOUT, window=6)
    take = type(node._scheduler).take

    def slow_take(self: Any, **options: Any) -> Any:
        clock.now += 3.0
        return take(self, **options)

    monkeypatch.setattr(type(node._scheduler), "take", slow_take)
    found = list(node)
    assert node.stats.items == len(found)
    assert node.stats.tokens == 24 * 4
    assert node.stats.wait_seconds == 24 * 2.0
    assert node.stats.work_seconds == (len(found) + 1) * 3.0
    assert node.stats.as_dict()["imbalance"] >= 1.0


def test_the_depth_of_the_queue_is_what_was_ready(prefixes: list[str]) -> None:
    node = Prefetch(blend(prefixes), depth=3)
    node.reset(None)
    deadline = time.monotonic() + 20
    while node._queue.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    next(node)
    assert node.stats.as_dict()["queue_depth"] == 3
    assert node.stats.as_dict()["items"] == 1
    node.shutdown()
