"""Packs made from raw file tokens equal those packed on the host, for every rank, reader and backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Mapper

from tdp_megatron.nodes import Blend, DocumentSample, GPTSample, IndexedRead, Pack, Reroute, SampleSource
from tdp_megatron.ops import build_pack_table, pack_raw_tokens
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import PackedBatch, ParallelLayout

CPU = torch.device("cpu")
LAYOUT = ParallelLayout(2, 2, 128, cp_sizes=(1, 2, 4), tail_multiple=4)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 99, n) for n in (0, 1, 2, *rng.integers(1, 90, 50))]
    dtypes: dict[str, Any] = {"uint16": np.uint16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8}
    return {name: write_corpus(folder / name, documents, dtype=dtype) for name, dtype in dtypes.items()}


def gpt(prefix: str, mmap: bool = True, **options: Any) -> GPTSample:
    return GPTSample(IndexedRead(prefix, mmap=mmap), sequence_length=24, num_samples=150, **options)


def documents(prefix: str, mmap: bool = True, **options: Any) -> DocumentSample:
    # Long documents are split: some samples have a token behind them, some end with their document.
    return DocumentSample(IndexedRead(prefix, mmap=mmap), max_seqlen=40, num_epochs=None, **options)


def assert_equal(found: tuple[PackedBatch, ...], wanted: tuple[PackedBatch, ...]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        for field in dataclasses.fields(PackedBatch):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(y, torch.Tensor):
                assert x.dtype == y.dtype
                assert torch.equal(x, y), field.name
            else:
                assert x == y, field.name
        assert (a.cu_seqlens is a.cu_seqlens_padded) == (b.cu_seqlens is b.cu_seqlens_padded)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("make", [gpt, documents])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_equal_to_the_host(prefixes: dict[str, str], make: Any, dtype: str, mmap: bool, backend: Any) -> None:
    node = Pack(make(prefixes[dtype], mmap), LAYOUT, global_batch_size=30)
    node.reset(None)
    for _ in range(3):
        batch = next(node)
        assert batch.block is not None
        for rank in range(LAYOUT.num_ranks):
            table = build_pack_table(batch.plan, rank)
            found = pack_raw_tokens(batch.plan, table, batch.block, pad_id=3, device=CPU, backend=backend)
            assert found is not None
            assert_equal(found, batch.pack(rank, pad_id=3))


def test_equal_to_the_host_through_the_triton_kernel(prefixes: dict[str, str]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    source = Blend([gpt(prefixes["uint16"]), documents(prefixes["uint16"], False)], [0.5, 0.5], num_samples=40)
    node = Pack(source, LAYOUT, global_batch_size=20)
    node.reset(None)
    batch = next(node)
    assert batch.block is not None
    for rank in range(LAYOUT.num_ranks):
        table = build_pack_table(batch.plan, rank)
        found = pack_raw_tokens(batch.plan, table, batch.block, device=CPU, backend="triton")
        assert found is not None
        assert_equal(found, batch.pack(rank))


def block_of(source: SampleSource | Mapper[Any, Any]) -> Any:
    node = Pack(source, LAYOUT, global_batch_size=30)
    node.reset(None)
    return next(node)


def test_samples_that_are_more_than_raw_tokens_are_left_to_the_host(prefixes: dict[str, str]) -> None:
    a, b = prefixes["uint16"], prefixes["int32"]
    sources = {
        "loss depends on the content": gpt(a, eod_mask_loss=True, eod_token=5),
        "positions depend on the content": gpt(a, reset_position_ids=True, eod_token=5),
        "two dtypes": Blend([gpt(a), gpt(b)], [0.5, 0.5], num_samples=60),
        "samples of the user": Mapper(gpt(a), lambda sample: {"tokens": sample["tokens"]}),
    }
    for name, source in sources.items():
        batch = block_of(source)
        found = pack_raw_tokens(batch.plan, build_pack_table(batch.plan, 0), batch.block, device=CPU)
        assert found is None, name


def test_reroute_puts_packs_on_a_device(prefixes: dict[str, str]) -> None:
    """On the meta device, which every machine has; nothing on the way may look at a value."""
    for source in (documents(prefixes["uint16"]), Mapper(gpt(prefixes["int32"]), dict)):
        node = Reroute(Pack(source, LAYOUT, global_batch_size=30), rank=1, device="meta")
        node.reset(None)
        step = next(node)
        assert step.batches
        for batch in step:
            assert batch.tokens.device.type == batch.document_id.device.type == batch.cu_seqlens.device.type == "meta"

    host = block_of(documents(prefixes["uint16"]))
    pads = torch.cat([batch.padding_mask for rank in range(LAYOUT.num_ranks) for batch in host.pack(rank)])
    counted = Reroute(Pack(documents(prefixes["uint16"]), LAYOUT, global_batch_size=30))
    counted.reset(None)
    next(counted)
    assert counted.stats.as_dict()["padding"] == pytest.approx(float(pads.float().mean())) != 0
