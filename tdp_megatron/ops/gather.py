"""From samples that lie one after the other to packed microbatches: one pass per step, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from tdp_megatron.ops.buffers import PackedTensors, packed_batches
from tdp_megatron.ops.gather_native import gather_native
from tdp_megatron.ops.gather_reference import gather_reference
from tdp_megatron.ops.metadata import LossSpans, PackMetadata
from tdp_megatron.ops.pads import DEFAULT_PADS, PadRules
from tdp_megatron.ops.triton_present import has_triton
from tdp_megatron.schedule.pack_table import build_pack_table
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array, PackedBatch

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Backend", "gather_pack", "pack"]

Backend: TypeAlias = Literal["reference", "native", "triton"]

_STANDARD = ("tokens", "labels", "loss_mask", "position_ids")
_TOKEN_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


def pack(
    plan: Plan,
    rank: int,
    sources: Mapping[str, torch.Tensor],
    offsets: Int64Array,
    *,
    extra_token: bool = False,
    loss_spans: LossSpans | None = None,
    pads: PadRules = DEFAULT_PADS,
    refs: Int64Array | None = None,
    values: Mapping[int, Mapping[str, Any]] | None = None,
    cp_group: Callable[[int, int], dist.ProcessGroup | None] = lambda first_rank, cp_size: None,
    device: torch.device | str | None = None,
    backend: Backend | None = None,
) -> tuple[PackedBatch, ...]:
    """The packed microbatches of one rank, from samples that lie in flat tensors.

    Labels are shifted inside their own sample before the CP slice is taken, so a label whose token another rank
    holds is right.

    Args:
        plan: who runs what.
        rank: DP x CP rank.
        sources: flat tensors [S, ...] per key. ``tokens``: any integer dtype of the .idx format, with any stretches
            between the samples. ``labels``, where missing: the token behind. ``loss_mask``, where missing: 1 where
            there is a label other than -100 (and, with ``loss_spans``, inside them). ``position_ids``, where missing:
            counted from 0 in each sample. Every other key is packed like tokens, with zeros at pads.
        offsets: int64 [N], where the first token of each sample of the global batch lies in the sources; of samples
            that this rank does not hold it does not matter.
        extra_token: each sample has one token more than its length, the label of its last position.
        loss_spans: learned tokens of all samples of the global batch.
        pads: what stands at pads.
        refs: int64 [N, 2], (dataset_id, sample_id) of the samples; None for (0, number in the global batch).
        values: per-sample user keys of the samples this rank holds.
        cp_group: process group of a block (first_rank, cp_size).
        device: where the packs are wanted; None for where the tokens are.
        backend: None for the fastest on that device.

    Raises:
        ValueError: samples that reach past the sources, or arguments that do not fit together.
        TypeError: tokens, labels or positions that are not integers.
    """
    device = sources["tokens"].device if device is None and "tokens" in sources else torch.device(device or "cpu")
    if offsets.shape != plan.seqlens.shape:
        raise ValueError(f"offsets have shape {offsets.shape}; the plan has {len(plan.seqlens)} samples")
    table = build_pack_table(plan, rank)
    first = np.where(table.lengths > 0, table.sample_ids, 0)
    starts = offsets[first] + table.starts if len(offsets) else np.zeros_like(table.starts)
    metadata = PackMetadata.build(
        plan,
        table,
        starts,
        extra_token=extra_token,
        loss_spans=loss_spans,
        pin_memory=device.type == "cuda",
    ).to(device)
    packed = gather_pack(sources, metadata, pads=pads, backend=backend)
    if refs is None:
        refs = np.stack([np.zeros_like(offsets), np.arange(len(offsets))], axis=1)
    return packed_batches(plan, table, packed, refs, values=values, cp_group=cp_group, cu_seqlens=metadata.cu_seqlens)


def gather_pack(
    sources: Mapping[str, torch.Tensor],
    metadata: PackMetadata,
    *,
    pads: PadRules = DEFAULT_PADS,
    backend: Backend | None = None,
    out: PackedTensors | None = None,
) -> PackedTensors:
    """All packs of a step in one pass; on a GPU one launch, and one more per user key with several numbers per token.

    Args:
        sources: see ``pack``; tensors that are elsewhere are copied to the metadata's device.
        metadata: on the device where the packs are wanted.
        pads: what stands at pads.
        backend: None for "triton" on a GPU that has it, "native" on the CPU, else "reference".
        out: tensors of the right size to write into; None for new ones.

    Raises:
        ValueError: samples that reach past the sources, sources of different sizes, an ``out`` that does not fit, or
            a backend that cannot run there.
        TypeError: tokens, labels or positions that are not integers.
    """
    device = metadata.rows.device
    ready = _prepared(sources, metadata, device)
    if out is None:
        out = _allocate(ready, metadata.num_tokens, device)
    else:
        _check_out(out, ready, metadata.num_tokens, device)
    run = _implementation(device, backend)
    run(ready, metadata, pads, out)
    return out


def _implementation(device: torch.device, backend: Backend | None) -> Callable[..., None]:
    if backend is None:
        if device.type == "cpu":
            backend = "native"
        else:
            backend = "triton" if device.type == "cuda" and has_triton() else "reference"
    if backend == "reference":
        return gather_reference
    if backend == "native":
        if device.type != "cpu":
            raise ValueError(f"backend 'native' runs on the CPU, the packs are wanted on {device}")
        return gather_native
    if backend != "triton":
        raise ValueError(f"backend must be 'reference', 'native' or 'triton', got {backend!r}")
    if not has_triton():
        raise ValueError("backend 'triton' needs triton 3.3 or later: pip install 'tdp-megatron[triton]'")
    from tdp_megatron.ops.triton_pack import gather_triton

    return gather_triton


def _prepared(
    sources: Mapping[str, torch.Tensor], metadata: PackMetadata, device: torch.device
) -> dict[str, torch.Tensor]:
    """The sources on the device, in the dtypes the implementations take; all sizes checked."""
    if "tokens" not in sources:
        raise ValueError(f"sources have no key 'tokens'; they have {sorted(sources)}")
    size = len(sources["tokens"]) if sources["tokens"].ndim else 0
    ready: dict[str, torch.Tensor] = {}
    for key, tensor in sources.items():
        if tensor.ndim == 0 or (key in _STANDARD and tensor.ndim != 1):
            raise ValueError(f"source {key!r} must have one entry per token, has shape {tuple(tensor.shape)}")
        if len(tensor) != size:
            raise ValueError(f"source {key!r} has {len(tensor)} entries, 'tokens' has {size}")
        if key in _STANDARD and key != "loss_mask" and tensor.dtype not in _TOKEN_DTYPES:
            raise TypeError(f"source {key!r} must hold integers of up to 64 bits, has dtype {tensor.dtype}")
        if tensor.element_size() > 8 or tensor.is_complex():
            raise TypeError(f"source {key!r} has dtype {tensor.dtype}; give complex numbers as torch.view_as_real")
        if key in ("labels", "position_ids"):
            tensor = tensor.to(torch.int64)
        elif key == "loss_mask":
            tensor = tensor.to(torch.float32)
        ready[key] = tensor.detach().contiguous().to(device, non_blocking=True)
    # A GPU would read whatever lies behind, so this is checked here, on the host, before anything is launched.
    end = metadata.end_of_sources if "labels" in sources else metadata.end_of_labels
    if end > size:
        what = "tokens" if "labels" in sources else "tokens, labels of last positions included,"
        raise ValueError(f"the samples reach {end} {what} into sources that have {size}; check offsets and extra_token")
    return ready


def _allocate(sources: Mapping[str, torch.Tensor], size: int, device: torch.device) -> PackedTensors:
    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((size, *shape), dtype=dtype, device=device)

    return PackedTensors(
        tokens=new(torch.int64),
        labels=new(torch.int64),
        loss_mask=new(torch.float32),
        position_ids=new(torch.int64),
        padding_mask=new(torch.bool),
        document_id=new(torch.int32),
        extras={key: new(t.dtype, *t.shape[1:]) for key, t in sources.items() if key not in _STANDARD},
    )


def _check_out(out: PackedTensors, sources: Mapping[str, torch.Tensor], size: int, device: torch.device) -> None:
    wanted = _allocate(sources, size, torch.device("meta"))
    if set(out.extras) != set(wanted.extras):
        raise ValueError(f"out has the user keys {sorted(out.extras)}, the sources {sorted(wanted.extras)}")
    names = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "document_id")
    pairs = [(name, getattr(out, name), getattr(wanted, name)) for name in names]
    pairs += [(key, tensor, wanted.extras[key]) for key, tensor in out.extras.items()]
    for name, have, want in pairs:
        if have.shape != want.shape or have.dtype != want.dtype or have.device != device or not have.is_contiguous():
            raise ValueError(
                f"out.{name} is {have.dtype} {tuple(have.shape)} on {have.device}, wanted contiguous {want.dtype} "
                f"{tuple(want.shape)} on {device}"
            )
