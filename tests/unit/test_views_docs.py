"""docs/packing.md tells the truth: its drawing is what `pack` returns, and its example runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdp_megatron.ops import cp_partition_indices, pack
from tdp_megatron.schedule import Plan, PlanOp
from tdp_megatron.types import IGNORE_LABEL, PackedBatch, ParallelLayout

TEXT = (Path(__file__).parents[2] / "docs" / "packing.md").read_text()
LENGTHS = {"a": 5, "b": 2, "c": 8}
NAMES = {10 * (n + 1) + i: f"{letter}{i}" for n, (letter, size) in enumerate(LENGTHS.items()) for i in range(size)}


def drawn(label: str) -> list[str]:
    (line,) = re.findall(rf"^{label}\s+(.*)$", TEXT, re.MULTILINE)
    return line.replace("|", "").split()


def batches() -> list[PackedBatch]:
    plan = Plan.from_ops(
        ParallelLayout(1, 2, 64, tail_multiple=4), np.array(list(LENGTHS.values())), [PlanOp(0, 2, (0, 1, 2))]
    )
    tokens = torch.tensor(list(NAMES))
    return [pack(plan, rank, {"tokens": tokens}, np.array([0, 5, 7]))[0] for rank in range(2)]


def named(values: torch.Tensor, batch: PackedBatch, nothing: str) -> list[str]:
    return [
        nothing if pad or value == IGNORE_LABEL else NAMES[value]
        for value, pad in zip(values.tolist(), batch.padding_mask.tolist(), strict=True)
    ]


def test_the_drawing_of_the_pack_and_of_its_slices() -> None:
    whole: dict[str, list[str]] = {}
    for rank, batch in enumerate(batches()):
        rows = {
            "tokens": named(batch.tokens, batch, "."),
            "labels": named(batch.labels, batch, "-"),
            "loss_mask": [str(int(x)) for x in batch.loss_mask.tolist()],
            "position_ids": [str(x) for x in batch.position_ids.tolist()],
            "padding_mask": [str(int(x)) for x in batch.padding_mask.tolist()],
            "document_id": [str(x) for x in batch.document_id.tolist()],
            "CP rank": [str(rank)] * batch.num_tokens,
        }
        assert drawn(f"rank {rank} tokens") == rows["tokens"]
        assert drawn(f"rank {rank} labels") == rows["labels"]
        assert drawn("cu_seqlens") == [str(x) for x in batch.cu_seqlens.tolist()]
        assert drawn("cu_seqlens_padded") == [str(x) for x in batch.cu_seqlens_padded.tolist()]
        assert drawn("max_seqlen") == [str(batch.max_seqlen)]
        places = cp_partition_indices(batch.cu_seqlens_padded, 2, rank).tolist()
        for key, row in rows.items():
            target = whole.setdefault(key, [""] * 2 * batch.num_tokens)
            for place, entry in zip(places, row, strict=True):
                target[place] = entry
    for key, row in whole.items():
        assert drawn(key) == row, key


def test_the_example_runs() -> None:
    scope: dict[str, Any] = {}
    _, own_packs = TEXT.split("## Making packs yourself")
    for code in re.findall(r"```python\n(.*?)```", own_packs, re.DOTALL):
        exec(code, scope)
    result = scope["batches"]
    assert isinstance(result, tuple)
    assert sum(int(batch.loss_mask.sum()) for batch in result) == 3 + 1 + 4
    assert all("advantage" in batch.extras for batch in result)
    ends = (0, 5, 7, 15)
    assert [part.tolist() for part in scope["per_sample"]] == [
        list(range(2 * begin, 2 * end, 2)) for begin, end in itertools.pairwise(ends)
    ]
