"""megatron-core's hybrid CP on CPU: its loop runs on our wrapper, which gives what its own wrapper gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tdp_megatron.loops import HybridCPDataLoaderWrapper
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.testing import run_ranks

# megatron-core warns of what is not installed.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.distributed]

CAP = 64


def packed_item(dp: int, step: int) -> list[dict[str, Any]]:
    """Two packed samples, empty sequences among them; every sequence divides by twice the ranks."""
    rng = np.random.default_rng(100 * dp + step)
    items = []
    for _ in range(2):
        lengths = rng.choice([0, 8, 16, 24, 40, 96, 160], 4, p=[0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1])
        lengths[0] = max(lengths[0], 8)
        total = int(lengths.sum())
        items.append(
            {
                "tokens": torch.from_numpy(rng.integers(0, 99, total)),
                "labels": torch.from_numpy(rng.integers(0, 99, total)),
                "loss_mask": torch.from_numpy(rng.integers(0, 2, total).astype(np.float32)),
                "position_ids": torch.cat([torch.arange(int(n)) for n in lengths]),
                "cu_seqlens": torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            }
        )
    return items


def initialize(tp: int, cp: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp, hybrid_context_parallel=True
    )
    return ProcessGroupCollection.use_mpu_process_groups()


@pytest.mark.parametrize(("world", "tp", "cp"), [(4, 1, 1), (4, 1, 2), (8, 2, 1), (8, 2, 2)])
def test_the_wrapper_gives_what_megatrons_gives(world: int, tp: int, cp: int, no_compile: None, on_cpu: Any) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

    def body(rank: int, world: int) -> int:
        from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper as Theirs

        groups = initialize(tp, cp)
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=CAP, data_timeout_s=20.0)
        dp = dist.get_rank(groups.dp)

        def data() -> Any:
            return iter([packed_item(dp, step) for step in range(3)]) if dist.get_rank(groups.tp) == 0 else None

        ours = HybridCPDataLoaderWrapper(data(), config, groups)
        with on_cpu():
            theirs = Theirs(data(), config, groups)
        seen = 0
        for _ in range(3):
            found = next(ours)
            with on_cpu():
                wanted = next(theirs)
            if dist.get_rank(groups.tp):
                assert found == wanted == (None, None)
                continue
            assert found[1] == wanted[1]
            assert found[0] is not None
            assert found[0].keys() == wanted[0].keys()
            for number, sample in wanted[0].items():
                assert found[0][number].keys() == sample.keys()
                for key, value in sample.items():
                    assert found[0][number][key].dtype == value.dtype
                    assert torch.equal(found[0][number][key], value), (number, key)
                    seen += 1
        return seen

    assert sum(run_ranks(body, world)) > 100


@pytest.mark.parametrize("algorithm", ["balanced_hybrid_cp", "default_dynamic_cp", "auto"])
def test_megatrons_loop_trains_every_token_once(algorithm: str, no_compile: None, on_cpu: Any) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

    def body(rank: int, world: int) -> list[float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig

        groups = initialize(1, 1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            use_cpu_initialization=True,
            calculate_per_token_loss=True,
            hybrid_context_parallel=True,
            max_seqlen_per_dp_cp_rank=CAP,
        )
        config.data_timeout_s = 20.0
        data = iter([packed_item(rank, step) for step in range(2)])
        wrapper = HybridCPDataLoaderWrapper(data, config, groups, algorithm=algorithm)
        torch.manual_seed(0)
        model: Any = torch.nn.Embedding(99, 99)
        model.config, model.model_type = config, None
        model.set_input_tensor = lambda _: None

        def forward_step(iterator: Any, model: Any) -> Any:
            sample = next(iterator)
            cp_size = int(sample["local_cp_size"])
            # The rank's place among those that share the sequence: blocks are aligned.
            part = cp_partition_indices(torch.tensor([0, len(sample["tokens"])]), cp_size, rank % cp_size)
            tokens, labels, mask = (sample[key][part] for key in ("tokens", "labels", "loss_mask"))
            assert len(tokens) <= CAP
            losses = torch.nn.functional.cross_entropy(model(tokens), labels, reduction="none")

            def loss_of(output: Any) -> Any:
                total = (output * mask).sum()
                return total, mask.sum().int(), {"loss": torch.stack([total.detach(), mask.sum()])}

            return losses, loss_of

        sums = torch.zeros(2)
        for _ in range(2):
            with on_cpu():
                reports = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=wrapper,
                    model=[model],
                    num_microbatches=1,
                    seq_length=CAP,
                    micro_batch_size=1,
                    forward_only=False,
                )
            sums += torch.stack([report["loss"] for report in reports]).sum(0)
        totals = torch.cat([sums, model.weight.grad.flatten()])
        dist.all_reduce(totals)
        everything = [item for dp in range(world) for step in range(2) for item in packed_item(dp, step)]
        tokens, labels, mask = (torch.cat([i[key] for i in everything]) for key in ("tokens", "labels", "loss_mask"))
        gradient = totals[2:].clone()
        model.weight.grad = None
        loss = (torch.nn.functional.cross_entropy(model(tokens), labels, reduction="none") * mask).sum()
        loss.backward()
        assert totals[1] == mask.sum()
        torch.testing.assert_close(totals[0], loss.detach(), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(gradient, model.weight.grad.flatten(), rtol=1e-3, atol=1e-4)
        return sums.tolist()

    results = run_ranks(body, 4)
    assert all(count > 0 for _, count in results)
