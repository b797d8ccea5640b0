"""What each attention library wants of a ``PackedBatch``: arguments that share its tensors, never copies.

``PackedBatch.to_*`` are these functions. All of them describe causal attention inside each sequence; the pads behind
a sequence belong to it and come after its real tokens, so no real token sees them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdp_megatron.types import Lengths, PackedBatch

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["PackedSeqParams", "flash_attn_args", "hf_args", "megatron_params", "nested", "varlen_attn_args"]


@dataclass
class PackedSeqParams:
    """Megatron's description of a THD microbatch, field for field, for processes without Megatron."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: dist.ProcessGroup | None = None


def megatron_params(batch: PackedBatch, *, lengths: Lengths = "padded") -> Any:
    """``PackedSeqParams`` for Megatron and for Transformer Engine's ``DotProductAttention``, with or without CP.

    Args:
        batch: the pack.
        lengths: "padded" puts the padded lengths in all four fields, which is exact for causal attention and keeps
            every attention backend eligible. "real" tells Transformer Engine where the pads are.

    Returns:
        Megatron's own class where Megatron's module is loaded in this process, else ``PackedSeqParams``.

    Raises:
        ValueError: another word for ``lengths``.
    """
    # Transformer Engine compares the objects, not their values, to learn whether sequences have holes behind them.
    cu = _chosen(batch, lengths)
    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "cu_seqlens_q_padded": batch.cu_seqlens_padded,
        "cu_seqlens_kv_padded": batch.cu_seqlens_padded,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "local_cp_size": batch.local_cp_size,
        "cp_group": batch.cp_group,
    }
    # Importing Megatron takes seconds and warns; whoever hands it this object has imported it already.
    module = sys.modules.get("megatron.core.packed_seq_params")
    if module is None:
        return PackedSeqParams(**fields)
    known = module.PackedSeqParams.__dataclass_fields__
    return module.PackedSeqParams(**{name: value for name, value in fields.items() if name in known})


def flash_attn_args(batch: PackedBatch) -> dict[str, Any]:
    """Keyword arguments of ``flash_attn_varlen_func``, FlashAttention 2 and 3; add ``causal=True``.

    Returns:
        cu_seqlens_q and cu_seqlens_k, one int32 tensor; max_seqlen_q and max_seqlen_k, Python integers, tokens.

    Raises:
        ValueError: the pack is shared by several CP ranks.
    """
    _require_whole(batch, "FlashAttention's varlen functions")
    cu, longest = batch.cu_seqlens_padded, batch.max_seqlen
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}


def varlen_attn_args(batch: PackedBatch) -> dict[str, Any]:
    """Keyword arguments of ``torch.nn.attention.varlen.varlen_attn``; add what your torch calls causal.

    Returns:
        cu_seq_q and cu_seq_k, one int32 tensor; max_q and max_k, Python integers, tokens.

    Raises:
        ValueError: the pack is shared by several CP ranks.
    """
    _require_whole(batch, "torch's varlen_attn")
    cu, longest = batch.cu_seqlens_padded, batch.max_seqlen
    return {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": longest, "max_k": longest}


def nested(batch: PackedBatch, values: torch.Tensor | None = None, *, lengths: Lengths = "padded") -> torch.Tensor:
    """A jagged nested tensor over per-token values: one component per sequence, the tail pad being the last.

    Args:
        batch: the pack.
        values: [T, ...], such as the tokens, or queries [T, heads, channels]; None for the tokens.
        lengths: "padded" for components with their pads, "real" for components without (then not contiguous).

    Returns:
        A view of ``values``, [n, jagged, ...].

    Raises:
        ValueError: the pack is shared by several CP ranks, ``values`` do not have T entries, or another word for
            ``lengths``.
    """
    _require_whole(batch, "nested tensors")
    values = batch.tokens if values is None else values
    if values.ndim == 0 or values.shape[0] != batch.num_tokens:
        raise ValueError(f"values have shape {tuple(values.shape)}; the first dimension must be T = {batch.num_tokens}")
    cu = _chosen(batch, lengths)
    offsets = batch.cu_seqlens_padded
    if cu is offsets:
        return torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=batch.max_seqlen)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=cu.diff(), max_seqlen=batch.max_seqlen)


def hf_args(batch: PackedBatch) -> dict[str, Any]:
    """Keyword arguments of a Hugging Face causal model's ``forward``; no ``attention_mask``, which would undo them.

    ``cu_seq_lens_*`` and ``max_length_*`` are what the flash-attention backends read; eager, SDPA and FlexAttention
    find the sequences where ``position_ids`` restart, but only without a cache, hence ``use_cache``. Labels are left
    out: the batch's are shifted already and have a loss mask of their own.

    Returns:
        input_ids and position_ids [1, T]; cu_seq_lens_q and cu_seq_lens_k, one int32 tensor; max_length_q and
        max_length_k, Python integers, tokens; use_cache, False.

    Raises:
        ValueError: the pack is shared by several CP ranks.
    """
    _require_whole(batch, "Hugging Face models")
    cu, longest = batch.cu_seqlens_padded, batch.max_seqlen
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def _chosen(batch: PackedBatch, lengths: Lengths) -> torch.Tensor:
    if lengths not in ("padded", "real"):
        raise ValueError(f"lengths must be 'padded' or 'real', got {lengths!r}")
    return batch.cu_seqlens if lengths == "real" else batch.cu_seqlens_padded


def _require_whole(batch: PackedBatch, consumer: str) -> None:
    if batch.local_cp_size > 1:
        raise ValueError(
            f"this pack is shared by {batch.local_cp_size} CP ranks and {consumer} need all of it on one: use "
            "to_megatron() with Transformer Engine, to_flex_attention() with gathered keys and values, or CP size 1"
        )
