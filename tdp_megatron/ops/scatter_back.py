"""The way back: what a model computed per packed token, in the order and on the rank the samples came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tdp_megatron.ops.pack_table import build_pack_table
from tdp_megatron.schedule.plan import Plan

__all__ = ["scatter_back"]


def scatter_back(plan: Plan, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per-token outputs of all ranks as one tensor per sample of the global batch, pads left out.

    For outputs that one process has at hand; ``distributed.scatter_back`` is for those that lie on their ranks.

    Args:
        plan: of the global batch.
        outputs: per DP x CP rank, the outputs of its microbatches one after the other, [T, ...].

    Returns:
        Per sample [seqlen, ...], in the order of the global batch.

    Raises:
        ValueError: outputs of the wrong number of ranks or tokens.
    """
    if len(outputs) != plan.layout.num_ranks:
        raise ValueError(f"{len(outputs)} outputs for {plan.layout.num_ranks} ranks")
    offsets = np.concatenate([[0], np.cumsum(plan.seqlens)])
    first = outputs[0]
    joined = torch.zeros((int(offsets[-1]), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for rank, values in enumerate(outputs):
        table = build_pack_table(plan, rank)
        if len(values) != table.num_tokens:
            raise ValueError(f"rank {rank} has outputs for {len(values)} tokens, the plan gives it {table.num_tokens}")
        rows = np.flatnonzero(table.lengths > 0)
        begins = offsets[table.sample_ids[rows]] + table.starts[rows]
        lengths = table.lengths[rows]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = torch.from_numpy(np.repeat(table.destinations[rows], lengths) + within).to(values.device)
        target = torch.from_numpy(np.repeat(begins, lengths) + within).to(values.device)
        joined[target] = values[source].to(joined.device)
    return list(torch.split(joined, plan.seqlens.tolist()))
