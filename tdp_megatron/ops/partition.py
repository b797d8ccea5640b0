"""Which tokens of a THD pack each context-parallel rank holds.

Source: Transformer Engine's ``thd_get_partitioned_indices``: every sequence is cut into 2 * cp equal chunks and
rank r takes chunks r and 2 * cp - 1 - r, so that causal attention costs every rank the same.
"""

from __future__ import annotations

import torch

__all__ = ["cp_partition_indices", "cp_positions"]


def cp_partition_indices(cu_seqlens_padded: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions in the whole pack of the tokens of one CP rank, in the order it holds them.

    Args:
        cu_seqlens_padded: integers [n + 1], cumulative padded lengths, each length a multiple of 2 * cp_size.
        cp_size: ranks that share the pack.
        cp_rank: 0 <= cp_rank < cp_size.

    Returns:
        int64 [cu_seqlens_padded[-1] / cp_size], on the device of the input.

    Raises:
        ValueError: a length that does not divide, a decreasing sum, or a bad rank.
    """
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank {cp_rank} is outside the {cp_size} ranks")
    cu = cu_seqlens_padded.to(torch.int64)
    if cu.ndim != 1 or cu.numel() == 0 or int(cu[0]) != 0:
        raise ValueError("cu_seqlens_padded must be one-dimensional and start with 0")
    lengths = cu.diff()
    if bool((lengths < 0).any()):
        raise ValueError("cu_seqlens_padded decreases")
    total = int(cu[-1])
    if cp_size > 1:
        odd = torch.nonzero(lengths % (2 * cp_size))
        if len(odd):
            i = int(odd[0])
            raise ValueError(
                f"sequence {i} has padded length {int(lengths[i])}, not a multiple of 2 * cp_size = {2 * cp_size}"
            )
    return cp_positions(cu, cp_size, cp_rank, total // cp_size)


def cp_positions(cu_seqlens_padded: torch.Tensor, cp_size: int, cp_rank: int, num_tokens: int) -> torch.Tensor:
    """What ``cp_partition_indices`` returns, of lengths known to be right: no check, so no wait for the device.

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
