"""The views that run on a CPU, against attention computed sequence by sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tdp_megatron.nodes.pack import GlobalBatch
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import schedule
from tdp_megatron.types import PackedBatch, ParallelLayout

pytestmark = [
    # The CPU has no fused kernel; the unfused one gives the same values.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # torch's own fallback for jagged tensors on a CPU says this of itself.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

HEADS, CHANNELS = 2, 8
LENGTHS = [[5, 1, 130, 3], [256], [40, 0, 7, 129, 64, 1, 1, 1], [], [3]]


def packs(seqlens: list[int], cp: int, tail_multiple: int = 8) -> list[PackedBatch]:
    """One pack as each of its CP ranks holds it."""
    layout = ParallelLayout(1, cp, 1024, tail_multiple=tail_multiple)
    generator = torch.Generator().manual_seed(1)
    items = [{"tokens": torch.randint(1, 97, (n,), generator=generator)} for n in seqlens]
    block = block_from_items(items, 0, 0)
    batch = GlobalBatch(
        index=0,
        plan=schedule(block.seqlens, layout, algorithm="dp_balanced", equal_count=True),
        seqlens=block.seqlens,
        num_loss_tokens=block.num_loss_tokens,
        refs=block.refs,
        block=block,
    )
    return [batch.pack(rank)[0] for rank in range(cp)]


def random_qkv(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, HEADS, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(3)]


def each_sequence_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int]
) -> torch.Tensor:
    """Causal attention [T, heads, channels], one sequence after the other, by the definition."""
    out = torch.zeros_like(query)
    for begin, end in itertools.pairwise(cu_seqlens):
        for i in range(begin, end):
            scores = torch.einsum("hc,shc->hs", query[i], key[begin : i + 1]) / CHANNELS**0.5
            out[i] = torch.einsum("hs,shc->hc", scores.softmax(dim=-1), value[begin : i + 1])
    return out


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None]


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    out = flex_attention(*map(heads_first, (query, key, value)), block_mask=batch.to_flex_attention())
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("tail_multiple", [8, 128])
def test_flex_attention_is_attention_inside_each_sequence(seqlens: list[int], tail_multiple: int) -> None:
    (batch,) = packs(seqlens, 1, tail_multiple)
    qkv = random_qkv(batch.num_tokens)
    expected = each_sequence_alone(*qkv, batch.cu_seqlens_padded.tolist())
    torch.testing.assert_close(flex(*qkv, batch), expected)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_joined_slices_attend_like_the_whole_pack(seqlens: list[int], cp: int) -> None:
    batches = packs(seqlens, cp)
    cu = batches[0].cu_seqlens_padded
    qkv = random_qkv(int(cu[-1]))
    expected = each_sequence_alone(*qkv, cu.tolist())
    places = [cp_partition_indices(cu, cp, rank) for rank in range(cp)]
    key, value = (torch.cat([x[p] for p in places]) for x in qkv[1:])  # as an all-gather leaves them
    joined = torch.full_like(expected, torch.nan)
    for batch, place in zip(batches, places, strict=True):
        joined[place] = flex(qkv[0][place], key, value, batch)
    torch.testing.assert_close(joined, expected)


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_block_mask_equals_the_one_made_from_the_whole_mask(seqlens: list[int]) -> None:
    (batch,) = packs(seqlens, 1, 128)
    document = batch.document_id

    def mask_mod(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (document[q] == document[kv]) & (q >= kv)

    ours = batch.to_flex_attention()
    theirs = create_block_mask(mask_mod, None, None, batch.num_tokens, batch.num_tokens, device="cpu")
    assert ours.shape == theirs.shape
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for name in ("kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):  # the last two drive the backward pass
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.sparsity() == theirs.sparsity()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=5), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4, 5, 16]))
def test_blocks_hold_every_pair_and_full_blocks_nothing_else(seqlens: list[int], cp: int, block_size: int) -> None:
    """Kernels skip unlisted blocks and do not mask full ones; attention without a kernel shows neither."""
    for batch in packs(seqlens, cp):
        blocks = batch.to_flex_attention(block_size=block_size)
        rows, columns = batch.num_tokens, batch.num_tokens * cp
        assert blocks.seq_lengths == (rows, columns)
        q, kv = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        allowed = blocks.mask_mod(torch.tensor(0), torch.tensor(0), q, kv)
        assert int(allowed.any(dim=1).sum()) == rows
        partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
        full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert not partial & full
        for i in range(-(-rows // block_size)):
            for j in range(-(-columns // block_size)):
                part = allowed[i * block_size : (i + 1) * block_size, j * block_size : (j + 1) * block_size]
                if (i, j) in full:
                    assert bool(part.all())
                    assert part.shape == (block_size, block_size)
                elif (i, j) not in partial:
                    assert not bool(part.any())


def listed(counts: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i, (count, row) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True))
        for j in row[:count]
    }


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_scaled_dot_product_attention_on_nested_views(seqlens: list[int]) -> None:
    # torch has no causal attention of nested tensors on a CPU: this shows that components do not mix.
    (batch,) = packs(seqlens, 1)
    qkv = random_qkv(batch.num_tokens)
    query, key, value = (batch.to_nested(x).transpose(1, 2) for x in qkv)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    for part, alone in zip(out.unbind(), zip(*(batch.to_nested(x).unbind() for x in qkv), strict=True), strict=True):
        if not len(part):
            continue
        scores = torch.einsum("qhc,khc->hqk", alone[0], alone[1]) / CHANNELS**0.5
        torch.testing.assert_close(part, torch.einsum("hqk,khc->qhc", scores.softmax(dim=-1), alone[2]))


def test_document_id_and_position_make_the_dense_mask() -> None:
    (batch,) = packs(LENGTHS[0], 1)
    qkv = random_qkv(batch.num_tokens)
    place = torch.arange(batch.num_tokens)
    mask = (batch.document_id[:, None] == batch.document_id) & (place[:, None] >= place)
    out = F.scaled_dot_product_attention(*map(heads_first, qkv), attn_mask=mask)[0].transpose(0, 1)
    torch.testing.assert_close(out, each_sequence_alone(*qkv, batch.cu_seqlens_padded.tolist()))


@pytest.fixture(scope="module")
def llama() -> Callable[[str], Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def build(implementation: str) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=implementation,
        )
        return transformers.LlamaForCausalLM(config).eval()

    return build


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_face_logits_do_not_depend_on_the_neighbours(llama: Callable[[str], Any], implementation: str) -> None:
    model = llama(implementation)
    (batch,) = packs([9, 1, 30, 3], 1)
    with torch.no_grad():
        logits = model(**batch.to_hf()).logits[0]
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            alone = model(input_ids=batch.tokens[None, begin:end]).logits[0]
            torch.testing.assert_close(logits[begin:end], alone, rtol=1e-5, atol=1e-6)
