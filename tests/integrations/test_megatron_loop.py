"""docs/megatron-loop.md with a small GPTModel of megatron-core, on CPU: one and two ranks agree, and it resumes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tdp_megatron.loops import wrap_data_iterator
from tdp_megatron.testing import run_ranks

# megatron-core warns of what is not installed, and torch of what megatron-core uses.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.distributed]


def make_model(attention: type) -> tuple[Any, Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    config.max_seqlen_per_dp_cp_rank = 64
    config.data_timeout_s = 60.0
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = attention
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=64, position_embedding_type="learned_absolute")
    return model, config, ProcessGroupCollection.use_mpu_process_groups()


def test_losses_of_one_rank_of_two_and_of_a_resumed_run_are_equal(
    run_page: Callable[[str], dict[str, Any]], packed_attention: type, prefix: str, no_compile: None
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    train = run_page("megatron-loop.md")["train"]

    def body(rank: int, world: int, steps: list[int]) -> list[float]:
        model, config, groups = make_model(packed_attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []
        state = None
        for num_steps in steps:
            part, state = train(
                prefix,
                model,
                optimizer,
                config,
                groups,
                num_microbatches=8 // world,
                num_steps=num_steps,
                state=state,
            )
            losses += part
        return losses

    (one,) = run_ranks(body, 1, [6])
    first, second = run_ranks(body, 2, [6])
    assert first == second == pytest.approx(one, rel=1e-4)
    assert one[-1] < one[0]
    assert run_ranks(body, 2, [2, 1, 3])[0] == pytest.approx(one, rel=1e-4)


def test_a_run_around_a_stretch_of_the_data(
    run_page: Callable[[str], dict[str, Any]], packed_attention: type, prefix: str, no_compile: None
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    train_around = run_page("megatron-loop.md")["train_around"]

    def body(rank: int, world: int, bad: tuple[int, int], consumed_samples: int) -> list[float]:
        model, config, groups = make_model(packed_attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sizes = {"num_microbatches": 8 // world, "num_steps": 3}
        losses, _ = train_around(bad, consumed_samples, prefix, model, optimizer, config, groups, **sizes)
        return [float(loss) for loss in losses]

    (one,) = run_ranks(body, 1, (13, 30), 5)
    first, second = run_ranks(body, 2, (13, 30), 5)
    assert first == second == pytest.approx(one, rel=1e-4)
    (whole,) = run_ranks(body, 1, (0, 0), 5)
    assert whole[0] == pytest.approx(one[0], rel=1e-6)
    assert whole[1] != pytest.approx(one[1], rel=1e-4)
    # The second step's samples are those behind the stretch, and there alone they make the first step.
    assert run_ranks(body, 2, (0, 30), 5)[0][0] == pytest.approx(run_ranks(body, 1, (0, 0), 30)[0][0], rel=1e-4)


def test_megatrons_own_groups_are_found() -> None:
    """As in Megatron, a loop need not name its groups; TP ranks are no data-parallel ranks then."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

    def body(rank: int, world: int) -> list[list[int]]:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20.0)
        samples = iter([{"tokens": torch.full((2,), 10 * (rank // 2) + i)} for i in range(4)])
        packed, *_ = wrap_data_iterator(samples if rank % 2 == 0 else None, config, 2)
        return [batch.tokens[~batch.padding_mask].tolist() for batch in packed]

    ranks = run_ranks(body, 4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sorted(t for rank in ranks[::2] for pack in rank for t in pack) == [0, 0, 1, 1, 10, 10, 11, 11]


def test_log_probabilities_come_back_to_the_samples(
    run_page: Callable[[str], dict[str, Any]], packed_attention: type, no_compile: None
) -> None:
    """The same on one rank, packed, and on two; and those of each sample by itself, without packing."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    log_probabilities = run_page("megatron-loop.md")["log_probabilities"]
    generator = torch.Generator().manual_seed(3)
    samples = [{"tokens": torch.randint(1, 250, (n,), generator=generator)} for n in (5, 40, 1, 17, 30, 9, 2, 11)]

    def body(rank: int, world: int) -> list[list[float]]:
        model, config, groups = make_model(packed_attention)
        mine = samples[rank * len(samples) // world : (rank + 1) * len(samples) // world]
        step = len(mine) // 2
        back = []
        source = iter(mine)
        for _ in range(2):
            back += log_probabilities(source, model, config, groups, num_microbatches=step)
        alone = [log_probabilities(iter([s]), model, config, groups, num_microbatches=1)[0] for s in mine]
        assert [len(t) for t in back] == [len(s["tokens"]) for s in mine]
        for packed, by_itself in zip(back, alone, strict=True):
            torch.testing.assert_close(packed[:-1], by_itself[:-1], rtol=1e-4, atol=1e-5)
        return [t[:-1].tolist() for t in back]

    (one,) = run_ranks(body, 1)
    first, second = run_ranks(body, 2)
    for got, wanted in zip(first + second, one, strict=True):
        assert got == pytest.approx(wanted, rel=1e-3)
