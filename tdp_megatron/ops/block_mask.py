"""FlexAttention's block mask of a pack, from the bounds of each block instead of a T x T mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tdp_megatron.ops.partition import cp_partition_indices
from tdp_megatron.types import PackedBatch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["flex_block_mask"]


def flex_block_mask(batch: PackedBatch, *, block_size: int = 128) -> BlockMask:
    """Causal attention inside each sequence, for ``flex_attention(query, key, value, block_mask=...)``.

    With CP the queries are this rank's T tokens, the keys and values those of all ranks of the group, one rank's
    after the other, as an all-gather leaves them: T * local_cp_size of them.

    Args:
        batch: the pack, on the device of the queries.
        block_size: tokens per side of a block; FlexAttention's kernels want a multiple of 128.

    Raises:
        ValueError: block_size below 1.
    """
    # Slow to import, and needed by few.
    from torch.nn.attention.flex_attention import BlockMask

    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    size, cp_size = batch.num_tokens, batch.local_cp_size
    if cp_size == 1:
        q_document = kv_document = batch.document_id
        q_position = kv_position = torch.arange(size, device=q_document.device, dtype=torch.int32)
    else:
        cu = batch.cu_seqlens_padded
        total = size * cp_size
        every = torch.cat([cp_partition_indices(cu, cp_size, rank, total_tokens=total) for rank in range(cp_size)])
        kv_position = every.to(torch.int32)
        kv_document = (torch.searchsorted(cu, kv_position, right=True) - 1).to(torch.int32)
        mine = slice(batch.cp_rank * size, (batch.cp_rank + 1) * size)
        q_position, q_document = kv_position[mine], kv_document[mine]

    def same_sequence_and_not_later(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return (q_document[q_idx] == kv_document[kv_idx]) & (q_position[q_idx] >= kv_position[kv_idx])

    first_document, last_document = _bounds(q_document, block_size)
    first_position, last_position = _bounds(q_position, block_size)
    kv_first_document, kv_last_document = _bounds(kv_document, block_size)
    kv_first_position, kv_last_position = _bounds(kv_position, block_size)
    # What the bounds do not exclude may hold a pair, and is left to the mask function.
    touched = (
        (first_document[:, None] <= kv_last_document)
        & (last_document[:, None] >= kv_first_document)
        & (last_position[:, None] >= kv_first_position)
    )
    full = (
        (first_document[:, None] == kv_last_document)
        & (last_document[:, None] == kv_first_document)
        & (first_position[:, None] >= kv_last_position)
    )
    # A block that reaches past the end must be masked token by token.
    if size % block_size:
        full[-1] = False
    if size * cp_size % block_size:
        full[:, -1] = False
    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~full),
        *_ordered(full),
        BLOCK_SIZE=block_size,
        mask_mod=same_sequence_and_not_later,
        seq_lengths=(size, size * cp_size),
    )


def _bounds(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value of every block."""
    short = -len(values) % block_size
    padded = torch.cat([values, values[-1:].expand(short)]) if short else values
    blocks = padded.view(-1, block_size)
    return blocks.amin(dim=1), blocks.amax(dim=1)


def _ordered(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of blocks, how many columns are set, and all columns with those first: [1, 1, rows(, columns)]."""
    columns = torch.argsort(mask.to(torch.uint8), dim=1, descending=True, stable=True)
    return mask.sum(dim=1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]
