"""Packed microbatches and CP slices equal to Megatron's.

The data come from Megatron-LM commit d98e8a64, Aug 2026, NumPy 2.4.6. The slices per document follow Transformer
Engine's definition of ``thd_get_partitioned_indices``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tdp_megatron.ops import MEGATRON_PADS, cp_partition_indices, pack
from tdp_megatron.ops.gather import Backend
from tdp_megatron.schedule import Plan, PlanOp
from tdp_megatron.types import PackedBatch, ParallelLayout

DATA = json.loads((Path(__file__).parent / "data" / "packing.json").read_text())
SAMPLES = DATA["samples"]
KEYS = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}
backends = pytest.mark.parametrize("backend", get_args(Backend))


def packed(golden: dict[str, Any], cp: int, backend: Backend) -> list[PackedBatch]:
    """The pack as each CP rank holds it; Megatron's samples bring their labels and what stands at their pads."""
    samples = [SAMPLES[i] for i in golden["samples"]]
    sources = {
        key: torch.tensor([x for sample in samples for x in sample[key]], dtype=dtype) for key, dtype in KEYS.items()
    }
    padded = [sample["padded_seq_len"] for sample in samples]
    layout = ParallelLayout(1, cp, 1024, tail_multiple=1)
    plan = Plan.from_ops(
        layout,
        [sample["original_seq_len"] for sample in samples],
        [PlanOp(0, cp, tuple(range(len(samples))), tuple(padded))],
    )
    offsets = np.cumsum(padded, dtype=np.int64) - padded
    return [pack(plan, rank, sources, offsets, pads=MEGATRON_PADS, backend=backend)[0] for rank in range(cp)]


@backends
@pytest.mark.parametrize("golden", DATA["packs"], ids=lambda golden: str(golden["samples"]))
def test_packs(golden: dict[str, Any], backend: Backend) -> None:
    for cp in (1, 2):
        batches = packed(golden, cp, backend)
        joined: dict[str, torch.Tensor] = {}
        for batch in batches:
            assert batch.cu_seqlens.tolist() == golden["cu_seqlens"]
            assert batch.cu_seqlens_padded.tolist() == golden["cu_seqlens_padded"]
            assert batch.max_seqlen == golden["max_seqlen"]
            assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32
            place = cp_partition_indices(batch.cu_seqlens_padded, cp, batch.cp_rank)
            for key in (*KEYS, "position_ids", "padding_mask"):
                part = getattr(batch, key)
                joined.setdefault(key, torch.zeros(len(part) * cp, dtype=part.dtype))[place] = part
        for key in (*KEYS, "position_ids"):
            assert joined[key].tolist() == golden[f"sanitized_{key}"], (key, cp)
        assert joined["padding_mask"].int().tolist() == golden["padding_mask"]


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_slices(backend: Any) -> None:
    compared = 0
    for name, cu in (("zigzag_per_sequence", [0, 32]), ("zigzag_per_document", [0, 8, 24, 32])):
        for key, indices in DATA[name].items():
            cp, rank = (
                int(part[part.index(letter) + len(letter) :])
                for part, letter in zip(key.split("_"), ("cp", "r"), strict=True)
            )
            ours = cp_partition_indices(torch.tensor(cu, dtype=torch.int32), cp, rank, backend=backend)
            assert ours.tolist() == indices, (name, key)
            compared += 1
    assert compared == 14
