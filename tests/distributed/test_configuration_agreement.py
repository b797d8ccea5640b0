"""Ranks whose nodes have another configuration, or read other files, are found where plans are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import BaseNode

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.errors import ExchangeError
from tdp_megatron.nodes import Blend, DocumentSample, GPTSample, IndexedRead, Pack, Reroute, Shard
from tdp_megatron.testing import run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout, Sample

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(2, 1, 64)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of the same lengths and other tokens, and one of other lengths."""
    folder = tmp_path_factory.mktemp("files")
    lengths = np.random.default_rng(0).integers(4, 20, 60).tolist()
    made = [write_corpus(folder / f"same_{i}", [[10 + i] * n for n in lengths]) for i in range(2)]
    # As many tokens, so that as many samples.
    return [*made, write_corpus(folder / "other", [[7] * n for n in lengths[::-1]])]


def walk(source: BaseNode[Any], exchange: bool = False) -> str:
    groups = DpCpGroups.create(LAYOUT, timeout_s=10)
    pack = Pack(source, LAYOUT, global_batch_size=4, exchange=Exchange(groups) if exchange else None)
    root = Reroute(pack, groups=groups, agree_every=1)
    root.reset(None)
    try:
        for _ in range(2):
            next(root)
    except ExchangeError as error:
        return str(error)
    return "fine"


def gpt(prefix: str, seed: int = 1, order: Any = "megatron") -> GPTSample:
    return GPTSample(IndexedRead(prefix), sequence_length=8, num_samples=40, random_seed=seed, order=order)


class Renaming(BaseNode[Sample]):
    """A user's node with a fingerprint of its own, in the usual place of its state."""

    def __init__(self, inner: BaseNode[Sample], fingerprint: Any) -> None:
        super().__init__()
        self.inner, self.fingerprint = inner, fingerprint

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.inner.reset(None if initial_state is None else initial_state["inner"])

    def next(self) -> Sample:
        return next(self.inner)

    def get_state(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "fingerprint": self.fingerprint}


Make = Callable[[list[str], int], BaseNode[Any]]

DIFFERENT: dict[str, tuple[Make, str]] = {
    "seed": (lambda f, r: gpt(f[0], 1 + r), "GPTSample.random_seed 2 (rank 0: 1)"),
    "seed, instant": (lambda f, r: gpt(f[0], 1 + r, "instant"), "GPTSample.random_seed 2 (rank 0: 1)"),
    "file": (lambda f, r: gpt(f[2 * r]), "GPTSample.source.lengths_crc32"),
    "file, instant": (lambda f, r: gpt(f[2 * r], order="instant"), "GPTSample.source.lengths_crc32"),
    "file of the same lengths": (lambda f, r: gpt(f[r]), "IndexedRead.first and last tokens"),
    "documents of the same lengths": (
        lambda f, r: DocumentSample(IndexedRead(f[r]), max_seqlen=32),
        "IndexedRead.first and last tokens",
    ),
    "seed of a source": (
        lambda f, r: Blend([gpt(f[0]), gpt(f[1], 5 + r)], weights=[1, 1]),
        "GPTSample.random_seed [1, 6] (rank 0: [1, 5])",
    ),
    "seeds of all sources": (
        lambda f, r: Blend([gpt(f[0], r), gpt(f[1], r)], weights=[1, 1]),
        "GPTSample.random_seed 1 (rank 0: 0)",
    ),
    "below a user's node": (lambda f, r: Renaming(gpt(f[0], 1 + r), "same"), "GPTSample.random_seed 2 (rank 0: 1)"),
    "user's node": (
        lambda f, r: Renaming(gpt(f[0]), {"node": "Renaming", "table": "ab"[r]}),
        'Renaming.table "b" (rank 0: "a")',
    ),
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_another_configuration_is_an_error_that_names_rank_and_field(files: list[str], what: str) -> None:
    make, shown = DIFFERENT[what]
    results = run_ranks(lambda rank, world: walk(make(files, rank)), 2)
    assert len(set(results)) == 1
    assert "of step 0 differs between ranks: ranks [1] disagree with rank 0; rank 1 has " in results[0]
    assert shown in results[0]


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_the_same_configuration_is_none(files: list[str], what: str) -> None:
    make, _ = DIFFERENT[what]
    assert run_ranks(lambda rank, world: walk(make(files, 1)), 2) == ["fine"] * 2


def test_shards_of_another_seed_are_named(files: list[str]) -> None:
    def body(rank: int, world: int) -> str:
        return walk(Shard(gpt(files[0], 1 + rank), rank=rank, num_ranks=world), exchange=True)

    results = run_ranks(body, 2)
    assert "rank 1 has GPTSample.random_seed 2 (rank 0: 1)" in results[0]


def test_with_an_exchange_ranks_may_read_files_of_their_own(files: list[str]) -> None:
    assert run_ranks(lambda rank, world: walk(gpt(files[rank], rank), exchange=True), 2) == ["fine"] * 2


def test_what_json_lacks_is_compared_by_kind(files: list[str]) -> None:
    """Its text would hold an address, which every rank has another of."""

    def body(rank: int, world: int) -> str:
        kept = [object() for _ in range(1 + 100 * rank)]
        return walk(Renaming(gpt(files[0]), {"of": kept[-1], "weights": np.arange(3)}))

    assert run_ranks(body, 2) == ["fine"] * 2
