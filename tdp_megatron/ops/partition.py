"""Which tokens of a THD pack each context-parallel rank holds.

Source: Transformer Engine's ``thd_get_partitioned_indices``: every sequence is cut into 2 * cp equal chunks and
rank r takes chunks r and 2 * cp - 1 - r, so that causal attention costs every rank the same.
"""

from __future__ import annotations

import importlib
from typing import Literal, TypeAlias

import torch

from tdp_megatron import _C
from tdp_megatron.ops.triton_present import has_triton

__all__ = ["PartitionBackend", "cp_partition_indices", "cp_positions_reference"]

PartitionBackend: TypeAlias = Literal["reference", "native", "triton", "te"]


def cp_partition_indices(
    cu_seqlens_padded: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    *,
    total_tokens: int | None = None,
    backend: PartitionBackend | None = None,
) -> torch.Tensor:
    """Positions in the whole pack of the tokens of one CP rank, in the order it holds them.

    Args:
        cu_seqlens_padded: integers [n + 1], cumulative padded lengths, each length a multiple of 2 * cp_size; any
            number of sequences.
        cp_size: ranks that share the pack.
        cp_rank: 0 <= cp_rank < cp_size.
        total_tokens: ``cu_seqlens_padded[-1]`` where the host knows it. On a GPU the lengths are then taken as right:
            checking them, or asking for their end, would make the host wait.
        backend: None for "native" on the CPU, "triton" on a GPU that has it, else "reference"; "te" for Transformer
            Engine's kernel, which takes up to about 12,000 sequences.

    Returns:
        int64 [cu_seqlens_padded[-1] / cp_size], on the device of the input.

    Raises:
        ValueError: a length that does not divide, a decreasing sum, a bad rank, another end than ``total_tokens``, or
            a backend that cannot run there.
        TypeError: cu_seqlens_padded are not integers.
    """
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank {cp_rank} is outside the {cp_size} ranks")
    cu = cu_seqlens_padded.contiguous()
    if cu.ndim != 1 or cu.numel() == 0:
        raise ValueError("cu_seqlens_padded must be one-dimensional and start with 0")
    if cu.dtype not in (torch.int32, torch.int64):
        if cu.is_floating_point() or cu.is_complex() or cu.dtype == torch.bool:
            raise TypeError(f"cu_seqlens_padded must hold integers, has dtype {cu.dtype}")
        cu = cu.to(torch.int64)
    if backend is None:
        backend = _fastest(cu.device)
    if cu.device.type == "cpu" or total_tokens is None:
        total_tokens = _checked_total(cu, cp_size, total_tokens)
    elif total_tokens < 0 or total_tokens % (2 * cp_size if cp_size > 1 else 1):
        raise ValueError(f"total_tokens {total_tokens} is not a multiple of 2 * cp_size = {2 * cp_size}")

    if backend == "reference":
        return cp_positions_reference(cu, cp_size, cp_rank, total_tokens // cp_size)
    if backend == "native":
        if cu.device.type != "cpu":
            raise ValueError(f"backend 'native' runs on the CPU, cu_seqlens_padded are on {cu.device}")
        return torch.from_numpy(_C.cp_positions(cu.numpy(), cp_size, cp_rank))
    if backend == "triton":
        if not has_triton():
            raise ValueError("backend 'triton' needs triton 3.3 or later: pip install 'tdp-megatron[triton]'")
        from tdp_megatron.ops.triton_pack import cp_positions_triton

        return cp_positions_triton(cu, cp_size, cp_rank, total_tokens // cp_size)
    if backend == "te":
        return _of_transformer_engine(cu, cp_size, cp_rank, total_tokens)
    raise ValueError(f"backend must be 'reference', 'native', 'triton' or 'te', got {backend!r}")


def _fastest(device: torch.device) -> PartitionBackend:
    if device.type == "cpu":
        return "native"
    return "triton" if device.type == "cuda" and has_triton() else "reference"


def _checked_total(cu: torch.Tensor, cp_size: int, total_tokens: int | None) -> int:
    lengths = cu.diff()
    if int(cu[0]) != 0:
        raise ValueError("cu_seqlens_padded must be one-dimensional and start with 0")
    if bool((lengths < 0).any()):
        raise ValueError("cu_seqlens_padded decreases")
    if cp_size > 1:
        odd = torch.nonzero(lengths % (2 * cp_size))
        if len(odd):
            i = int(odd[0])
            raise ValueError(
                f"sequence {i} has padded length {int(lengths[i])}, not a multiple of 2 * cp_size = {2 * cp_size}"
            )
    total = int(cu[-1])
    if total_tokens is not None and total_tokens != total:
        raise ValueError(f"total_tokens is {total_tokens} but cu_seqlens_padded ends at {total}")
    return total


def cp_positions_reference(
    cu_seqlens_padded: torch.Tensor, cp_size: int, cp_rank: int, num_tokens: int
) -> torch.Tensor:
    """What ``cp_partition_indices`` returns, in plain torch operations and without its checks.

    Args:
        cu_seqlens_padded: integers [n + 1].
        cp_size: ranks that share the pack.
        cp_rank: 0 <= cp_rank < cp_size.
        num_tokens: tokens the rank holds, ``cu_seqlens_padded[-1] / cp_size``.
    """
    cu = cu_seqlens_padded.to(torch.int64)
    local = torch.arange(num_tokens, device=cu.device)
    if cp_size == 1:
        return local
    starts = torch.div(cu, cp_size, rounding_mode="floor")
    sequence = torch.searchsorted(starts, local, right=True) - 1
    within = local - starts[sequence]
    half = torch.div(cu[sequence + 1] - cu[sequence], 2 * cp_size, rounding_mode="floor")
    # Chunk r directly; the other one lies (2 * (cp - 1 - r)) chunks further than its place right behind.
    shift = torch.where(within < half, cp_rank * half, 2 * (cp_size - 1) * half - cp_rank * half)
    return cu[sequence] + within + shift


def _of_transformer_engine(cu: torch.Tensor, cp_size: int, cp_rank: int, total_tokens: int) -> torch.Tensor:
    if cu.device.type != "cuda":
        raise ValueError(f"backend 'te' runs on a GPU, cu_seqlens_padded are on {cu.device}")
    try:
        importlib.import_module("transformer_engine.pytorch")  # loads the library that the next one needs
        te = importlib.import_module("transformer_engine_torch")
    except ImportError as error:
        raise ValueError(
            "backend 'te' needs Transformer Engine: pip install 'tdp-megatron[te]', or leave backend away"
        ) from error
    indices: torch.Tensor = te.thd_get_partitioned_indices(cu.to(torch.int32), total_tokens, cp_size, cp_rank)
    return indices.to(torch.int64)
