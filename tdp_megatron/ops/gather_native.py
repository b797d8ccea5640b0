"""The gather of packs in C++: one pass over the spans, the GIL released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron import _C
from tdp_megatron.ops.buffers import PackedTensors
from tdp_megatron.ops.metadata import PackMetadata
from tdp_megatron.ops.pads import PadRules
from tdp_megatron.types import IGNORE_LABEL

__all__ = ["gather_native"]

_CODES = {
    torch.uint8: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.uint16: 8,
}


def gather_native(
    sources: Mapping[str, torch.Tensor], metadata: PackMetadata, pads: PadRules, out: PackedTensors
) -> None:
    """Fill ``out`` on the CPU; see ``gather_pack`` for the arguments."""

    def optional(key: str) -> npt.NDArray[Any] | None:
        return sources[key].numpy() if key in sources else None

    rows = metadata.rows.numpy()
    tokens = sources["tokens"]
    _C.pack(
        rows,
        None if metadata.loss_edges is None else metadata.loss_edges.numpy(),
        _bytes(tokens),
        _CODES[tokens.dtype],
        optional("labels"),
        optional("loss_mask"),
        optional("position_ids"),
        out.tokens.numpy(),
        out.labels.numpy(),
        out.loss_mask.numpy(),
        out.position_ids.numpy(),
        out.padding_mask.numpy(),
        out.document_id.numpy(),
        pads.token,
        pads.label,
        IGNORE_LABEL,
        pads.positions == "zero",
    )
    for key, target in out.extras.items():
        width = target.element_size() * (target[0].numel() if len(target) else 0)
        _C.pack_bytes(rows, _bytes(sources[key]), width, _bytes(target))


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    if not tensor.numel():  # torch cannot view nothing as bytes
        return np.zeros(0, dtype=np.uint8)
    # By way of torch: bfloat16 has no NumPy dtype.
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
