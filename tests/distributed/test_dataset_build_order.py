"""Building datasets on several ranks: one build per file system, and every rank ends with the first cause."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, TokenizerSpec
from tdp_megatron.distributed.rank_order import run_in_rank_order
from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.testing.fork import RankFailure, run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    found = []
    for name in ("a", "b"):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        for i in range(30):
            builder.add_document(np.full(5 + i, i + 1, dtype=np.int32), [5 + i])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        found.append(str(tmp_path / name))
    return found


def builder_of(prefixes: list[str], cache: str, on_rank: bool = True, **changes: Any) -> BlendedMegatronDatasetBuilder:
    timeout_s = changes.pop("timeout_s", 30.0)
    fields: dict[str, Any] = {
        "random_seed": 1,
        "sequence_length": 8,
        "blend": (prefixes, [0.5, 0.5]),
        "split": "80,10,10",
        "tokenizer": TokenizerSpec.null(100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": cache,
    }
    config = GPTDatasetConfig(**{**fields, **changes})
    return BlendedMegatronDatasetBuilder(GPTDataset, [40, 6, 6], lambda: on_rank, config, timeout_s=timeout_s)


def log_builds(folder: str, rank: int) -> None:
    build = GPTDataset._build

    def logged(self: GPTDataset) -> Any:
        with open(os.path.join(folder, f"builds.{rank}"), "a") as file:
            file.write(f"{self.unique_description_hash}\n")
        return build(self)

    GPTDataset._build = logged  # type: ignore[method-assign]


def builds(folder: Path) -> dict[int, list[str]]:
    return {int(path.suffix[1:]): path.read_text().split() for path in folder.glob("builds.*")}


def test_rank_0_builds_and_the_others_load(prefixes: list[str], tmp_path: Path) -> None:
    def rank_fn(rank: int, world: int) -> Any:
        log_builds(str(tmp_path), rank)
        train, valid, test = builder_of(prefixes, str(tmp_path / "cache")).build()
        return train[7]["tokens"].tolist(), len(valid), len(test)

    results = run_ranks(rank_fn, 4)
    assert all(result == results[0] for result in results)
    assert set(builds(tmp_path)) == {0}
    assert len(builds(tmp_path)[0]) == 6


@pytest.mark.parametrize("spelling", ["another", "the same"])
def test_caches_that_other_nodes_do_not_see(prefixes: list[str], tmp_path: Path, spelling: str) -> None:
    """Ranks 0 and 1 share one folder, ranks 2 and 3 another: one build of each index per folder.

    On real nodes both have the same path, each on a disk of its own; here, each behind a working directory of its own.
    """
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()

    def rank_fn(rank: int, world: int) -> Any:
        log_builds(str(tmp_path), rank)
        here = tmp_path / f"node{rank // 2}"
        os.chdir(here)
        cache = "cache" if spelling == "the same" else str(here / "cache")
        train, *_ = builder_of(prefixes, cache).build()
        return train[7]["tokens"].tolist()

    results = run_ranks(rank_fn, 4)
    assert all(any((tmp_path / f"node{node}" / "cache").iterdir()) for node in range(2))
    assert all(result == results[0] for result in results)
    found = builds(tmp_path)
    assert len(found[0]) == 6
    assert 1 not in found
    second_node = found.get(2, []) + found.get(3, [])
    assert sorted(second_node) == sorted(found[0])


def test_ranks_that_get_no_datasets(prefixes: list[str], tmp_path: Path) -> None:
    def rank_fn(rank: int, world: int) -> Any:
        built = builder_of(prefixes, str(tmp_path / "cache"), on_rank=rank != 0).build()
        return [dataset if dataset is None else len(dataset) for dataset in built]

    results = run_ranks(rank_fn, 3)
    assert results[0] == [None] * 3
    assert results[1] == results[2] == [40, 6, 6]


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_error_reaches_every_rank(prefixes: list[str], tmp_path: Path, bad_rank: int) -> None:
    def rank_fn(rank: int, world: int) -> Any:
        split = "99,1,0" if rank == bad_rank else "80,10,10"
        return builder_of([prefixes[0], prefixes[0]], str(tmp_path / "cache"), split=split).build()

    failures = run_ranks(rank_fn, 3, return_failures=True)
    for rank, failure in enumerate(failures):
        assert isinstance(failure, RankFailure)
        if rank == bad_rank:
            assert failure.error_type == "ValueError"
            assert "(valid split)" in failure.message
        else:
            assert failure.error_type == "ExchangeError"
            assert f"failed on another rank: rank {bad_rank}: ValueError" in failure.message


def test_a_call_on_one_rank_of_two_names_the_absent(prefixes: list[str], tmp_path: Path) -> None:
    def rank_fn(rank: int, world: int, caller: int) -> Any:
        if rank == caller:
            return builder_of(prefixes, str(tmp_path / f"cache{caller}"), timeout_s=0.5).build()
        time.sleep(3)
        return None

    for caller in (0, 1):
        failures = run_ranks(rank_fn, 2, caller, return_failures=True)
        assert failures[1 - caller] is None
        assert failures[caller].error_type == "ExchangeError"
        assert f"ranks [{1 - caller}] did not come within 0.5 s" in failures[caller].message


def test_a_slow_first_rank_is_waited_for() -> None:
    """Longer than the time-out, but alive."""

    def rank_fn(rank: int, world: int) -> Any:
        return run_in_rank_order(
            lambda: time.sleep(7 if rank == 0 else 0), takes_part=True, what="sleeping", timeout_s=2.5
        )

    assert run_ranks(rank_fn, 2) == [None, None]


def test_a_rank_that_is_gone_is_named() -> None:
    def rank_fn(rank: int, world: int) -> Any:
        def work() -> None:
            if rank == 0:
                time.sleep(0.5)  # between two signs of life: half a write would break the test's file store
                os.kill(os.getpid(), 9)

        return run_in_rank_order(work, takes_part=True, what="the work", timeout_s=2.5)

    failures = run_ranks(rank_fn, 2, return_failures=True)
    assert failures[0].error_type == "ProcessDied"
    assert failures[1].error_type == "ExchangeError"
    assert "ranks [0] gave no sign of life" in failures[1].message


def test_order_and_results() -> None:
    def rank_fn(rank: int, world: int) -> Any:
        order = []
        for first in range(world):
            begun = run_in_rank_order(time.monotonic, takes_part=rank != 1, what="the clock", first_rank=first)
            order.append(begun)
        return order

    results = run_ranks(rank_fn, 3)
    assert results[1] == [None] * 3
    for first in (0, 2):
        assert results[first][first] < results[2 - first][first]


def test_build_generic_dataset() -> None:
    def rank_fn(rank: int, world: int) -> Any:
        assert dist.is_initialized()
        build = BlendedMegatronDatasetBuilder.build_generic_dataset
        return build(list, lambda: rank == 1, True, "ab"), build(list, lambda: rank == 0, False, "cd")

    assert run_ranks(rank_fn, 2) == [(None, ["c", "d"]), (["a", "b"], None)]
    assert BlendedMegatronDatasetBuilder.build_generic_dataset(list, lambda: False, True, "ab") == ["a", "b"]
