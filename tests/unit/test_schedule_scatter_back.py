"""``Plan.scatter_back``: outputs of all ranks' packs as one array per sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.ops import pack
from tdp_megatron.schedule import Plan, PlanOp, schedule
from tdp_megatron.types import ParallelLayout


def packed_tokens(plan: Plan) -> list[list[torch.Tensor]]:
    """Per rank and microbatch, where in the joined sequences each token lies; garbage at the pads."""
    seqlens = plan.seqlens
    sources = {"tokens": torch.arange(int(seqlens.sum()))}
    begins = np.cumsum(seqlens) - seqlens
    return [
        [batch.tokens.masked_fill(batch.padding_mask, -7) for batch in pack(plan, rank, sources, begins)]
        for rank in range(plan.layout.num_ranks)
    ]


def expected(plan: Plan) -> list[list[int]]:
    ends = np.cumsum(plan.seqlens).tolist()
    return [list(range(end - n, end)) for end, n in zip(ends, plan.seqlens.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    seqlens=st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (3, 2)]),
    dynamic=st.booleans(),
)
def test_every_token_comes_back_to_its_sequence(seqlens: list[int], shape: tuple[int, int], dynamic: bool) -> None:
    dp, cp = shape
    ranks = dp * cp
    sizes = tuple(k for k in (1, 2, 4) if ranks % k == 0) if dynamic else ()
    plan = schedule(seqlens, ParallelLayout(dp, cp, 64, cp_sizes=sizes))
    outputs = packed_tokens(plan)
    wanted = expected(plan)
    for given_ in (
        outputs,
        [torch.cat(of_rank) for of_rank in outputs],
        [[out[None] for out in of_rank] for of_rank in outputs],
        [torch.cat(of_rank).numpy() for of_rank in outputs],
        [tuple(out.numpy() for out in of_rank) for of_rank in outputs],
    ):
        assert [back.tolist() for back in plan.scatter_back(given_)] == wanted
    wide = plan.scatter_back([[torch.stack([out, -out], dim=1).half() for out in of_rank] for of_rank in outputs])
    assert all(back.dtype == torch.float16 and back.shape[1:] == (2,) for back in wide)
    assert [back[:, 1].neg().int().tolist() for back in wide] == wanted


def test_gradients_pass_and_pads_get_none() -> None:
    plan = schedule([3, 5], ParallelLayout(1, 1, 64))
    outputs = torch.ones(16, requires_grad=True)
    plan.scatter_back([outputs])[1].sum().backward()
    assert outputs.grad is not None
    assert int(outputs.grad.sum()) == 5


def test_a_rank_without_microbatches_gives_none() -> None:
    layout = ParallelLayout(2, 1, 64, tail_multiple=1)
    plan = Plan.from_ops(layout, [3], [PlanOp(1, 1, (0,))])
    assert [back.tolist() for back in plan.scatter_back([[], torch.arange(3)])] == [[0, 1, 2]]
    with pytest.raises(ValueError, match="no microbatch"):
        Plan.from_ops(layout, [], []).scatter_back([[], []])


PLAN = schedule([5], ParallelLayout(2, 1, 64))
GOOD = torch.zeros(16)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([GOOD], ValueError, "1 outputs for 2 ranks"),
        (
            [GOOD, torch.zeros(3)],
            ValueError,
            r"rank 1 has outputs of shapes \[\[3\]\], the plan gives it \[16\]",
        ),
        ([[GOOD, GOOD], GOOD], ValueError, "rank 0 has 2 outputs, and 1 microbatches"),
        ([[], GOOD], ValueError, "rank 0 has 0 outputs, and 1 microbatches"),
        ([GOOD, torch.zeros(())], ValueError, "rank 1 has outputs of shapes"),
        ([GOOD, torch.zeros(16, 2)], ValueError, r"rank 1 are torch.float32 \[16, 2\], those of rank 0 torch.float32"),
        ([GOOD, GOOD.double()], ValueError, "outputs of rank 1 are torch.float64"),
        ([GOOD, None], TypeError, "rank 1: outputs must be tensors"),
        ([GOOD, [[0.0] * 16]], TypeError, "rank 1: outputs must be tensors"),
    ],
)
def test_outputs_that_do_not_fit(outputs: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PLAN.scatter_back(outputs)
