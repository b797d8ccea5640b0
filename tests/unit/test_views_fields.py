"""What the views hand out: shared tensors, the identity rule, dtypes, and refusals."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tdp_megatron.nodes.pack import GlobalBatch
from tdp_megatron.ops.views import PackedSeqParams
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import schedule
from tdp_megatron.types import PackedBatch, ParallelLayout


def packed(seqlens: list[int], *, cp: int = 1, rank: int = 0, tail_multiple: int = 4) -> PackedBatch:
    layout = ParallelLayout(1, cp, 256, tail_multiple=tail_multiple)
    block = block_from_items([{"tokens": torch.arange(1, n + 1)} for n in seqlens], 0, 0)
    batch = GlobalBatch(
        index=0,
        plan=schedule(block.seqlens, layout, algorithm="dp_balanced"),
        seqlens=block.seqlens,
        num_loss_tokens=block.num_loss_tokens,
        refs=block.refs,
        block=block,
    )
    (one,) = batch.pack(rank)
    return one


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_megatron_gets_one_object_in_all_four_fields_when_nothing_is_padded_between_sequences() -> None:
    batch = packed([5, 8, 2])
    params = batch.to_megatron()
    assert params.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name) is batch.cu_seqlens_padded
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == [0, 5, 13, 15, 16]
    real = batch.to_megatron(lengths="real")
    assert real.cu_seqlens_q is real.cu_seqlens_q_padded
    assert type(params.max_seqlen_q) is type(params.max_seqlen_kv) is int
    assert params.max_seqlen_q == params.max_seqlen_kv == 8


def test_megatron_sees_the_holes_only_on_request() -> None:
    batch = packed([5, 8, 2], cp=2, rank=1)
    params, real = batch.to_megatron(), batch.to_megatron(lengths="real")
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded
    assert params.cu_seqlens_q.tolist() == [0, 8, 16, 20, 24]
    assert real.cu_seqlens_q is real.cu_seqlens_kv is batch.cu_seqlens
    assert real.cu_seqlens_q is not real.cu_seqlens_q_padded
    assert real.cu_seqlens_q.tolist() == [0, 5, 13, 15, 19]
    assert real.cu_seqlens_q_padded.tolist() == [0, 8, 16, 20, 24]
    assert params.local_cp_size == 2
    assert params.cp_group is None


def test_identity_outlives_a_move_to_a_device() -> None:
    params = packed([5, 8, 2]).to("cpu").to_megatron(lengths="real")
    assert params.cu_seqlens_q is params.cu_seqlens_q_padded


def test_megatron_own_class_is_used_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Older:
        qkv_format: str | None = None
        cu_seqlens_q: Any = None
        cu_seqlens_kv: Any = None
        cu_seqlens_q_padded: Any = None
        cu_seqlens_kv_padded: Any = None
        max_seqlen_q: Any = None
        max_seqlen_kv: Any = None

    module = ModuleType("megatron.core.packed_seq_params")
    module.PackedSeqParams = Older  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    params = packed([4]).to_megatron()
    assert type(params) is Older
    assert params.max_seqlen_q == 4


def test_fields_are_those_of_the_megatron_installed_here() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("megatron.core.packed_seq_params")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for name in (f.name for f in fields(PackedSeqParams)):
        assert f"    {name}:" in source, name


def test_flash_attn_and_varlen_share_the_tensor_and_name_real_parameters() -> None:
    batch = packed([5, 8, 2])
    flash, torch_varlen = batch.to_flash_attn(), batch.to_varlen_attn()
    assert flash["cu_seqlens_q"] is flash["cu_seqlens_k"] is batch.cu_seqlens_padded
    assert torch_varlen["cu_seq_q"] is torch_varlen["cu_seq_k"] is batch.cu_seqlens_padded
    for longest in (flash["max_seqlen_q"], flash["max_seqlen_k"], torch_varlen["max_q"], torch_varlen["max_k"]):
        assert type(longest) is int
        assert longest == 8
    assert set(torch_varlen) <= set(inspect.signature(varlen.varlen_attn).parameters)


def test_hf_views_are_not_copies() -> None:
    batch = packed([5, 8, 2])
    args = batch.to_hf()
    assert shares_memory(args["input_ids"], batch.tokens)
    assert shares_memory(args["position_ids"], batch.position_ids)
    assert args["input_ids"].shape == args["position_ids"].shape == (1, 16)
    assert args["cu_seq_lens_q"] is args["cu_seq_lens_k"] is batch.cu_seqlens_padded
    assert args["max_length_q"] == args["max_length_k"] == 8


def test_nested_components_are_the_sequences_and_the_tail() -> None:
    batch = packed([5, 8, 2])
    view = batch.to_nested()
    assert shares_memory(view.values(), batch.tokens)
    assert [part.tolist() for part in view.unbind()] == [[1, 2, 3, 4, 5], [*range(1, 9)], [1, 2], [0]]
    channels = torch.randn(16, 2, 3)
    assert [tuple(part.shape) for part in batch.to_nested(channels).unbind()] == [
        (5, 2, 3),
        (8, 2, 3),
        (2, 2, 3),
        (1, 2, 3),
    ]


def with_holes() -> PackedBatch:
    """Two sequences of 3 and 2 tokens, each padded to 4, on one rank."""
    import dataclasses

    return dataclasses.replace(
        packed([4, 4]),
        tokens=torch.tensor([1, 2, 3, 0, 1, 2, 0, 0]),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, 4, 8], dtype=torch.int32),
    )


def test_nested_real_lengths_leave_the_pads_out() -> None:
    batch = with_holes()
    assert [part.tolist() for part in batch.to_nested(lengths="real").unbind()] == [[1, 2, 3], [1, 2]]
    assert [part.tolist() for part in batch.to_nested().unbind()] == [[1, 2, 3, 0], [1, 2, 0, 0]]


@pytest.mark.parametrize("view", ["to_flash_attn", "to_varlen_attn", "to_nested", "to_hf"])
def test_views_of_whole_packs_refuse_a_slice(view: str) -> None:
    with pytest.raises(ValueError, match="shared by 2 CP ranks .* use to_megatron"):
        getattr(packed([8], cp=2), view)()


def test_bad_arguments() -> None:
    batch = packed([5, 8, 2])
    with pytest.raises(ValueError, match="'padded' or 'real', got 'both'"):
        batch.to_megatron(lengths="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'padded' or 'real', got 1"):
        batch.to_nested(lengths=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(15, 2\); the first dimension must be T = 16"):
        batch.to_nested(torch.zeros(15, 2))
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        batch.to_flex_attention(block_size=0)
