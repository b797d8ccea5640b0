"""Batch samplers: golden data of Megatron-LM commit d98e8a64 (Aug 2026)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tdp_megatron.datasets import samplers

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "samplers.json").read_text())["cases"]


def make(case: dict[str, Any], rank: int) -> Any:
    cls = getattr(samplers, case["cls"])
    ranks = {"data_parallel_rank": rank, "data_parallel_size": case["dp"]}
    if "consumed" not in case:
        return cls(case["total"], **ranks)
    counts = {"total_samples": case["total"], "consumed_samples": case["consumed"], "micro_batch_size": case["mbs"]}
    if "gbs" in case:
        return cls(**counts, global_batch_size=case["gbs"], **ranks)
    if "data_sharding" in case:
        return cls(None, **counts, **ranks, data_sharding=case["data_sharding"])
    return cls(**counts, **ranks, drop_last=case["drop_last"])


def test_samplers_give_megatrons_batches() -> None:
    equal = refused = 0
    for case in CASES:
        for rank, expected in enumerate(case["out"]):
            if isinstance(expected, dict):
                with pytest.raises(ValueError, match="none is left"):
                    make(case, rank)
                refused += 1
                continue
            sampler = make(case, rank)
            if "len" in case:
                assert len(sampler) == case["len"][rank]
            assert list(sampler) == expected, case
            equal += 1
    assert (len(CASES), refused) == (276, 28)
    assert equal == sum(len(case["out"]) for case in CASES) - refused


def test_cyclic_goes_on_with_the_next_epoch() -> None:
    sampler = samplers.MegatronPretrainingRandomSampler(None, 24, 0, 2, 0, 2, True)
    first = list(sampler)
    assert sampler.consumed_samples == 24
    assert list(sampler) == list(samplers.MegatronPretrainingRandomSampler(None, 24, 24, 2, 0, 2, True))
    assert len(first) == 6


def test_cyclic_tells_the_dataset_its_epoch() -> None:
    class Epochs:
        seen: int | None = None

        def set_epoch(self, epoch: int) -> None:
            self.seen = epoch

    dataset = Epochs()
    list(samplers.MegatronPretrainingRandomSampler(dataset, 24, 48, 2, 0, 2, True))
    assert dataset.seen == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: samplers.MegatronPretrainingSampler(0, 0, 1, 0, 1), "total_samples"),
        (lambda: samplers.MegatronPretrainingSampler(8, -1, 1, 0, 1), "consumed_samples"),
        (lambda: samplers.MegatronPretrainingSampler(8, 0, 0, 0, 1), "micro_batch_size"),
        (lambda: samplers.MegatronPretrainingSampler(8, 0, 1, 2, 2), "data_parallel_rank"),
        (lambda: samplers.MegatronPretrainingSampler(8, 0, 1, 0, 0), "data_parallel_size"),
        (lambda: samplers.HybridCPMegatronPretrainingSampler(64, 0, 2, 10, 0, 4), "nearest are 8 and 16"),
        (lambda: samplers.MegatronPretrainingRandomSampler(None, 3, 0, 2, 0, 2, True), "one batch of all ranks"),
        (lambda: samplers.MegatronPretrainingRandomSampler(None, 24, 3, 2, 0, 2, True), "ends inside a batch"),
        (lambda: samplers.MegatronFullValidationSampler(0, 0, 1), "total_samples"),
    ],
)
def test_bad_numbers_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
