"""megatron-core's pipeline schedules, on CPU, over packs of ``wrap_data_iterator``: one loss, however many stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tdp_megatron.loops import get_batch_on_this_rank_for_sequence_packing, wrap_data_iterator
from tdp_megatron.testing import run_ranks

# megatron-core warns of what is not installed, and torch of what megatron-core uses.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.distributed]

NUM_LAYERS, SEQLEN = 8, 64


def fill(model: torch.nn.Module) -> None:
    """Weights that depend on the layer's number in the whole model only, not on the stage that holds it."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer = model.get_submodule(".".join(parts[: at + 1]))
            parts[at] = str(layer.layer_number)
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + ("norm" in name))


def make_chunks(attention: type, pp: int, vpp: int) -> tuple[list[Any], Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    virtual = vpp if vpp > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=virtual
    )
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=pp > 1,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
    )
    config.max_seqlen_per_dp_cp_rank = SEQLEN
    config.data_timeout_s = 60.0
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = attention
    chunks = []
    for chunk in range(vpp):
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and chunk == 0
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and chunk == vpp - 1
        model = GPTModel(
            config,
            spec,
            vocab_size=256,
            max_sequence_length=SEQLEN,
            position_embedding_type="learned_absolute",
            pre_process=first,
            post_process=last,
            vp_stage=chunk if virtual else None,
        )
        model.model_type = getattr(model, "model_type", None)
        fill(model)
        chunks.append(model)
    return chunks, config, ProcessGroupCollection.use_mpu_process_groups()


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What Megatron's training script gives its schedules."""
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params, _ = (
        get_batch_on_this_rank_for_sequence_packing(data_iterator, vp_stage=model.vp_stage)
    )
    output = model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed_seq_params)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (losses * loss_mask).sum(), loss_mask.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return output, loss_of


def body(
    rank: int, world: int, prefix: str, make_loader: Callable[..., Any], attention: type, on_cpu: Any, pp: int, vpp: int
) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, config, groups = make_chunks(attention, pp, vpp)
    samples = None  # what stages in the middle give
    if dist.get_rank(groups.pp) in (0, pp - 1):
        samples = iter(make_loader(prefix, dist.get_rank(groups.dp), dist.get_world_size(groups.dp)))
    losses = []
    for _ in range(2):
        packed, num_packs, _, _ = wrap_data_iterator(samples if vpp == 1 else [samples] * vpp, config, 16, groups)
        with on_cpu():
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=packed,
                model=chunks,
                num_microbatches=num_packs,
                seq_length=SEQLEN,
                micro_batch_size=1,
                forward_only=False,
            )
        losses.append([report["lm loss"].tolist() for report in reports])
    (packed[0] if isinstance(packed, list) else packed).session.close()
    gradient = sum(float(parameter.grad.square().sum()) for model in chunks for parameter in model.parameters())
    return {"losses": losses, "gradient": gradient}


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (4, 2)])
def test_pipelines_train_on_the_same_packs(
    pp: int,
    vpp: int,
    run_page: Callable[[str], dict[str, Any]],
    packed_attention: type,
    on_cpu: Any,
    prefix: str,
    no_compile: None,
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    make_loader = run_page("megatron-loop.md")["make_loader"]
    (alone,) = run_ranks(body, 1, prefix, make_loader, packed_attention, on_cpu, 1, 1)
    assert len(alone["losses"][0]) > 1
    stages = run_ranks(body, pp, prefix, make_loader, packed_attention, on_cpu, pp, vpp)
    assert all(not any(stage["losses"]) for stage in stages[:-1])
    for step, expected in zip(stages[-1]["losses"], alone["losses"], strict=True):
        found, wanted = torch.tensor(step), torch.tensor(expected)
        if vpp > 1:  # the same samples in more packs: as many as the interleaved schedule asks for
            assert len(found) % pp == 0
            found, wanted = found.sum(0), wanted.sum(0)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert sum(stage["gradient"] for stage in stages) == pytest.approx(alone["gradient"], rel=1e-3)
