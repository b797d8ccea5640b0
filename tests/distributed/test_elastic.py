"""Every way through the runtime at once, stopped on (DP, CP) = (4, 2) and continued elsewhere: the same samples.

Weights change, one source runs out, stretches are left out, steps are made ahead; tokens are put together again from
the packs of all ranks, CP slices included, and compared with those that the blend gives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import Mapper

from tdp_megatron.datasets.weights import PiecewiseLinearWeights
from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.loops import LoopConfig, packing_session, wrap_data_iterator
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute, Shard
from tdp_megatron.testing import run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

BATCH = 24
CAP = 128
STOPPED_AT = 5
FURTHER = 3
RANGES = [(170, 203), (60, 61)]
STEPS = [(2, 4), (7, 8)]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("elastic"), np.random.default_rng(1)
    return [
        str(write_corpus(folder / f"d{i}", [rng.integers(0, 60_000, n) for n in rng.integers(2, 90, count)]))
        for i, count in enumerate((300, 31, 200))
    ]


def blend(prefixes: list[str]) -> Blend:
    sources: list[Any] = [DocumentSample(IndexedRead(p), max_seqlen=80, num_epochs=1) for p in prefixes]
    sources[2] = Mapper(sources[2], lambda sample: {"tokens": torch.as_tensor(sample["tokens"])})
    weights = PiecewiseLinearWeights([(0, [0.5, 0.4, 0.1]), (150, [0.2, 0.2, 0.6]), (300, [0.6, 0.1, 0.3])])
    return Blend(sources, weights, stop="all_exhausted")


def digest(tokens: Any) -> str:
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def samples_of(plan: Any, packs: Sequence[list[Any]]) -> list[str]:
    """Digests of the samples of a step, from the tokens of the packs of every rank."""
    taken = [iter(of_rank) for of_rank in packs]
    found = []
    for op in plan.ops:
        cp = op.cp_size
        slices = [next(taken[rank]) for rank in op.ranks]
        begin = 0
        for i, padded in zip(op.sample_ids, op.padded_lengths, strict=True):
            if cp == 1:
                whole = slices[0][begin : begin + padded]
            else:  # rank r holds the chunks r and 2 * cp - 1 - r
                chunks = [part[begin // cp : (begin + padded) // cp].reshape(2, -1) for part in slices]
                whole = np.concatenate([c[0] for c in chunks] + [c[1] for c in reversed(chunks)])
            found.append(digest(whole[: int(plan.seqlens[i])]))
            begin += padded
    assert all(next(rest, None) is None for rest in taken)
    return sorted(found)


def packs_of(batches: Any) -> list[Any]:
    return [batch.tokens.numpy().copy() for batch in batches]


def by_exchange(prefixes: list[str], dp: int, cp: int, steps: int, state: Any) -> Any:
    def body(rank: int, world: int) -> Any:
        layout = ParallelLayout(dp, cp, CAP, tail_multiple=1)
        groups = DpCpGroups.create(layout, timeout_s=40.0)
        source = Shard(blend(prefixes), rank=rank, num_ranks=world)
        pack = Pack(source, layout, global_batch_size=BATCH, exchange=Exchange(groups), skip=STEPS)
        loader = Loader(Prefetch(Reroute(pack, groups=groups), depth=3))
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        running = iter(loader)
        seen = [(step.plan, packs_of(step.batches)) for step in itertools.islice(running, steps)]
        after = loader.state_dict()
        loader.root.shutdown()  # type: ignore[attr-defined]
        return seen, after

    return run_ranks(body, dp * cp, timeout_s=90)


def by_loop(prefixes: list[str], dp: int, cp: int, steps: int, state: Any) -> Any:
    def body(rank: int, world: int) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(dp, cp), mesh_dim_names=("dp", "cp"))
        config = LoopConfig(max_seqlen_per_dp_cp_rank=CAP, data_timeout_s=40.0, skip_samples=RANGES)
        samples = iter(Loader(Prefetch(Shard(blend(prefixes), rank=rank // cp, num_ranks=dp), depth=4)))
        session = packing_session(samples, config, mesh)
        if state is not None:
            session.load_state_dict(json.loads(json.dumps(state)))
        seen = []
        for _ in range(steps):
            packed, *_ = wrap_data_iterator(samples, config, BATCH // dp, mesh)
            seen.append((packed.step.plan, packs_of(packed)))
        after = session.state_dict()
        session.close()
        return seen, after

    return run_ranks(body, dp * cp, timeout_s=90)


def joined(ranks: list[Any], steps: int) -> tuple[list[list[str]], Any]:
    assert all(after == ranks[0][1] for _, after in ranks), "the state is not the same on every rank"
    assert [len(seen) for seen, _ in ranks] == [steps] * len(ranks)
    found = [samples_of(ranks[0][0][step][0], [seen[step][1] for seen, _ in ranks]) for step in range(steps)]
    return found, ranks[0][1]


@pytest.mark.parametrize(("dp", "cp"), [(2, 2), (3, 1), (8, 1), (1, 4)])
@pytest.mark.parametrize("way", ["exchange", "loop"])
def test_a_run_goes_on_elsewhere_with_the_same_samples(prefixes: list[str], way: str, dp: int, cp: int) -> None:
    run = by_exchange if way == "exchange" else by_loop
    everything = [digest(sample["tokens"]) for sample in blend(prefixes)]
    if way == "loop":
        kept = [d for n, d in enumerate(everything) if not any(begin <= n < end for begin, end in RANGES)]
        wanted = [sorted(kept[n : n + BATCH]) for n in range(0, len(kept), BATCH)]
    else:
        numbers = [n for n in range(len(everything) // BATCH) if not any(b <= n < e for b, e in STEPS)]
        wanted = [sorted(everything[n * BATCH : (n + 1) * BATCH]) for n in numbers]
    first, state = joined(run(prefixes, 4, 2, STOPPED_AT, None), STOPPED_AT)
    then, state = joined(run(prefixes, dp, cp, FURTHER, state), FURTHER)
    last, _ = joined(run(prefixes, 4, 2, FURTHER, state), FURTHER)
    assert first + then + last == wanted[: STOPPED_AT + 2 * FURTHER]
