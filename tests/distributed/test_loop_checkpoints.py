"""Loops' states in files: JSON, torch.save, and torch.distributed.checkpoint, which writes each entry once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.loops import HybridCPDataLoaderWrapper, LoopConfig, packing_session, wrap_data_iterator
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Loader, Shard
from tdp_megatron.testing import run_ranks, write_corpus

pytestmark = pytest.mark.distributed

CONFIG = LoopConfig(
    max_seqlen_per_dp_cp_rank=64, data_timeout_s=20.0, consumed_samples=7, skip_samples=[(20, 33), (50, 51)]
)
BATCH = 12


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    rng = np.random.default_rng(9)
    folder = tmp_path_factory.mktemp("states")
    return [str(write_corpus(folder / f"d{i}", [rng.integers(0, 999, 9) for _ in range(150)])) for i in (0, 1)]


def iterator(prefixes: list[str], rank: int, num_ranks: int) -> Any:
    sources = [DocumentSample(IndexedRead(p), max_seqlen=24, num_epochs=None) for p in prefixes]
    return iter(Loader(Shard(Blend(sources, [0.7, 0.3]), rank=rank, num_ranks=num_ranks)))


def session_of(prefixes: list[str], rank: int, dp: int, tp: int, pp: int) -> Any:
    mesh = DeviceMesh("cpu", torch.arange(dp * tp * pp).reshape(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    reads = rank % tp == 0
    source = iterator(prefixes, rank // tp % dp, dp) if reads else None
    return packing_session(source, CONFIG, mesh)


def tokens_of(packed: Any) -> list[list[int]]:
    return [tokens.tolist() for tokens in packed.scatter_back([batch.tokens for batch in packed])]


def next_steps(session: Any, dp: int, steps: int) -> list[list[list[int]]]:
    return [tokens_of(wrap_data_iterator(session, CONFIG, BATCH // dp)[0]) for _ in range(steps)]


def joined(ranks: list[Any], dp: int, tp: int) -> list[list[list[int]]]:
    """Per step, the samples of all data-parallel ranks."""
    of_ranks = ranks[: dp * tp : tp]
    return [sorted(tokens for seen in of_ranks for tokens in seen[step]) for step in range(len(of_ranks[0]))]


@pytest.mark.parametrize("after", [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 1, 3)])
@pytest.mark.parametrize("done", [0, 2])
def test_a_session_in_a_distributed_checkpoint(
    prefixes: list[str], tmp_path: Path, after: tuple[int, int, int], done: int
) -> None:
    before = (2, 2, 2)  # with ranks that receive their data, whose states have no part of it

    def save(rank: int, world: int) -> Any:
        session = session_of(prefixes, rank, *before)
        next_steps(session, before[0], done)
        session.skip([(60, 70)])
        dcp.save({"data": session}, checkpoint_id=tmp_path / "checkpoint")
        return next_steps(session, before[0], 4)

    def load(rank: int, world: int) -> Any:
        session = session_of(prefixes, rank, *after)
        dcp.load({"data": session}, checkpoint_id=tmp_path / "checkpoint")
        return next_steps(session, after[0], 4)

    wanted = joined(run_ranks(save, 8), *before[:2])
    assert joined(run_ranks(load, int(np.prod(after))), *after[:2]) == wanted
    assert all(len(step) == BATCH for step in wanted)


def test_states_are_plain_data(prefixes: list[str]) -> None:
    def body(rank: int, world: int) -> None:
        session = packing_session(iterator(prefixes, 0, 1), CONFIG)
        next_steps(session, 1, 1)
        session.skip([(80, 85)])
        hybrid = HybridCPDataLoaderWrapper(
            iterator(prefixes, 0, 1), LoopConfig(max_seqlen_per_dp_cp_rank=64), skip=[(2, 3)], first_step=np.int64(1)
        )
        next(hybrid)
        for one in (session, hybrid):
            state = one.state_dict()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            buffer.seek(0)
            assert torch.load(buffer, weights_only=True) == json.loads(json.dumps(state)) == state

    run_ranks(body, 1)
