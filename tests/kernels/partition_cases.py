"""CP partitions by their definition, for every backend and device."""

from __future__ import annotations

import torch

from tdp_megatron.ops.partition import PartitionBackend, cp_partition_indices

#: Chunks per sequence and CP size.
CASES: list[tuple[list[int], int]] = [
    ([], 1),
    ([], 4),
    ([0], 2),
    ([1], 1),
    ([2, 2], 2),
    ([0, 0, 3, 0, 1, 0], 2),
    ([1, 1, 1], 8),
    ([400, 1, 300], 2),
    ([5, 1, 2], 6),
    ([7, 0, 2], 3),
]


def by_definition(chunks: list[int], cp_size: int, cp_rank: int) -> list[int]:
    found: list[int] = []
    begin = 0
    for chunk in chunks:
        mine = [0, 1] if cp_size == 1 else [cp_rank, 2 * cp_size - 1 - cp_rank]
        for c in mine:
            found += range(begin + c * chunk, begin + (c + 1) * chunk)
        begin += 2 * cp_size * chunk
    return found


def cu_seqlens(chunks: list[int], cp_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    lengths = torch.tensor([0] + [c * 2 * cp_size for c in chunks], dtype=torch.int64)
    return lengths.cumsum(0).to(dtype).to(device)


def check(
    chunks: list[int], cp_size: int, backend: PartitionBackend | None, device: str = "cpu", *, told: bool = True
) -> None:
    total = 2 * cp_size * sum(chunks)
    for dtype in (torch.int32, torch.int64):
        cu = cu_seqlens(chunks, cp_size, dtype, device)
        for rank in range(cp_size):
            indices = cp_partition_indices(cu, cp_size, rank, total_tokens=total if told else None, backend=backend)
            assert indices.dtype == torch.int64
            assert indices.device.type == device
            assert indices.tolist() == by_definition(chunks, cp_size, rank)
