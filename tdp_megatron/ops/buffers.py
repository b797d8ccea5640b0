"""Packed microbatches: one buffer per key for all of a rank's microbatches of a step, and views of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron import _C
from tdp_megatron.ops.buffer_pool import BufferPool
from tdp_megatron.schedule.pack_table import PackTable
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.torch_dtypes import tensor_of
from tdp_megatron.types import IGNORE_LABEL, Int64Array, PackedBatch

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["PackBuffers", "PackedTensors", "allocate_pack", "packed_batches"]

#: Buffers of steps that the training loop is done with.
_POOL = BufferPool()

_STANDARD = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, slots=True)
class PackBuffers:
    """One flat array per per-token key for all microbatches of a rank, pads filled in."""

    arrays: Mapping[str, npt.NDArray[Any]]
    """Per key [T, ...]; ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` and user keys."""
    padding_mask: npt.NDArray[np.bool_]
    document_id: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """One tensor per key for all microbatches of a rank, on any device; their dtypes are ``PackedBatch``'s."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    document_id: torch.Tensor
    extras: Mapping[str, torch.Tensor]
    """User keys per token [T, ...]; zeros at pads."""

    @staticmethod
    def over(buffers: PackBuffers) -> PackedTensors:
        """Tensors that share the memory of ``buffers``."""
        tensors = {key: tensor_of(array) for key, array in buffers.arrays.items()}
        standard = {key: tensors.pop(key) for key in _STANDARD}
        return PackedTensors(
            **standard,
            padding_mask=torch.from_numpy(buffers.padding_mask),
            document_id=torch.from_numpy(buffers.document_id),
            extras=tensors,
        )


def allocate_pack(
    table: PackTable, extra_keys: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], *, pad_id: int = 0
) -> PackBuffers:
    """Buffers whose pads are right and whose real tokens, labels and loss mask are still to be written.

    Args:
        table: the spans.
        extra_keys: keys per token, with dtype and shape of one token's entry; pads of user keys get zeros.
        pad_id: token id at pads.
    """
    size = table.num_tokens
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": _POOL.empty(size, np.int64),
        "labels": _POOL.empty(size, np.int64),
        "loss_mask": _POOL.empty(size, np.float32),
        "position_ids": _POOL.empty(size, np.int64),
    }
    padding_mask = _POOL.empty(size, np.bool_)
    document_id = _POOL.empty(size, np.int32)
    _C.fill_spans(
        table.destinations,
        table.widths,
        table.starts,
        table.lengths,
        table.entries,
        pad_id,
        IGNORE_LABEL,
        arrays["tokens"],
        arrays["labels"],
        arrays["loss_mask"],
        arrays["position_ids"],
        padding_mask,
        document_id,
    )
    for key, (dtype, shape) in extra_keys.items():
        if key not in arrays:
            arrays[key] = _POOL.empty((size, *shape), dtype)
            arrays[key][...] = 0
    return PackBuffers(arrays=arrays, padding_mask=padding_mask, document_id=document_id)


def cu_seqlens_of(plan: Plan, op: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cumulative real and padded lengths of one op's pack, its tail as a last sequence, and the longest.

    Returns:
        cu_seqlens and cu_seqlens_padded, int32 [n + 1], one object when no sequence has a hole behind it; and the
        longest padded length, tokens.
    """
    begin, end = int(plan.op_offsets[op]), int(plan.op_offsets[op + 1])
    padded = plan.padded_lengths[begin:end]
    real = plan.seqlens[plan.sample_ids[begin:end]]
    tail = int(plan.op_tokens_per_rank[op] * plan.op_cp_size[op] - padded.sum())
    if tail:
        padded, real = np.append(padded, tail), np.append(real, tail)

    def cumulative(lengths: Int64Array) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    cu_padded = cumulative(padded)
    cu = cu_padded if np.array_equal(real, padded) else cumulative(real)
    return cu, cu_padded, int(padded.max()) if len(padded) else 0


def packed_batches(
    plan: Plan,
    table: PackTable,
    buffers: PackBuffers | PackedTensors,
    refs: Int64Array,
    *,
    values: Mapping[int, Mapping[str, Any]] | None = None,
    cp_group: Callable[[int, int], dist.ProcessGroup | None] = lambda first_rank, cp_size: None,
    cu_seqlens: Sequence[tuple[torch.Tensor, torch.Tensor, int]] | None = None,
) -> tuple[PackedBatch, ...]:
    """Views of the buffers, one ``PackedBatch`` per microbatch.

    Args:
        plan: the plan of this global batch.
        table: this rank's spans.
        buffers: filled buffers.
        refs: int64 [N, 2], provenance of every sample of the global batch.
        values: per-sample user keys of the samples this rank holds; all samples have the same keys.
        cp_group: process group of a block (first_rank, cp_size).
        cu_seqlens: per microbatch, where they are on a device already: see ``PackMetadata``.

    Raises:
        ValueError: a sample lacks a user key that others of its pack have.
    """
    tensors = PackedTensors.over(buffers) if isinstance(buffers, PackBuffers) else buffers
    if cu_seqlens is None:
        cu_seqlens = [cu_seqlens_of(plan, op) for op in table.ops.tolist()]
    batches = []
    for m, op in enumerate(table.ops.tolist()):
        part = slice(int(table.op_offsets[m]), int(table.op_offsets[m + 1]))
        ids = plan.sample_ids[int(plan.op_offsets[op]) : int(plan.op_offsets[op + 1])]
        cu, cu_padded, longest = cu_seqlens[m]
        extras: dict[str, Any] = {key: tensor[part] for key, tensor in tensors.extras.items()}
        if values:
            names = sorted({name for i in ids.tolist() for name in values[i]})
            for i in ids.tolist():
                if len(values[i]) < len(names):
                    missing = next(name for name in names if name not in values[i])
                    dataset, sample = refs[i].tolist()
                    raise ValueError(
                        f"sample {sample} of dataset {dataset} has no key {missing!r}, which others of its pack have; "
                        "give every sample the same keys"
                    )
            for name in names:
                extras[name] = tuple(values[i][name] for i in ids.tolist())
        first_rank, cp_size = int(plan.op_first_rank[op]), int(plan.op_cp_size[op])
        batches.append(
            PackedBatch(
                tokens=tensors.tokens[part],
                labels=tensors.labels[part],
                loss_mask=tensors.loss_mask[part],
                position_ids=tensors.position_ids[part],
                padding_mask=tensors.padding_mask[part],
                document_id=tensors.document_id[part],
                cu_seqlens=cu,
                cu_seqlens_padded=cu_padded,
                max_seqlen=longest,
                local_cp_size=cp_size,
                cp_rank=int(table.cp_ranks[m]),
                first_rank=first_rank,
                sample_ids=tuple(ids.tolist()),
                refs=tuple(zip(*refs[ids].T.tolist(), strict=True)),
                extras=extras,
                cp_group=cp_group(first_rank, cp_size),
            )
        )
    return tuple(batches)
