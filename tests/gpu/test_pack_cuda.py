"""The same values as on the CPU, from compiled kernels; and what only a GPU can show: no waits, graphs, big tensors.

TRITON_INTERPRET=0 python -m pytest tests/gpu
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.nodes import DocumentSample, IndexedRead, Pack, Reroute
from tdp_megatron.ops import LossSpans, PackMetadata, build_pack_table, cp_partition_indices, gather_pack, pack
from tdp_megatron.schedule import Plan, PlanOp
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import PackedBatch, ParallelLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device; torch sees none"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1",
        reason="kernels would be interpreted: run tests/gpu in a process of its own with TRITON_INTERPRET=0",
    ),
]


def load(name: str) -> Any:
    path = Path(__file__).parents[1] / "kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pack_cases = load("pack_cases")
partition_cases = load("partition_cases")


def require_memory(gigabytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, {free >> 30} GiB are free")


@pytest.fixture
def waits_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("case", pack_cases.CASES.values(), ids=pack_cases.CASES)
def test_values(case: Any, backend: Any) -> None:
    pack_cases.check(case, "cuda", backend)


def test_more_sequences_than_transformer_engine_takes() -> None:
    pack_cases.check(pack_cases.MANY, "cuda")
    partition_cases.check([1] * 13_000, 2, None, "cuda")


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(("chunks", "cp_size"), partition_cases.CASES, ids=str)
def test_partition(chunks: list[int], cp_size: int, backend: Any) -> None:
    partition_cases.check(chunks, cp_size, backend, "cuda")
    partition_cases.check(chunks, cp_size, backend, "cuda", told=False)


@pytest.mark.parametrize(("chunks", "cp_size"), [([400, 1, 300], 2), ([5, 1, 2], 6), ([1] * 5_000, 4)], ids=str)
def test_partition_equals_transformer_engines(chunks: list[int], cp_size: int) -> None:
    pytest.importorskip("transformer_engine_torch", reason="Transformer Engine is not installed")
    partition_cases.check(chunks, cp_size, "te", "cuda")


def test_sources_of_more_than_two_to_the_31_tokens() -> None:
    require_memory(6)
    size = (1 << 31) + 64
    tokens = torch.zeros(size, dtype=torch.int16, device="cuda").view(torch.uint16)
    tokens[-11:] = torch.arange(60_000, 60_011).to(torch.uint16).cuda()
    (batch,) = pack(one_pack([10]), 0, {"tokens": tokens}, np.array([size - 11]), extra_token=True)
    assert batch.tokens.tolist() == list(range(60_000, 60_010))
    assert batch.labels.tolist() == list(range(60_001, 60_011))


def test_user_keys_of_more_than_two_to_the_31_numbers() -> None:
    require_memory(12)
    size, width = 1 << 20, 2304
    hidden = torch.zeros(size, width, dtype=torch.bfloat16, device="cuda")
    hidden[-1] = 7
    sources = {"tokens": torch.zeros(size, dtype=torch.int32, device="cuda"), "hidden": hidden}
    (batch,) = pack(one_pack([1 << 20]), 0, sources, np.array([0]))
    assert bool((batch.extras["hidden"][-1] == 7).all())
    assert int(batch.extras["hidden"][:-1].count_nonzero()) == 0


def one_pack(seqlens: list[int]) -> Plan:
    layout = ParallelLayout(1, 1, 1 << 20, tail_multiple=1)
    op = PlanOp(0, 1, tuple(range(len(seqlens))), tuple(seqlens))
    return Plan.from_ops(layout, np.array(seqlens, dtype=np.int64), [op])


@pytest.mark.usefixtures("waits_are_errors")
def test_the_host_never_waits() -> None:
    case = pack_cases.CASES["user keys"]
    sources, offsets = case.sources()
    pinned = {key: tensor.pin_memory() for key, tensor in sources.items()}
    for rank in range(case.num_ranks):
        for batch in pack(case.plan(), rank, pinned, offsets, device="cuda"):
            batch.to_megatron()
            total = batch.num_tokens * batch.local_cp_size
            cp_partition_indices(batch.cu_seqlens_padded, batch.local_cp_size, batch.cp_rank, total_tokens=total)


def test_a_captured_graph_packs_the_next_step() -> None:
    def metadata(seqlens: list[int], spans: LossSpans) -> PackMetadata:
        plan = one_pack(seqlens)
        starts = np.cumsum(seqlens, dtype=np.int64) - seqlens
        return PackMetadata.build(
            plan,
            build_pack_table(plan, 0),
            starts,
            loss_spans=spans,
            row_capacity=16,
            edge_capacity=8,
            pin_memory=True,
        )

    tokens = torch.arange(100, 160, device="cuda")
    captured = metadata([30, 30], LossSpans.of([[(2, 4)], []])).to("cuda")
    out = gather_pack({"tokens": tokens}, captured)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_pack({"tokens": tokens}, captured, out=out)
    step = metadata([10, 10, 20, 20], LossSpans.of([[(2, 4)], [(1, 3), (5, 6)], [], [(1, 20)]]))
    captured.update_(step)
    graph.replay()
    fresh = gather_pack({"tokens": tokens.cpu()}, step, backend="reference")
    for name in pack_cases.DTYPES:
        assert torch.equal(getattr(out, name).cpu(), getattr(fresh, name)), name


def attention_inputs() -> tuple[PackedBatch, list[torch.Tensor], torch.Tensor]:
    """A pack, random queries, keys and values [T, heads, channels], and attention sequence by sequence."""
    seqlens = [100, 1, 300, 111]
    tokens = torch.arange(sum(seqlens), device="cuda")
    offsets = np.cumsum(seqlens, dtype=np.int64) - seqlens
    (batch,) = pack(one_pack(seqlens), 0, {"tokens": tokens}, offsets)
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = [torch.randn(len(tokens), 2, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    parts = []
    for begin, end in zip(offsets.tolist(), np.cumsum(seqlens).tolist(), strict=True):
        query, key, value = (x[begin:end].float().transpose(0, 1)[None] for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        parts.append(out[0].transpose(0, 1))
    return batch, qkv, torch.cat(parts)


def test_varlen_attention_of_torch() -> None:
    import inspect

    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen attention")
    batch, qkv, expected = attention_inputs()
    parameters = inspect.signature(varlen.varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    out = varlen.varlen_attn(*qkv, **batch.to_varlen_attn(), **causal)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_flash_attention() -> None:
    flash = pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    batch, qkv, expected = attention_inputs()
    out = flash.flash_attn_varlen_func(*qkv, **batch.to_flash_attn(), causal=True)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_compiled_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    batch, qkv, expected = attention_inputs()
    heads_first = [x.transpose(0, 1)[None] for x in qkv]
    out = torch.compile(flex_attention)(*heads_first, block_mask=batch.to_flex_attention())
    torch.testing.assert_close(out[0].transpose(0, 1).float(), expected, rtol=2e-2, atol=2e-2)


def test_reroute_packs_on_the_gpu_what_the_host_packs(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prefix = write_corpus(tmp_path / "d", [rng.integers(0, 999, n) for n in rng.integers(1, 300, 200)])

    def steps(device: str | None) -> list[Any]:
        layout = ParallelLayout(2, 2, 1024, cp_sizes=(1, 2, 4))
        source = DocumentSample(IndexedRead(prefix), max_seqlen=200, num_epochs=None)
        node = Reroute(Pack(source, layout, global_batch_size=40), rank=1, device=device)
        node.reset(None)
        next(node)  # compiles
        if device is not None:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return [next(node) for _ in range(5)]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for found, wanted in zip(steps("cuda:0"), steps(None), strict=True):
        for a, b in zip(found, wanted, strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "document_id", "cu_seqlens"):
                assert getattr(a, name).is_cuda
                assert torch.equal(getattr(a, name).cpu(), getattr(b, name)), name
