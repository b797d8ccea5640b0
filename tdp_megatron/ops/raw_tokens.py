"""Token files to a device without converting them on the host: 2 bytes per token go over the bus, not 33."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tdp_megatron.ops.buffers import packed_batches
from tdp_megatron.ops.gather import Backend, gather_pack
from tdp_megatron.ops.metadata import PackMetadata
from tdp_megatron.ops.pads import PadRules
from tdp_megatron.schedule.pack_table import PackTable
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import PackedBatch, RawTokenReader, SampleBlock

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["pack_raw_tokens"]


def pack_raw_tokens(
    plan: Plan,
    table: PackTable,
    block: SampleBlock,
    *,
    pad_id: int = 0,
    cp_group: Callable[[int, int], dist.ProcessGroup | None] = lambda first_rank, cp_size: None,
    device: torch.device,
    backend: Backend | None = None,
) -> tuple[PackedBatch, ...] | None:
    """The microbatches of a rank, made on ``device`` from tokens as they lie in the files.

    Nothing waits for the device: the tokens are read into pinned memory, which torch's allocator gives to others when
    the copy has ended.

    Args:
        plan: the plan of the global batch.
        table: the rank's spans.
        block: all samples of the global batch.
        pad_id: token id at pads.
        cp_group: process group of a block (first_rank, cp_size).
        device: where the packs are wanted.
        backend: see ``gather_pack``.

    Returns:
        The packs; None where samples are more than their raw tokens, so that they must be read on the host.
    """
    readers = [reader for reader in block.readers if isinstance(reader, RawTokenReader)]
    dtypes = {reader.raw_dtype for reader in readers}
    dtype = dtypes.pop() if len(dtypes) == 1 and len(readers) == len(block.readers) else None
    if dtype is None:
        return None
    pinned = device.type == "cuda"
    real = np.flatnonzero(table.lengths > 0)
    # One token behind each span, where there is one, is the label of the span's last token.
    room = table.lengths[real] + 1
    begins = np.cumsum(room) - room
    tokens = torch.empty(int(room.sum()), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=pinned)
    counts = np.zeros_like(room)
    places = table.sample_ids[real]
    reader_of = block.reader_index[places]
    for number, reader in enumerate(readers):
        rows = np.flatnonzero(reader_of == number)
        if len(rows):
            ids = block.sample_ids[places[rows]]
            counts[rows] = reader.read_raw(ids, table.starts[real[rows]], room[rows], begins[rows], tokens.numpy())
    if (counts < table.lengths[real]).any():  # samples that are padded to their length
        return None
    sources, targets = np.zeros_like(table.lengths), np.zeros_like(table.lengths)
    sources[real], targets[real] = begins, np.minimum(counts - 1, table.lengths[real])
    metadata = PackMetadata.build(plan, table, sources, targets=targets, pin_memory=pinned).to(device)
    packed = gather_pack({"tokens": tokens}, metadata, pads=PadRules(token=pad_id), backend=backend)
    return packed_batches(plan, table, packed, block.refs, cp_group=cp_group, cu_seqlens=metadata.cu_seqlens)
