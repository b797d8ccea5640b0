"""Saved states that were damaged: told as such, never taken for the beginning of the data."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import BaseNode, IterableWrapper

from tdp_megatron.datasets.weights import PiecewiseLinearWeights
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes import (
    Batch,
    Blend,
    DocumentSample,
    GPTSample,
    IndexedRead,
    LookAhead,
    Pack,
    Prefetch,
    Reroute,
    Shard,
    StreamPack,
)
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(1, 1, 64)


def documents(prefix: str, num_epochs: int | None = None) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=32, num_epochs=num_epochs)


def schedule() -> PiecewiseLinearWeights:
    return PiecewiseLinearWeights([(0, [3, 1]), (50, [1, 2])])


GRAPHS: dict[str, Callable[[str], BaseNode[Any]]] = {
    "shard": lambda p: Shard(documents(p), rank=0, num_ranks=2),
    "look ahead": lambda p: LookAhead(documents(p), global_batch_size=4, num_batches=2),
    "blend": lambda p: Blend([documents(p), documents(p)], [1, 2]),
    "blend to the end": lambda p: Blend([documents(p, 1), documents(p, 1)], [1, 2], stop="all_exhausted"),
    "blend in a circle": lambda p: Blend([documents(p, 1), IterableWrapper([{"tokens": [1]}])], stop="cycle"),
    "blend that changes": lambda p: Blend([documents(p), documents(p)], schedule()),
    "pack": lambda p: Pack(documents(p), LAYOUT, global_batch_size=4),
    "stream": lambda p: StreamPack(documents(p), LAYOUT, window=8),
    "reroute": lambda p: Reroute(Pack(documents(p), LAYOUT, global_batch_size=4)),
    "batch": lambda p: Batch(GPTSample(IndexedRead(p), sequence_length=8), micro_batch_size=2),
    "read ahead": lambda p: Prefetch(Reroute(Pack(documents(p), LAYOUT, global_batch_size=4))),
}

#: Graph, where its state is damaged, and by what.
DAMAGE = [
    *((name, ("source",), value) for name in GRAPHS if "blend" not in name for value in (None, 3, [])),
    *((name, ("position",), value) for name in GRAPHS for value in (None, -1, 1.5, True, "7")),
    *((name, ("sources",), value) for name in GRAPHS if "blend" in name for value in (None, 3, {}, [], [None, None])),
    *(
        (name, ("sources", "alike"), value)
        for name in GRAPHS
        if "blend" in name
        for value in (None, [], {}, {"same": 3}, {"each": [{}]}, {"keys": 1}, {"keys": {}}, {"same": {}, "each": []})
    ),
    *((name, ("sources", "own"), value) for name in GRAPHS if "blend" in name for value in (None, [], {"7": {}})),
    ("blend in a circle", ("sources", "own"), {}),
    *(("blend in a circle", ("sources", "positions"), value) for value in (None, [], [1, 2], ["1"], [-1], [2.0])),
    *((name, ("counts",), value) for name in GRAPHS if "blend" in name for value in (None, [1], [-1, 8], [1.0, 6.0])),
    *(("blend to the end", ("exhausted",), value) for value in (None, 1, "x", {}, [2], [-1], [True])),
    *(("blend that changes", ("targets",), value) for value in (None, [1.0], [0.0, 0.0], ["a", 1], [-1.0, 8.0])),
    *(("stream", ("buffer",), value) for value in (None, [], {"first": 0})),
    *(("stream", ("buffer", "first"), value) for value in (None, "0", -1, 2**70, 10**6)),
    *(("stream", ("buffer", "arrived"), value) for value in (None, 0, 1.5)),
    *(("stream", ("buffer", "numbers"), value) for value in (None, 5, [3, 2], [10**6], [0.5], [2**70])),
    *(("look ahead", ("window_position",), value) for value in (None, -1, 99)),
    *(("batch", ("ahead",), value) for value in (None, -1, 99, 1.5)),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = np.random.default_rng(4).integers(1, 30, 60)
    return write_corpus(tmp_path_factory.mktemp("states") / "d", [np.arange(n) for n in lengths])


@pytest.fixture(scope="module")
def states(prefix: str) -> dict[str, Any]:
    """A state of each graph in the middle of the data."""
    saved = {}
    for name, make in GRAPHS.items():
        node = make(prefix)
        for _ in range(7 if "blend" in name else 3):
            next(node)
        saved[name] = json.loads(json.dumps(node.state_dict()))
        if isinstance(node, Prefetch):
            node.shutdown()
    return saved


@pytest.mark.parametrize(("graph", "place", "value"), DAMAGE, ids=str)
def test_a_damaged_state_is_refused(
    prefix: str, states: dict[str, Any], graph: str, place: tuple[Any, ...], value: Any
) -> None:
    state = copy.deepcopy(states[graph])
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]]  # it is there
    inner[place[-1]] = value
    with pytest.raises(StateMismatchError):
        GRAPHS[graph](prefix).reset(state)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_state_of_which_a_part_is_missing_is_refused(prefix: str, states: dict[str, Any], graph: str) -> None:
    for key in states[graph]:
        with pytest.raises(StateMismatchError):
            GRAPHS[graph](prefix).reset({k: v for k, v in states[graph].items() if k != key})
