"""`HybridCPDataLoaderWrapper`: whole sequences on the ranks that run them, numbered by data-parallel rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops import HybridCPDataLoaderWrapper
from tdp_megatron.schedule import algorithms
from tdp_megatron.testing import run_ranks

pytestmark = pytest.mark.distributed

CONFIG = SimpleNamespace(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20.0)


def packed_item(dp: int, step: int) -> list[dict[str, Any]]:
    """Two packed samples, empty sequences among them."""
    rng = np.random.default_rng(100 * dp + step)
    items = []
    for _ in range(2):
        lengths = rng.integers(0, 12, 4) * 8
        cu = np.concatenate([[0], np.cumsum(lengths)])
        total = int(cu[-1])
        items.append(
            {
                "tokens": torch.from_numpy(rng.integers(0, 99, total)),
                "labels": torch.from_numpy(rng.integers(0, 99, total)),
                "loss_mask": torch.ones(total),
                "position_ids": torch.cat([torch.arange(int(n)) for n in lengths]),
                "cu_seqlens": torch.from_numpy(cu.astype(np.int32)),
            }
        )
    return items


def sequences(num_dp: int, step: int) -> list[dict[str, Any]]:
    """All sequences of a step in the order of the data-parallel ranks."""
    found = []
    for dp in range(num_dp):
        for item in packed_item(dp, step):
            cu = item["cu_seqlens"].tolist()
            for begin, end in itertools.pairwise(cu):
                if end > begin:
                    found.append({k: v[begin:end] for k, v in item.items() if k != "cu_seqlens"})
    return found


def collection(rank: int, world: int, tp: int, cp: int) -> SimpleNamespace:
    ranks = np.arange(world).reshape(-1, cp, tp)
    groups = {}
    for name, rows in (
        ("tp", ranks.reshape(-1, tp)),
        ("cp", ranks.transpose(0, 2, 1).reshape(-1, cp)),
        ("dp", ranks.transpose(1, 2, 0).reshape(cp * tp, -1)),
        ("dp_cp", ranks.transpose(2, 0, 1).reshape(tp, -1)),
    ):
        for row in rows.tolist():
            group = dist.new_group(row)
            if rank in row:
                groups[name] = group
    return SimpleNamespace(**groups)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("algorithm", ["default_dynamic_cp", "balanced_hybrid_cp"])
def test_every_rank_gets_its_whole_sequences(tp: int, cp: int, algorithm: str) -> None:
    world = 4 * tp

    def body(rank: int, world: int) -> Any:
        groups = collection(rank, world, tp, cp)
        dp, tp_rank = rank // (tp * cp), rank % tp
        iterator = iter([packed_item(dp, step) for step in range(2)]) if tp_rank == 0 else None
        wrapper = HybridCPDataLoaderWrapper(iterator, CONFIG, groups, algorithm=algorithm)
        if tp_rank:
            assert next(wrapper) == (None, None)
            return None
        steps = []
        for step in range(2):
            samples, groups_of_ids = next(wrapper)
            assert samples is not None
            assert groups_of_ids is not None
            everything = sequences(4 // cp, step)
            for number, sample in samples.items():
                assert sample.keys() == everything[number].keys()
                for key, value in everything[number].items():
                    assert torch.equal(sample[key], value), (number, key)
            me = dist.get_rank(groups.dp_cp)
            assert sorted(samples) == sorted(i for group in groups_of_ids for i in group[me])
            steps.append(groups_of_ids)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(wrapper)
        return steps

    results = [r for r in run_ranks(body, world) if r is not None]
    assert len(results) == 4
    assert all(r == results[0] for r in results)
    for step, groups_of_ids in enumerate(results[0]):
        held = {i for group in groups_of_ids for rank in group for i in rank}
        assert held == set(range(len(sequences(4 // cp, step))))


def test_a_failing_rank_is_named_on_all_ranks_and_state_restores() -> None:
    class Source:
        def __init__(self, dp: int, fail_at: int = -1) -> None:
            self.dp, self.at, self.fail_at = dp, 0, fail_at

        def __next__(self) -> Any:
            if self.at == self.fail_at:
                raise OSError("disk gone")
            self.at += 1
            return packed_item(self.dp, self.at - 1)

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def body(rank: int, world: int) -> str:
        groups = collection(rank, world, 1, 1)
        wrapper = HybridCPDataLoaderWrapper(
            Source(rank, 2 if rank == 1 else -1), CONFIG, groups, algorithm="default_dynamic_cp"
        )
        next(wrapper)
        state = wrapper.state_dict()
        second = next(wrapper)
        with pytest.raises(ExchangeError) as caught:
            next(wrapper)
        again = HybridCPDataLoaderWrapper(Source(rank), CONFIG, groups, algorithm="default_dynamic_cp")
        again.load_state_dict(state)
        restored = next(again)
        assert restored[1] == second[1]
        assert restored[0] is not None
        assert second[0] is not None
        assert all(torch.equal(restored[0][i]["tokens"], second[0][i]["tokens"]) for i in second[0])
        return str(caught.value)

    assert set(run_ranks(body, 2)) == {"step 2: rank 1 failed: OSError: disk gone"}


def test_the_algorithms_named_here_exist() -> None:
    assert {"default_dynamic_cp", "balanced_hybrid_cp"} <= set(algorithms())
