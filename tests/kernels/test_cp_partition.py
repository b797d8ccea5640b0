"""The CP partition: plain torch, C++, the Triton kernel (interpreted), and Transformer Engine where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.ops.partition import PartitionBackend, cp_partition_indices


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load("partition_cases")
BACKENDS: tuple[PartitionBackend, ...] = ("reference", "native", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("chunks", "cp_size"), cases.CASES, ids=str)
def test_values(chunks: list[int], cp_size: int, backend: PartitionBackend) -> None:
    cases.check(chunks, cp_size, backend)
    cases.check(chunks, cp_size, backend, told=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5))
def test_any_lengths(chunks: list[int], cp_size: int) -> None:
    for backend in BACKENDS:
        cases.check(chunks, cp_size, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_sequences_than_transformer_engine_takes(backend: PartitionBackend) -> None:
    chunks = [1] * 13_000
    cu = cases.cu_seqlens(chunks, 2, torch.int32, "cpu")
    assert cp_partition_indices(cu, 2, 1, backend=backend).tolist() == cases.by_definition(chunks, 2, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_above_two_to_the_31(backend: PartitionBackend) -> None:
    cp_size, rank = 1 << 20, 3
    length = 1 << 32
    cu = torch.tensor([0, length, 2 * length], dtype=torch.int64)
    indices = cp_partition_indices(cu, cp_size, rank, backend=backend)
    chunk = length // (2 * cp_size)
    first = [rank * chunk + i for i in range(chunk)]
    last = [(2 * cp_size - 1 - rank) * chunk + i for i in range(chunk)]
    assert indices.tolist() == [*first, *last, *(length + i for i in first), *(length + i for i in last)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("cu", "cp", "rank", "message"),
    [
        ([0, 8], 2, 2, "outside the 2 ranks"),
        ([0, 8], 2, -1, "outside the 2 ranks"),
        ([0, 8], 0, 0, "outside the 0 ranks"),
        ([0, 6, 8], 2, 0, "sequence 0 has padded length 6, not a multiple of 2 \\* cp_size = 4"),
        ([0, 8, 4], 2, 0, "decreases"),
        ([4, 8], 2, 0, "start with 0"),
        ([], 1, 0, "start with 0"),
        ([[0, 8]], 1, 0, "one-dimensional"),
    ],
)
def test_bad_lengths(cu: Any, cp: int, rank: int, message: str, backend: PartitionBackend) -> None:
    with pytest.raises(ValueError, match=message):
        cp_partition_indices(torch.tensor(cu, dtype=torch.int32), cp, rank, backend=backend)


def test_other_bad_arguments() -> None:
    cu = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="total_tokens is 12 but cu_seqlens_padded ends at 8"):
        cp_partition_indices(cu, 2, 0, total_tokens=12)
    with pytest.raises(ValueError, match="'reference', 'native', 'triton' or 'te', got 'cuda'"):
        cp_partition_indices(cu, 2, 0, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must hold integers, has dtype torch.float32"):
        cp_partition_indices(cu.float(), 2, 0)
    with pytest.raises(ValueError, match="backend 'te' runs on a GPU, cu_seqlens_padded are on cpu"):
        cp_partition_indices(cu, 2, 0, backend="te")
    assert cp_partition_indices(cu.to(torch.int16), 2, 0).tolist() == [0, 1, 6, 7]
