"""Context parallelism changes who computes, not what: loss and gradients equal those of one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import PackedBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from model import GPT, GPTConfig

pytestmark = pytest.mark.distributed

CONFIG = GPTConfig(vocab_size=60, hidden_size=32, num_layers=2, num_attention_heads=2)


def slice_of_pack(lengths: list[int], cp_size: int, cp_rank: int, pad_for: int) -> PackedBatch:
    """What one of ``cp_size`` ranks holds of a pack padded for ``pad_for`` ranks; the content depends on neither."""
    multiple = 2 * pad_for
    padded = [-(-n // multiple) * multiple for n in lengths]
    total = max(-(-sum(padded) // (16 * pad_for)), 1) * 16 * pad_for
    real_ends = np.cumsum([0, *lengths])
    padded_ends = np.cumsum([0, *padded])
    tokens = np.zeros(total, np.int64)
    labels = np.full(total, -100)
    position_ids = np.zeros(total, np.int64)
    padding_mask = np.ones(total, bool)
    document_id = np.full(total, len(lengths), np.int32)
    for i, (begin, real, room) in enumerate(zip(padded_ends[:-1], lengths, padded, strict=True)):
        content = np.random.default_rng(i).integers(1, CONFIG.vocab_size, real + 1)
        tokens[begin : begin + real] = content[:-1]
        labels[begin : begin + real] = content[1:]
        padding_mask[begin : begin + real] = False
        position_ids[begin : begin + room] = np.arange(room)
        document_id[begin : begin + room] = i
    bounds = torch.tensor([*padded_ends.tolist(), total])
    held = cp_partition_indices(bounds, cp_size, cp_rank)

    def mine(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)[held]

    return PackedBatch(
        tokens=mine(tokens),
        labels=mine(labels),
        loss_mask=mine((labels != -100).astype(np.float32)),
        position_ids=mine(position_ids),
        padding_mask=mine(padding_mask),
        document_id=mine(document_id),
        cu_seqlens=torch.tensor(real_ends, dtype=torch.int32),
        cu_seqlens_padded=torch.tensor(padded_ends, dtype=torch.int32),
        max_seqlen=max(padded, default=0),
        local_cp_size=cp_size,
        cp_rank=cp_rank,
        first_rank=0,
        sample_ids=tuple(range(len(lengths))),
        refs=tuple((0, i) for i in range(len(lengths))),
        cp_group=dist.group.WORLD if cp_size > 1 else None,
    )


def loss_and_gradients(rank: int, world_size: int, lengths: list[int], pad_for: int) -> tuple[float, list[np.ndarray]]:
    torch.manual_seed(7)
    model = GPT(CONFIG)
    loss = model(slice_of_pack(lengths, world_size, rank, pad_for))
    loss.backward()
    results = [loss.detach()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        results.append(parameter.grad)
    for tensor in results:
        dist.all_reduce(tensor)
    return results[0].item(), [r.numpy() for r in results[1:]]


@pytest.mark.parametrize(
    ("lengths", "cp_size"),
    [
        pytest.param([64], 2, id="one sequence"),
        pytest.param([5, 33, 1, 18], 2, id="ragged with holes"),
        pytest.param([7, 40, 3], 4, id="shorter than the chunks of 4 ranks"),
        pytest.param([31, 2], 3, id="3 ranks"),
    ],
)
def test_shared_pack_equals_one_rank(lengths: list[int], cp_size: int) -> None:
    (expected,) = run_ranks(loss_and_gradients, 1, lengths, cp_size)
    shared = run_ranks(loss_and_gradients, cp_size, lengths, cp_size)
    assert expected[0] > 1.0
    for loss, gradients in shared:
        assert loss == pytest.approx(expected[0], rel=1e-5)
        for got, want in zip(gradients, expected[1], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_shared_dummy_pack_is_silent() -> None:
    for loss, gradients in run_ranks(loss_and_gradients, 2, [], 2):
        assert loss == 0.0
        assert all(not g.any() for g in gradients)


def test_holes_between_sequences_change_nothing() -> None:
    (dense,) = run_ranks(loss_and_gradients, 1, [5, 33, 1, 18], 1)
    (holes,) = run_ranks(loss_and_gradients, 1, [5, 33, 1, 18], 4)
    assert holes[0] == pytest.approx(dense[0], rel=1e-6)
    for got, want in zip(holes[1], dense[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
