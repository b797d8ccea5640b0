"""Outputs per packed token come back to where their samples were read, in that order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchdata.nodes import IterableWrapper

from tdp_megatron.distributed import DpCpGroups, Exchange, scatter_back
from tdp_megatron.errors import ExchangeError
from tdp_megatron.nodes import Pack
from tdp_megatron.reading import read_block
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import Plan
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (3, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_come_back_in_order(dp: int, cp: int, dtype: torch.dtype) -> None:
    layout = ParallelLayout(dp, cp, 64)

    def body(rank: int, world: int) -> Any:
        groups = DpCpGroups.create(layout, timeout_s=20)
        exchange = Exchange(groups)
        generator = torch.Generator().manual_seed(rank)
        samples = [
            {"tokens": torch.randint(0, 200, (int(n),), generator=generator)}
            for n in torch.randint(0, 40, (6,), generator=generator)
        ]
        pack = Pack(IterableWrapper(samples), layout, global_batch_size=3 * world, exchange=exchange)
        returned: list[Any] = []
        whole: list[Any] = []
        for _ in range(2):
            batch = next(pack)
            assert batch.samples is not None
            tokens = torch.cat([packed.tokens for packed in batch.pack(rank)])
            outputs = torch.stack([tokens, -tokens], dim=1).to(dtype)
            wrong = outputs[1:] if rank == world - 1 else outputs
            with pytest.raises(ValueError if rank == world - 1 else ExchangeError, match="the plan gives it"):
                scatter_back(exchange.host, batch.plan, batch.samples, wrong)
            mine = scatter_back(exchange.host, batch.plan, batch.samples, outputs)
            returned += [t.float().tolist() for t in mine]
            whole.append((batch.plan, outputs.float()))
        expected = [[[float(t), -float(t)] for t in s["tokens"]] for s in samples]
        assert returned == expected
        return whole, [s["tokens"].tolist() for s in samples]

    results = run_ranks(body, dp * cp)
    # With the outputs of all ranks at hand, the same without a collective.
    for step in range(2):
        plan = results[0][0][step][0]
        joined = plan.scatter_back([result[0][step][1] for result in results])
        dealt = [result[1][3 * step + j] for j in range(3) for result in results]
        assert [t[:, 0].tolist() for t in joined] == dealt


@pytest.mark.parametrize("seqlens", [[0, 0, 0], [2, 0, 3]])
def test_a_plan_without_microbatches_gives_empty_outputs_or_says_whose_are_missing(seqlens: list[int]) -> None:
    layout = ParallelLayout(2, 1, 64)

    def body(rank: int, world: int) -> list[list[int]]:
        exchange = Exchange(DpCpGroups.create(layout, timeout_s=20))
        read = [{"tokens": torch.zeros(n, dtype=torch.int64)} for n in seqlens[rank::world]]
        samples = exchange.gather(0, read_block(block_from_items(read, 0, 0)), 0)
        plan = Plan.from_ops(layout, samples.seqlens.tolist(), [])
        if any(seqlens):
            with pytest.raises(ExchangeError, match="no rank has outputs, and the samples have 5 tokens"):
                scatter_back(exchange.host, plan, samples, [])
            return []
        return [list(back.shape) for back in scatter_back(exchange.host, plan, samples, [])]

    assert run_ranks(body, 2) == ([[], []] if any(seqlens) else [[[0], [0]], [[0]]])
