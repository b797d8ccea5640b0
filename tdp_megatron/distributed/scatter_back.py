"""Per-token outputs sent back to the ranks their samples came from: log-probabilities, values, rewards of RL."""

from __future__ import annotations

import numpy as np
import torch

from tdp_megatron import _C
from tdp_megatron.distributed.collectives import all_to_all_bytes
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.parcels import GlobalSamples
from tdp_megatron.ops import PackTable, build_pack_table
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array

__all__ = ["scatter_back"]


def scatter_back(host: HostGroup, plan: Plan, samples: GlobalSamples, outputs: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of the samples this rank has read, in the order it read them; one all-to-all.

    Args:
        host: the exchange's group (``exchange.host``).
        plan: of the global batch.
        samples: of the global batch (``GlobalBatch.samples``).
        outputs: of this rank's microbatches one after the other, [T, ...], any dtype; the same on all ranks but for T.

    Returns:
        Per sample [seqlen, ...], on the CPU; pads are left out.

    Raises:
        ValueError: outputs for another number of tokens than the plan gives this rank.
        ExchangeError: a rank is gone or late.
    """
    me = host.rank
    tables = [build_pack_table(plan, r) for r in range(host.size)]
    values = outputs.detach().cpu().contiguous()
    if len(values) != tables[me].num_tokens:
        raise ValueError(f"rank {me} has outputs for {len(values)} tokens, the plan gives it {tables[me].num_tokens}")
    entry = values.shape[1:]
    width = values.element_size() * int(np.prod(entry, dtype=np.int64))
    mine = np.flatnonzero(samples.owner == me)
    mine = mine[np.argsort(samples.local_index[mine], kind="stable")]
    seqlens = samples.seqlens[mine]
    offset_of = np.zeros(len(samples), dtype=np.int64)
    offset_of[mine] = np.cumsum(seqlens) - seqlens

    sends = [_rows(tables[me], samples, owner) for owner in range(host.size)]
    receives = [_rows(table, samples, me) for table in tables]
    send_lengths = [tables[me].lengths[rows] for rows in sends]
    receive_lengths = [table.lengths[rows] for table, rows in zip(tables, receives, strict=True)]
    sizes = [int(lengths.sum()) * width for lengths in send_lengths]
    receive_sizes = [int(lengths.sum()) * width for lengths in receive_lengths]

    joined = np.concatenate(send_lengths)
    send = np.empty(sum(sizes), dtype=np.uint8)
    source = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.zeros(0, dtype=np.uint8)
    _C.copy_spans(
        source,
        np.concatenate([tables[me].destinations[rows] for rows in sends]) * width,
        send,
        (np.cumsum(joined) - joined) * width,
        joined * width,
    )
    received = all_to_all_bytes(host, send, sizes, receive_sizes, f"step {host.step}: sending outputs back")
    result = torch.zeros((int(seqlens.sum()), *entry), dtype=values.dtype)
    if result.numel():
        arrived = np.concatenate(receive_lengths)
        places = [
            offset_of[table.sample_ids[rows]] + table.starts[rows] for table, rows in zip(tables, receives, strict=True)
        ]
        _C.copy_spans(
            received,
            (np.cumsum(arrived) - arrived) * width,
            result.reshape(-1).view(torch.uint8).numpy(),
            np.concatenate(places) * width,
            arrived * width,
        )
    return list(torch.split(result, seqlens.tolist()))


def _rows(table: PackTable, samples: GlobalSamples, owner: int) -> Int64Array:
    """Spans of a rank's packs whose sample ``owner`` has read."""
    rows = np.flatnonzero(table.lengths > 0)
    wanted: Int64Array = rows[samples.owner[table.sample_ids[rows]] == owner]
    return wanted
