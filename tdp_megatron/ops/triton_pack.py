"""Triton kernels: the packs of a step, and the CP partition. One launch each, no atomics, no wait on the host.

Every place of the output looks up its span by binary search, first of its block, then inside it. Offsets are 64 bit:
a source of more than 2**31 tokens is ordinary.
"""

# Kernels are not Python: their arguments have the types that a launch gives them, and constants are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from tdp_megatron.ops.buffers import PackedTensors
from tdp_megatron.ops.metadata import PackMetadata
from tdp_megatron.ops.pads import PadRules
from tdp_megatron.types import IGNORE_LABEL

__all__ = [
    "BLOCK",
    "copy_rows_kernel",
    "cp_positions_triton",
    "gather_triton",
    "pack_kernel",
    "partition_kernel",
    "tile_of",
]

#: Tokens per program: at 64K tokens about one program for each multiprocessor of a large card.
BLOCK = 512


@triton.jit
def _last_at_or_before(begins, count, divisor, at):
    """Last i in [0, count) with begins[i] // divisor <= at, for one number."""
    low = at * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(begins + middle) // divisor <= at:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _spans_of(begins, count, divisor, first, places, last_place, BLOCK: tl.constexpr):
    """Last i with begins[i] // divisor <= place, for a block of rising places."""
    low_end = _last_at_or_before(begins, count, divisor, first)
    high_end = _last_at_or_before(begins, count, divisor, last_place)
    low = tl.zeros([BLOCK], tl.int64) + low_end
    high = tl.zeros([BLOCK], tl.int64) + high_end
    distance = high_end - low_end
    while distance > 0:
        middle = (low + high + 1) // 2
        right = tl.load(begins + middle) // divisor <= places
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
        distance = distance // 2
    return low


# Numbers that differ from step to step must not compile another kernel.
@triton.jit(do_not_specialize=["capacity", "num_tokens", "pad_token", "pad_label"])
def pack_kernel(
    tokens,
    labels,  # or None: the token behind
    loss_mask,  # or None: by position, and by loss_edges
    position_ids,  # or None: counted from the start of the sequence
    extras,
    rows,
    loss_edges,  # or None
    capacity,
    out_tokens,
    out_labels,
    out_loss_mask,
    out_position_ids,
    out_padding_mask,
    out_document_id,
    out_extras,
    num_tokens,
    pad_token,
    pad_label,
    IGNORE: tl.constexpr,
    ZERO_PAD_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    inside = place < num_tokens
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    searched = tl.minimum(place, last)
    row = _spans_of(rows, capacity, 1, first, searched, last, BLOCK)

    stride = tl.zeros([BLOCK], tl.int64) + capacity
    column = rows + row
    within = searched - tl.load(column)
    source = tl.load(column + stride) + within
    real = inside & (within < tl.load(column + 2 * stride))
    position = tl.load(column + 3 * stride) + within
    document = tl.load(column + 5 * stride)

    token = tl.load(tokens + source, mask=real, other=0).to(tl.int64)
    tl.store(out_tokens + place, tl.where(real, token, pad_token), mask=inside)

    if labels is None:
        counts = inside & (within < tl.load(column + 4 * stride))
        label = tl.load(tokens + source + 1, mask=counts, other=0).to(tl.int64)
        label = tl.where(counts, label, IGNORE)
    else:
        label = tl.load(labels + source, mask=real, other=IGNORE)
        counts = real & (label != IGNORE)
    tl.store(out_labels + place, tl.where(real, label, pad_label), mask=inside)

    if loss_mask is None:
        if loss_edges is not None:
            low_edge = tl.load(column + 6 * stride)
            high = tl.load(column + 7 * stride)
            low = low_edge
            distance = tl.max(high - low, axis=0)
            while distance > 0:
                middle = (low + high) // 2
                unsettled = low < high
                before = unsettled & (tl.load(loss_edges + middle, mask=unsettled, other=0) <= position + 1)
                low = tl.where(before, middle + 1, low)
                high = tl.where(unsettled & (before == 0), middle, high)
                distance = distance // 2
            counts = counts & ((low - low_edge) % 2 == 1)
        loss = counts.to(tl.float32)
    else:
        loss = tl.load(loss_mask + source, mask=real, other=0.0)
    tl.store(out_loss_mask + place, loss, mask=inside)

    at_pad = position
    if ZERO_PAD_POSITIONS:
        at_pad = position * 0
    if position_ids is not None:
        position = tl.load(position_ids + source, mask=real, other=0)
    tl.store(out_position_ids + place, tl.where(real, position, at_pad), mask=inside)
    tl.store(out_padding_mask + place, real == 0, mask=inside)
    tl.store(out_document_id + place, document.to(tl.int32), mask=inside)
    for i in tl.static_range(len(extras)):
        tl.store(out_extras[i] + place, tl.load(extras[i] + source, mask=real, other=0), mask=inside)


@triton.jit(do_not_specialize=["capacity", "num_tokens", "width"])
def copy_rows_kernel(
    values,
    rows,
    capacity,
    out,
    num_tokens,
    width,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """A user key with ``width`` numbers per token."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    inside = place < num_tokens
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    searched = tl.minimum(place, last)
    row = _spans_of(rows, capacity, 1, first, searched, last, BLOCK)
    stride = tl.zeros([BLOCK], tl.int64) + capacity
    column = rows + row
    within = searched - tl.load(column)
    source = tl.load(column + stride) + within
    real = inside & (within < tl.load(column + 2 * stride))

    # 64 bit: tokens times width pass 2**31 long before memory is full.
    entry = tl.program_id(1).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    whole = entry < width
    taken = tl.load(values + source[:, None] * width + entry[None, :], mask=real[:, None] & whole[None, :], other=0)
    tl.store(out + place[:, None] * width + entry[None, :], taken, mask=inside[:, None] & whole[None, :])


@triton.jit(do_not_specialize=["num_seqlens", "cp_size", "cp_rank", "num_tokens"])
def partition_kernel(cu_seqlens, num_seqlens, cp_size, cp_rank, out, num_tokens, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    inside = place < num_tokens
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    searched = tl.minimum(place, last)
    # The last of cu_seqlens is an end, not a beginning.
    sequence = _spans_of(cu_seqlens, num_seqlens, cp_size, first, searched, last, BLOCK)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    within = searched - begin // cp_size
    half = (end - begin) // (2 * cp_size)
    shift = tl.where(within < half, cp_rank, 2 * (cp_size - 1) - cp_rank)
    tl.store(out + place, begin + within + half * shift, mask=inside)


def tile_of(width: int) -> tuple[int, int]:
    """Tokens and numbers per token of one program of ``copy_rows_kernel``; more than 1024 numbers spill on sm_80."""
    block_width = min(triton.next_power_of_2(width), 128)
    return 1024 // block_width, block_width


def gather_triton(
    sources: Mapping[str, torch.Tensor], metadata: PackMetadata, pads: PadRules, out: PackedTensors
) -> None:
    """Fill ``out`` on its device, in the current stream; see ``gather_pack`` for the arguments."""
    if not metadata.num_tokens:
        return
    rows, capacity = metadata.rows, metadata.rows.shape[1]
    plain = [key for key, tensor in out.extras.items() if tensor.ndim == 1]
    with _launching_on(rows.device):
        blocks = triton.cdiv(metadata.num_tokens, BLOCK)
        pack_kernel[(blocks,)](
            sources["tokens"],
            sources.get("labels"),
            sources.get("loss_mask"),
            sources.get("position_ids"),
            tuple(_as_bits(sources[key]) for key in plain),
            rows,
            metadata.loss_edges,
            capacity,
            out.tokens,
            out.labels,
            out.loss_mask,
            out.position_ids,
            out.padding_mask,
            out.document_id,
            tuple(_as_bits(out.extras[key]) for key in plain),
            metadata.num_tokens,
            pads.token,
            pads.label,
            IGNORE=IGNORE_LABEL,
            ZERO_PAD_POSITIONS=pads.positions == "zero",
            BLOCK=BLOCK,
        )
        for key, target in out.extras.items():
            if target.ndim == 1 or not target.numel():
                continue
            width = target[0].numel()
            block, block_width = tile_of(width)
            copy_rows_kernel[(triton.cdiv(metadata.num_tokens, block), triton.cdiv(width, block_width))](
                _as_bits(sources[key]),
                rows,
                capacity,
                _as_bits(target),
                metadata.num_tokens,
                width,
                BLOCK=block,
                BLOCK_WIDTH=block_width,
            )


def cp_positions_triton(cu_seqlens_padded: torch.Tensor, cp_size: int, cp_rank: int, num_tokens: int) -> torch.Tensor:
    """``cp_positions_reference`` in one launch."""
    out = torch.empty(num_tokens, dtype=torch.int64, device=cu_seqlens_padded.device)
    if num_tokens:
        with _launching_on(out.device):
            partition_kernel[(triton.cdiv(num_tokens, BLOCK),)](
                cu_seqlens_padded, len(cu_seqlens_padded) - 1, cp_size, cp_rank, out, num_tokens, BLOCK=BLOCK
            )
    return out


def _launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device its arguments are on."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: a copy does not care what its bits mean, and fewer kernels are compiled."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.element_size() in _BITS else tensor
