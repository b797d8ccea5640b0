"""The example GPT on one rank: document masking, pads and dummy packs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tdp_megatron.types import PackedBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from model import GPT, AttentionContext, GPTConfig

CONFIG = GPTConfig(vocab_size=50, hidden_size=32, num_layers=2, num_attention_heads=2)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def whole_pack(documents: list[torch.Tensor], num_tokens: int) -> PackedBatch:
    """The documents one after the other on one rank, then pads."""
    lengths = [len(d) for d in documents]
    tail = num_tokens - sum(lengths)
    pads = torch.zeros(tail, dtype=torch.int64)
    ends = np.cumsum([0, *lengths])
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    labels = [torch.cat([d[1:], torch.tensor([-100])]) for d in documents]
    all_labels = torch.cat([*labels, torch.full((tail,), -100)])
    return PackedBatch(
        tokens=torch.cat([*documents, pads]),
        labels=all_labels,
        loss_mask=(all_labels != -100).float(),
        position_ids=torch.cat([torch.arange(n) for n in [*lengths, tail]]),
        padding_mask=torch.arange(num_tokens) >= sum(lengths),
        document_id=torch.repeat_interleave(
            torch.arange(len(lengths) + 1, dtype=torch.int32), torch.tensor([*lengths, tail])
        ),
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens,
        max_seqlen=max([*lengths, tail]),
        local_cp_size=1,
        cp_rank=0,
        first_rank=0,
        sample_ids=tuple(range(len(lengths))),
        refs=tuple((0, i) for i in range(len(lengths))),
    )


def random_documents(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(1, CONFIG.vocab_size, (n,)) for n in lengths]


def test_output_of_a_document_is_independent_of_its_neighbours() -> None:
    model = GPT(CONFIG)
    first, second, other = random_documents(7, 9, 7)
    together = model.logits(whole_pack([first, second], 32))
    swapped = model.logits(whole_pack([other, second], 32))
    alone = model.logits(whole_pack([second], 16))
    torch.testing.assert_close(together[7:16], swapped[7:16])
    torch.testing.assert_close(together[7:16], alone[:9])
    assert not torch.allclose(together[:7], swapped[:7])


def test_attention_is_causal() -> None:
    model = GPT(CONFIG)
    (document,) = random_documents(12)
    changed = document.clone()
    changed[8] = (changed[8] + 1) % CONFIG.vocab_size
    before, after = (model.logits(whole_pack([d], 16)) for d in (document, changed))
    torch.testing.assert_close(before[:8], after[:8])
    assert not torch.allclose(before[8:12], after[8:12])


def test_pads_add_nothing_to_loss_or_gradients() -> None:
    model = GPT(CONFIG)
    documents = random_documents(5, 6)
    gradients = []
    losses = []
    for num_tokens in (11, 48):
        loss = model(whole_pack(documents, num_tokens))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])
    for unpadded, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(unpadded, padded)


def test_dummy_pack_reaches_every_parameter_with_zero_loss() -> None:
    model = GPT(CONFIG)
    loss = model(whole_pack([], 16))
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_shared_pack_without_process_group_is_refused() -> None:
    import dataclasses

    batch = dataclasses.replace(whole_pack(random_documents(16), 16), local_cp_size=2)
    with pytest.raises(ValueError, match=r"shared by 2 ranks.*DpCpGroups\.create"):
        AttentionContext(batch, CONFIG)


def test_pack_longer_than_its_tokens_is_refused() -> None:
    import dataclasses

    ends = torch.tensor([0, 20], dtype=torch.int32)
    batch = dataclasses.replace(whole_pack(random_documents(16), 16), cu_seqlens=ends, cu_seqlens_padded=ends)
    with pytest.raises(ValueError, match="ends at 20 but the pack has 16 tokens"):
        AttentionContext(batch, CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size 30 must be a multiple"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{"vocab_size": 10, **change})
