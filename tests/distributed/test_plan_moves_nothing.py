"""Plan mode moves no bytes between ranks: what the processes write and which collectives run is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.autograd.profiler import profile

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.nodes import DocumentSample, IndexedRead, Pack, Reroute, Shard
from tdp_megatron.testing import run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

WORLD, STEPS, BATCH = 4, 5, 16
LAYOUT = ParallelLayout(WORLD, 1, 512)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    return write_corpus(tmp_path / "d", [rng.integers(0, 50_000, n) for n in rng.integers(1, 400, 128)])


def bytes_written() -> int:
    """What this process has given to write calls, its sockets' included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The collectives that run inside, known afterwards."""
    found: list[str] = []
    with profile(use_kineto=False) as seen:
        yield found
    found += [event.key for event in seen.key_averages() if event.key.startswith(("gloo:", "c10d::"))]


def root(prefix: str, rank: int, groups: DpCpGroups | None, exchange: bool) -> Reroute:
    source: Any = DocumentSample(IndexedRead(prefix), max_seqlen=512)
    mover = None
    if exchange:
        assert groups is not None
        source, mover = Shard(source, rank=rank, num_ranks=WORLD), Exchange(groups)
    pack = Pack(source, LAYOUT, global_batch_size=BATCH, exchange=mover)
    return Reroute(pack, rank=rank, groups=groups)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes of a process are counted in /proc/self/io")
def test_no_process_writes_a_byte(prefix: str) -> None:
    def body(rank: int, world: int, exchange: bool) -> tuple[int, int]:
        groups = DpCpGroups.create(LAYOUT, timeout_s=20) if exchange else None
        node = root(prefix, rank, groups, exchange)
        tokens = sum(batch.num_tokens for batch in next(node))
        before = bytes_written()
        for _ in range(STEPS):
            tokens += sum(batch.num_tokens for batch in next(node))
        return bytes_written() - before, tokens

    by_plan, by_exchange = (run_ranks(body, WORLD, exchange) for exchange in (False, True))
    assert [written for written, _ in by_plan] == [0] * WORLD
    assert [tokens for _, tokens in by_plan] == [tokens for _, tokens in by_exchange]
    # The measure can tell: 16 documents of 200 tokens of 2 bytes at least, of which 3 in 4 go elsewhere.
    assert sum(written for written, _ in by_exchange) > STEPS * BATCH * 200


def test_no_collective_runs_though_there_are_groups(prefix: str) -> None:
    def body(rank: int, world: int) -> list[list[str]]:
        found = []
        for exchange in (False, True):
            node = root(prefix, rank, DpCpGroups.create(LAYOUT, timeout_s=20), exchange)
            next(node)
            with collectives() as seen:
                for _ in range(STEPS):
                    next(node)
            found.append(seen)
        return found

    for by_plan, by_exchange in run_ranks(body, WORLD):
        assert by_plan == []
        assert "gloo:all_to_all" in by_exchange
