"""docs/megatron-loop.md with a small GPTModel of megatron-core, on CPU: one and two ranks agree, and it resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tdp_megatron.testing import run_ranks

# megatron-core warns of what is not installed, and torch of what megatron-core uses.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.distributed]


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence; megatron-core's own, without Transformer Engine, refuses packs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        lengths = [b - a for a, b in itertools.pairwise(packed_seq_params.cu_seqlens_q_padded.tolist())]
        parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        outputs = [
            scaled_dot_product_attention(*(p.transpose(0, 1) for p in part), is_causal=True).transpose(0, 1)
            for part in parts
        ]
        return torch.cat(outputs).flatten(1)


def make_model() -> tuple[Any, Any, Any]:
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
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=64, position_embedding_type="learned_absolute")
    return model, config, ProcessGroupCollection.use_mpu_process_groups()


def test_losses_of_one_rank_of_two_and_of_a_resumed_run_are_equal(
    run_page: Callable[[str], dict[str, Any]], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    # megatron-core compiles small functions, which takes longer than the test.
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    train = run_page("megatron-loop.md")["train"]

    def body(rank: int, world: int, steps: list[int]) -> list[float]:
        model, config, groups = make_model()
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
