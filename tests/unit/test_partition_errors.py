from __future__ import annotations

import pytest
import torch

from tdp_megatron.ops import cp_partition_indices


@pytest.mark.parametrize(
    ("cu", "cp", "rank", "message"),
    [
        ([0, 8], 2, 2, "outside the 2 ranks"),
        ([0, 6, 8], 2, 0, "sequence 0 has padded length 6, not a multiple of 2 \\* cp_size = 4"),
        ([0, 8, 4], 2, 0, "decreases"),
        ([4, 8], 2, 0, "start with 0"),
        ([], 1, 0, "start with 0"),
    ],
)
def test_bad_input(cu: list[int], cp: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cp_partition_indices(torch.tensor(cu, dtype=torch.int32), cp, rank)


def test_a_repeated_end_is_an_empty_sequence() -> None:
    cu = torch.tensor([0, 16, 40, 40, 40], dtype=torch.int32)
    assert torch.equal(cp_partition_indices(cu, 2, 0), cp_partition_indices(cu[:3], 2, 0))
