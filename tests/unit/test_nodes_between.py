"""torchdata's nodes and users' own between ours: every step of every graph restores into a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import (
    BaseNode,
    Batcher,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    Unbatcher,
)

from tdp_megatron.nodes import Batch, Blend, DocumentSample, IndexedRead, LookAhead, Pack, Reroute, Shard, StreamPack
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import ParallelLayout, Step

LAYOUT = ParallelLayout(1, 1, 64)


class Filter(BaseNode[Any]):
    """A user's: torchdata 0.11 has none."""

    def __init__(self, source: BaseNode[Any], keep: Callable[[Any], bool]) -> None:
        super().__init__()
        self.source = source
        self.keep = keep

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        while not self.keep(item := next(self.source)):
            pass
        return item

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}


class Texts(BaseNode[Any]):
    """A user's tokenising source."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.at = 0 if initial_state is None else initial_state["at"]

    def next(self) -> Any:
        if self.at >= 17:
            raise StopIteration
        self.at += 1
        return {"tokens": torch.tensor(list(b"text %d " % self.at * (1 + self.at % 3)))}

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}


def tagged(sample: Any) -> Any:
    return {"tokens": sample["tokens"] + 1, "tag": int(sample["tokens"][0])}


def is_long(sample: Any) -> bool:
    return bool(sample.seqlen > 5)


def documents(prefix: str) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=32)


def steps(source: BaseNode[Any]) -> Reroute:
    return Reroute(Pack(source, LAYOUT, global_batch_size=4, drop_last=False))


def weighted(p: str, q: str) -> BaseNode[Any]:
    sources: dict[str, BaseNode[Any]] = {"a": documents(p), "b": documents(q)}
    return MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 2.0}, rank=0, world_size=1, seed=1)


def of_step(step: Step) -> Any:
    return [
        step.index,
        [[b.tokens, b.labels, b.loss_mask, b.position_ids, b.cu_seqlens, list(b.refs), dict(b.extras)] for b in step],
    ]


GRAPHS: dict[str, Callable[[str, str], BaseNode[Any]]] = {
    "Mapper": lambda p, q: steps(Mapper(documents(p), tagged)),
    "ParallelMapper": lambda p, q: steps(ParallelMapper(documents(p), tagged, num_workers=2, method="thread")),
    "Filter": lambda p, q: steps(Filter(documents(p), is_long)),
    "Prefetcher of samples": lambda p, q: steps(Prefetcher(documents(p), prefetch_factor=3)),
    "Prefetcher of steps": lambda p, q: Prefetcher(steps(documents(p)), prefetch_factor=2),
    "Batcher and Unbatcher": lambda p, q: steps(Unbatcher(Batcher(documents(p), 3, drop_last=False))),
    "weighted sampler": lambda p, q: steps(weighted(p, q)),
    "tokenising source": lambda p, q: steps(Texts()),
    "blend of users' nodes": lambda p, q: steps(
        Blend([Texts(), Filter(documents(q), is_long)], [1, 2], stop="all_exhausted")
    ),
    "stream": lambda p, q: Reroute(StreamPack(Mapper(documents(p), tagged), LAYOUT, window=8)),
    "look ahead": lambda p, q: steps(Mapper(LookAhead(documents(p), global_batch_size=4, num_batches=2), tagged)),
    "shard": lambda p, q: steps(Mapper(Shard(Mapper(documents(p), tagged), rank=1, num_ranks=3), dict)),
}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder, rng = tmp_path_factory.mktemp("between"), np.random.default_rng(0)
    one, two = (
        write_corpus(folder / f"d{n}", [np.full(k, i + 100 * n) for i, k in enumerate(rng.integers(1, 30, 20 + 3 * n))])
        for n in range(2)
    )
    return one, two


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_resume_at_every_step(prefixes: tuple[str, str], name: str) -> None:
    through_json = name != "weighted sampler"  # torchdata's own state of it holds a tensor
    count = check_resume_at_every_step(lambda: GRAPHS[name](*prefixes), describe=of_step, through_json=through_json)
    assert count > 1


def test_batches_over_a_users_node_resume(prefixes: tuple[str, str]) -> None:
    def make() -> Batch:
        return Batch(Mapper(documents(prefixes[0]), tagged), micro_batch_size=3, sequence_length=40)

    assert check_resume_at_every_step(make, describe=dict) == 6
