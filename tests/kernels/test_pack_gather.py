"""The gather of packs: plain torch, C++ and the Triton kernel (interpreted) against plain Python."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.ops.gather import Backend, gather_pack, pack
from tdp_megatron.ops.metadata import LossSpans, PackMetadata
from tdp_megatron.ops.pads import PadRules
from tdp_megatron.ops.triton_present import is_new_enough
from tdp_megatron.schedule.pack_table import build_pack_table
from tdp_megatron.schedule.plan import Plan, PlanOp
from tdp_megatron.types import ParallelLayout


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cases = load("pack_cases")
BACKENDS: tuple[Backend, ...] = ("reference", "native", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases.CASES.values(), ids=cases.CASES)
def test_values(case: Any, backend: Backend) -> None:
    cases.check(case, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_sequences_than_transformer_engine_takes(backend: Backend) -> None:
    cases.check(cases.MANY, backend=backend)


def one_pack(seqlens: list[int]) -> Plan:
    layout = ParallelLayout(1, 1, 1 << 20, tail_multiple=1)
    op = PlanOp(0, 1, tuple(range(len(seqlens))), tuple(seqlens))
    return Plan.from_ops(layout, np.array(seqlens, dtype=np.int64), [op])


@pytest.mark.parametrize("backend", BACKENDS)
def test_sources_of_more_than_two_to_the_31_tokens(backend: Backend) -> None:
    size = (1 << 31) + 64
    tokens = torch.empty(size, dtype=torch.uint16)  # only the pages that are touched take memory
    tokens[-11:] = torch.arange(60_000, 60_011).to(torch.uint16)
    (batch,) = pack(one_pack([10]), 0, {"tokens": tokens}, np.array([size - 11]), extra_token=True, backend=backend)
    assert batch.tokens.tolist() == list(range(60_000, 60_010))
    assert batch.labels.tolist() == list(range(60_001, 60_011))


@pytest.mark.parametrize("backend", BACKENDS)
def test_user_keys_of_more_than_two_to_the_31_numbers(backend: Backend) -> None:
    size, width = 1 << 24, 200
    sources = {
        "tokens": torch.empty(size, dtype=torch.uint8),
        "hidden": torch.empty(size, width, dtype=torch.uint8),
    }
    sources["tokens"][-4:] = 1
    sources["hidden"][-4:] = torch.arange(4 * width).reshape(4, width).to(torch.uint8)
    (batch,) = pack(one_pack([4]), 0, sources, np.array([size - 4]), backend=backend)
    assert torch.equal(batch.extras["hidden"], sources["hidden"][-4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_shapes_take_another_step_in_place(backend: Backend) -> None:
    """What a captured CUDA graph does: the same tensors, kernels and sizes, new numbers in the metadata."""

    def metadata(seqlens: list[int], spans: LossSpans | None) -> PackMetadata:
        plan = one_pack(seqlens)
        table = build_pack_table(plan, 0)
        starts = np.cumsum(seqlens, dtype=np.int64) - seqlens
        return PackMetadata.build(plan, table, starts, loss_spans=spans, row_capacity=16, edge_capacity=8)

    tokens = torch.arange(100, 160)
    captured = metadata([30, 30], LossSpans.of([[(2, 4)], []]))
    out = gather_pack({"tokens": tokens}, captured, backend=backend)
    assert int(out.loss_mask.sum()) == 2
    step = metadata([10, 10, 20, 20], LossSpans.of([[(2, 4)], [(1, 3), (5, 6)], [], [(1, 20)]]))
    captured.update_(step)
    assert gather_pack({"tokens": tokens}, captured, backend=backend, out=out) is out
    fresh = gather_pack({"tokens": tokens}, step, backend="reference")
    for name in cases.DTYPES:
        assert torch.equal(getattr(out, name), getattr(fresh, name)), name
    assert int(out.loss_mask.sum()) == 2 + 3 + 19


def test_metadata_is_one_copy_with_aligned_parts() -> None:
    case = cases.CASES["turns"]
    plan = case.plan()
    table = build_pack_table(plan, 0)
    metadata = PackMetadata.build(
        plan, table, np.zeros_like(table.starts), loss_spans=LossSpans.of(case.loss_spans), row_capacity=37
    )
    base = metadata.storage.data_ptr()
    end = base + metadata.storage.numel() * 8
    parts = [metadata.rows, metadata.loss_edges, *(t for cu in metadata.cu_seqlens for t in cu[:2])]
    for part in parts:
        assert part is not None
        assert base <= part.data_ptr() <= end - part.numel() * part.element_size()
    for cu, padded, _ in metadata.cu_seqlens:
        assert (cu.data_ptr() - base) % 16 == (padded.data_ptr() - base) % 16 == 0


def test_without_a_backend_the_cpu_takes_the_native_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import tdp_megatron.ops.gather as gather

    called: list[str] = []
    monkeypatch.setattr(gather, "gather_native", lambda *args: called.append("native"))
    pack(one_pack([3]), 0, {"tokens": torch.arange(3)}, np.array([0]))
    assert called == ["native"]


def test_without_triton_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import tdp_megatron.ops.gather as gather
    import tdp_megatron.ops.partition as partition

    for module in (gather, partition):
        monkeypatch.setattr(module, "has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"needs triton 3.3 or later: pip install 'tdp-megatron\[triton\]'"):
        pack(one_pack([3]), 0, {"tokens": torch.arange(3)}, np.array([0]), backend="triton")
    with pytest.raises(ValueError, match="needs triton 3.3 or later"):
        partition.cp_partition_indices(torch.tensor([0, 8]), 2, 0, backend="triton")


@pytest.mark.parametrize(
    ("version", "enough"), [("3.2.0", False), ("3.3.0", True), ("3.10.1+git5", True), ("2.9", False), ("4.0", True)]
)
def test_triton_versions(version: str, enough: bool) -> None:
    assert is_new_enough(version) == enough


def run(sources: dict[str, torch.Tensor], offsets: list[int], **options: Any) -> None:
    pack(one_pack([4, 4]), 0, sources, np.array(offsets), **options)


T8 = torch.arange(8)


@pytest.mark.parametrize(
    ("sources", "offsets", "options", "message"),
    [
        ({}, [0, 4], {}, "no key 'tokens'; they have \\[\\]"),
        ({"tokens": T8}, [0, 5], {}, "reach 9 .* that have 8; check offsets"),
        ({"tokens": T8}, [0, 4], {"extra_token": True}, "reach 9 tokens, labels of last positions included"),
        ({"tokens": T8}, [-1, 4], {}, "must not be negative, got -1"),
        ({"tokens": T8}, [0], {}, "offsets have shape \\(1,\\); the plan has 2 samples"),
        ({"tokens": T8, "labels": T8[:7]}, [0, 4], {}, "'labels' has 7 entries, 'tokens' has 8"),
        ({"tokens": T8, "labels": T8.view(8, 1)}, [0, 4], {}, "'labels' must have one entry per token"),
        ({"tokens": T8, "weight": torch.tensor(1.0)}, [0, 4], {}, "'weight' must have one entry per token"),
        ({"tokens": T8}, [0, 4], {"backend": "cuda"}, "'reference', 'native' or 'triton', got 'cuda'"),
        ({"tokens": T8}, [0, 4], {"loss_spans": LossSpans.of([[]])}, "loss spans of 1 samples for a plan of 2"),
    ],
)
def test_bad_arguments(sources: Any, offsets: list[int], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(sources, offsets, **options)


@pytest.mark.parametrize(
    "sources",
    [
        {"tokens": T8.float()},
        {"tokens": T8.bool()},
        {"tokens": T8, "labels": T8.double()},
        {"tokens": T8, "position_ids": T8.half()},
        {"tokens": T8, "phase": T8.to(torch.complex64)},
    ],
    ids=str,
)
def test_wrong_dtypes(sources: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TypeError, match="has dtype torch"):
        run(sources, [0, 4])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[(3, 1)]], "sample 0 must not be negative or overlap, got \\[\\[3, 1\\]\\]"),
        ([[], [(0, 4), (3, 5)]], "sample 1 must not be negative or overlap"),
        ([[(-1, 2)]], "sample 0 must not be negative"),
    ],
)
def test_bad_spans(spans: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSpans.of(spans)


@pytest.mark.parametrize(
    ("offsets", "edges", "message"),
    [
        ([0, 1], [5], "an odd number of edges"),
        ([0, 4], [1, 2], "must rise from 0 to the 2 edges"),
        ([0, 4, 2], [1, 2], "must rise from 0"),
        ([], [], "must rise from 0"),
    ],
)
def test_bad_span_arrays(offsets: list[int], edges: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSpans(np.array(offsets, dtype=np.int64), np.array(edges, dtype=np.int64)).check()


def test_pad_rules_check_their_values() -> None:
    with pytest.raises(TypeError, match="token must be an int, got 1.5"):
        PadRules(token=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'run_on' or 'zero', got 'none'"):
        PadRules(positions="none")  # type: ignore[arg-type]


def test_capacities_and_outputs_that_do_not_fit() -> None:
    plan = one_pack([4, 4])
    table = build_pack_table(plan, 0)
    sources = np.array([0, 4])
    with pytest.raises(ValueError, match="row_capacity 1 is too small for 2 spans"):
        PackMetadata.build(plan, table, sources, row_capacity=1)
    with pytest.raises(ValueError, match="edge_capacity 1 is too small for 2 loss edges"):
        PackMetadata.build(plan, table, sources, loss_spans=LossSpans.of([[(1, 2)], []]), edge_capacity=1)
    with pytest.raises(ValueError, match="sources have shape \\(1,\\); the table has 2 spans"):
        PackMetadata.build(plan, table, sources[:1])
    metadata = PackMetadata.build(plan, table, sources)
    with pytest.raises(ValueError, match="build both with the same capacities"):
        metadata.update_(PackMetadata.build(plan, table, sources, row_capacity=5))
    out = gather_pack({"tokens": T8}, metadata)
    with pytest.raises(ValueError, match="out has the user keys \\[\\], the sources \\['a'\\]"):
        gather_pack({"tokens": T8, "a": T8}, metadata, out=out)
    longer_plan = one_pack([4, 5])
    longer = PackMetadata.build(longer_plan, build_pack_table(longer_plan, 0), sources)
    with pytest.raises(ValueError, match="out.tokens is torch.int64 \\(8,\\) on cpu, wanted contiguous"):
        gather_pack({"tokens": torch.arange(9)}, longer, out=out)
