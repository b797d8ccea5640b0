"""The gather of packs in plain torch operations: what the native and the Triton one are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tdp_megatron.ops.buffers import PackedTensors
from tdp_megatron.ops.metadata import (
    DESTINATION,
    ENTRY,
    FIRST_EDGE,
    LAST_EDGE,
    LENGTH,
    SOURCE,
    START,
    TARGETS,
    PackMetadata,
)
from tdp_megatron.ops.pads import PadRules
from tdp_megatron.types import IGNORE_LABEL

__all__ = ["gather_reference"]


def gather_reference(
    sources: Mapping[str, torch.Tensor], metadata: PackMetadata, pads: PadRules, out: PackedTensors
) -> None:
    """Fill ``out``, on any device; see ``gather_pack`` for the arguments."""
    rows = metadata.rows
    place = torch.arange(metadata.num_tokens, device=rows.device)
    row = torch.searchsorted(rows[DESTINATION].contiguous(), place, right=True) - 1
    within = place - rows[DESTINATION][row]
    position = rows[START][row] + within
    real = within < rows[LENGTH][row]
    source = rows[SOURCE][row] + within
    labelled = real if "labels" in sources else within < rows[TARGETS][row]

    out.tokens[:] = torch.where(real, _taken(sources["tokens"], source, real), pads.token)
    if "labels" in sources:
        labels = _taken(sources["labels"], source, real)
    else:
        labels = torch.where(labelled, _taken(sources["tokens"], source + 1, labelled), IGNORE_LABEL)
    out.labels[:] = torch.where(real, labels, pads.label)

    if "loss_mask" in sources:
        out.loss_mask[:] = torch.where(real, _taken(sources["loss_mask"], source, real), 0.0)
    else:
        counts = labelled & (labels != IGNORE_LABEL) if "labels" in sources else labelled
        if metadata.loss_edges is not None:
            counts = counts & _inside_spans(metadata.loss_edges, rows, row, position + 1)
        out.loss_mask[:] = counts.float()

    own = _taken(sources["position_ids"], source, real) if "position_ids" in sources else position
    out.position_ids[:] = torch.where(real, own, position if pads.positions == "run_on" else 0)
    out.padding_mask[:] = ~real
    out.document_id[:] = rows[ENTRY][row].to(torch.int32)
    for key, target in out.extras.items():
        taken = _taken(sources[key], source, real)
        target[:] = torch.where(real.view(-1, *[1] * (taken.ndim - 1)), taken, 0)


def _taken(values: torch.Tensor, places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """``values[places]`` where wanted, anything elsewhere; integers as int64."""
    if not len(values):
        return values.new_zeros((len(places), *values.shape[1:])).long()
    places = torch.where(wanted, places, 0)
    if values.dtype == torch.uint16:  # torch has no indexing of it
        return values.view(torch.int16)[places].long() & 0xFFFF
    taken = values[places]
    return taken if values.is_floating_point() or values.ndim > 1 else taken.long()


def _inside_spans(edges: torch.Tensor, rows: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Whether an odd number of its sample's edges lie at or before each position."""
    low, high = rows[FIRST_EDGE][row], rows[LAST_EDGE][row]
    first = low
    if not len(edges):
        return torch.zeros_like(row, dtype=torch.bool)
    for _ in range(len(edges).bit_length()):
        middle = (low + high) // 2
        open_ = low < high
        before = open_ & (edges[torch.where(open_, middle, 0)] <= position)
        low, high = torch.where(before, middle + 1, low), torch.where(open_ & ~before, middle, high)
    return (low - first) % 2 == 1
