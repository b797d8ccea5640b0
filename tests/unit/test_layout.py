from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.schedule.plan import padded_seqlens, tokens_per_rank
from tdp_megatron.types import ParallelLayout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp must be at least 1"),
        ({"dp": 2, "cp": -1}, "cp must be at least 1"),
        ({"dp": 2, "max_seqlen_per_dp_cp_rank": 8}, "below the tail multiple 16"),
        ({"dp": 2, "cp": 3, "cp_sizes": (1, 4)}, "4 does not divide the 6 ranks"),
        ({"dp": 2, "cp": 2, "tail_multiple": 3}, "tail_multiple 3 is odd"),
        ({"dp": 2, "cp": 3, "cp_sizes": (1, 3)}, "3 is not a power of two"),
    ],
)
def test_bad_layouts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.5, "2", True, None])
def test_sizes_must_be_ints(value: object) -> None:
    with pytest.raises(TypeError, match="dp must be an int"):
        ParallelLayout(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [4, "12", [1.5], ["2"], [True], [None]])
def test_cp_sizes_must_be_several_ints(value: object) -> None:
    with pytest.raises(TypeError, match="cp_sizes must"):
        ParallelLayout(4, cp_sizes=value)  # type: ignore[arg-type]
    assert ParallelLayout(4, cp_sizes=[np.int64(2), 1]).cp_sizes == (1, 2)  # type: ignore[arg-type]


def test_defaults() -> None:
    layout = ParallelLayout(2, 4, 100)
    assert (layout.num_ranks, layout.cp_sizes, layout.tail_multiple, layout.tokens_per_rank_limit) == (8, (4,), 16, 96)
    assert ParallelLayout(2, sp=8, fp8_multiple=32).tail_multiple == 128


def test_vectorised_padding_agrees_with_the_layout() -> None:
    for tail in (1, 6, 16):
        layout = ParallelLayout(4, 2, 4096, tail_multiple=tail)
        for k in (1, 2, 4):
            totals = np.arange(0, 200) * ParallelLayout.pad_multiple(k)
            held = tokens_per_rank(totals, k, tail)
            assert held.tolist() == [layout.tokens_per_rank(int(t), k) for t in totals]
            assert padded_seqlens(np.arange(50), k).tolist() == [layout.padded_seqlen(s, k) for s in range(50)]
            if k > 1:
                assert not (held % 2).any()
