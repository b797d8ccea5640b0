"""Statistics of loops with a data iterator of their own, on data whose every number is known."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.loops import HybridCPDataLoaderWrapper, LoopConfig, packing_session, wrap_data_iterator
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Loader, Shard
from tdp_megatron.schedule import CostModel
from tdp_megatron.stats import flatten_stats, prometheus_text
from tdp_megatron.testing import run_ranks, write_corpus

pytestmark = pytest.mark.distributed

#: Work is tokens.
OPTIONS: dict[str, Any] = {
    "max_seqlen_per_dp_cp_rank": 64,
    "data_timeout_s": 20.0,
    "scheduler_options": {"cost": CostModel(a=1.0, b=0.0)},
}


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 1), (1, 1, 3)])
@pytest.mark.parametrize("read_ahead", [False, True])
def test_a_session_counts_its_steps(tmp_path: Any, shape: tuple[int, int, int], read_ahead: bool) -> None:
    dp, tp, pp = shape
    prefixes = [str(write_corpus(tmp_path / name, [np.arange(n)] * 24)) for name, n in (("long", 30), ("short", 10))]

    def body(rank: int, world: int) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        sources = [DocumentSample(IndexedRead(p), max_seqlen=64, num_epochs=None) for p in prefixes]
        loader = Loader(Shard(Blend(sources, [3, 1]), rank=rank // tp % dp, num_ranks=dp))
        samples = iter(loader) if rank % tp == 0 else None
        config = LoopConfig(read_ahead=read_ahead, **OPTIONS)
        held, pads = [], []
        for step in range(4):
            packed, *_ = wrap_data_iterator(samples, config, 8 // dp, mesh)
            if step < 3 or not read_ahead:  # the fourth step is being made ahead of the third
                batches = list(packed)
                held.append(sum(batch.num_tokens for batch in batches))
                pads.append(sum(int(batch.padding_mask.sum()) for batch in batches))
            elif read_ahead:
                held.append(sum(batch.num_tokens for batch in packed))
        session = packed.session
        session.settle()
        stats = session.stats()
        after = list(wrap_data_iterator(samples, config, 8 // dp, mesh)[0]) if read_ahead else []
        made = stats["PackingSession"]
        assert made["items"] == 4 + read_ahead
        assert made["tokens"] == sum(held) + sum(batch.num_tokens for batch in after)
        assert stats["ReadAhead"]["items"] == 4
        assert stats["ReadAhead"]["queue_depth"] in (0, 1)
        assert made["work_seconds"] > 0
        assert made["wait_seconds"] > 0
        if samples is not None and rank // tp // dp in (0, pp - 1):
            assert list(stats)[2:4] == ["Shard", "Blend"]
            long, short = stats["Blend"]["sources"].values()
            assert (long["requested"], short["requested"]) == (0.75, 0.25)
            assert long["drawn"] + short["drawn"] == stats["Blend"]["items"] >= 8 * (4 + read_ahead)
            assert abs(long["actual"] - 0.75) < 0.05
            assert stats["Shard"]["items"] == 8 // dp * (4 + read_ahead)
        else:
            assert list(stats) == ["ReadAhead", "PackingSession"]
        assert f'tdp_items{{node="PackingSession",rank="{rank}"}}' in prometheus_text(stats, labels={"rank": str(rank)})
        assert "PackingSession/imbalance" in flatten_stats(stats)
        return made["imbalance"], made["padding"], held[:3], pads[:3]

    ranks = run_ranks(body, dp * tp * pp)
    assert len({(imbalance, padding) for imbalance, padding, *_ in ranks}) == 1


def test_pads_and_unequal_work_are_what_they_are() -> None:
    """Three equal samples on two ranks, each of 10 tokens that are padded to 12."""

    def body(rank: int, world: int) -> Any:
        def samples() -> Any:
            for n in range(rank, 30, world):
                padded = {"original_seq_len": torch.tensor([10]), "padded_seq_len": torch.tensor([12])}
                yield [{"tokens": torch.full((12,), n), **padded}] if n % 4 != 3 else []

        config = LoopConfig(read_ahead=False, **{**OPTIONS, "max_seqlen_per_dp_cp_rank": 12})
        iterator = samples()
        for _ in range(3):
            packed, *_ = wrap_data_iterator(iterator, config, 2)
        made = packed.session.stats()["PackingSession"]
        held = sum(batch.num_tokens for batch in packed)
        return made["imbalance"], made["padding"], held

    ranks = run_ranks(body, 2)
    # Every rank runs two packs; the one without a sample holds a single pad.
    assert sorted(held for *_, held in ranks) == [13, 24]
    for imbalance, padding, _ in ranks:
        assert imbalance == pytest.approx(24 / 18.5)
        assert padding == pytest.approx(1 - 30 / 37)


def test_waiting_is_for_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> None:
        now = [100.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])

        def samples() -> Any:
            while True:
                now[0] += 2.0
                yield {"tokens": torch.arange(9)}

        config = LoopConfig(read_ahead=False, **OPTIONS)
        iterator = samples()
        packing_session(iterator, config)._stats.made.began = now[0]
        for _ in range(3):
            packed, *_ = wrap_data_iterator(iterator, config, 4)
        now[0] += 6.0
        stats = packed.session.stats()
        assert stats["PackingSession"]["wait_seconds"] == 3 * 4 * 2.0
        assert stats["PackingSession"]["items_per_second"] == pytest.approx(3 / 30)
        assert stats["PackingSession"]["tokens_per_second"] == pytest.approx(3 * 36 / 30)
        assert stats["ReadAhead"]["wait_seconds"] == 3 * 4 * 2.0  # without reading ahead the loop waits for it all

        hybrid = HybridCPDataLoaderWrapper(([{"tokens": torch.arange(9)}] * 2 for _ in iterator), config)
        assert set(hybrid.stats()) == {"HybridCPDataLoaderWrapper"}
        for _ in range(2):
            next(hybrid)
        values = hybrid.stats()["HybridCPDataLoaderWrapper"]
        assert (values["items"], values["tokens"], values["wait_seconds"]) == (2, 36, 4.0)
        assert values["imbalance"] == 1.0

    run_ranks(body, 1)


def test_what_was_read_ahead_is_told() -> None:
    def body(rank: int, world: int) -> None:
        iterator = iter([{"tokens": torch.arange(9)}] * 20)
        packed, *_ = wrap_data_iterator(iterator, LoopConfig(**OPTIONS), 4)
        assert packed.session.stats()["ReadAhead"]["queue_depth"] == 0
        deadline = time.monotonic() + 20
        assert packed.session._ahead is not None
        while not packed.session._ahead.is_done and time.monotonic() < deadline:
            time.sleep(0.001)
        wrap_data_iterator(iterator, LoopConfig(**OPTIONS), 4)
        assert packing_session(packed.session, None).stats()["ReadAhead"]["queue_depth"] == 1

    run_ranks(body, 1)
