"""Tensors whose dtype NumPy lacks: they are packed, batched and sent like any others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper

from tdp_megatron.nodes import Batch, Pack, Reroute
from tdp_megatron.torch_dtypes import array_of, dtype_name, dtype_named, is_foreign, shown, tensor_of
from tdp_megatron.types import ParallelLayout

FOREIGN = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
KNOWN = [torch.float64, torch.float16, torch.bool, torch.uint16, torch.complex64, torch.int8]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [*FOREIGN, *KNOWN], ids=str)
@pytest.mark.parametrize("shape", [(5,), (0,), (4, 2, 3)], ids=str)
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, *shape)
    array = array_of(tensor)
    assert array.shape == shape
    assert is_foreign(array.dtype) == (dtype in FOREIGN)
    assert dtype_named(dtype_name(array.dtype)) == array.dtype
    assert shown(array.dtype) == (str(dtype) if dtype in FOREIGN else str(dtype).removeprefix("torch."))
    back = tensor_of(array)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8)) if tensor.numel() else back.shape == shape


def test_memory_is_shared_and_gradients_are_left_behind() -> None:
    tensor = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    tensor_of(array_of(tensor))[1] = 3
    assert tensor.tolist() == [1, 3, 1, 1]
    assert array_of(tensor[::2]).shape == (2,)
    assert array_of(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


@pytest.mark.parametrize("dtype", [*FOREIGN, *KNOWN], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_per_token_keys_of_any_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    items = [{"tokens": torch.arange(n), "score": values(dtype, n, *shape)} for n in (3, 4)]
    pack_ = Pack(IterableWrapper(items), ParallelLayout(1, 1, 32), global_batch_size=2, token_keys=["score"])
    (pack,) = next(Reroute(pack_)).batches
    score = pack.extras["score"]
    assert score.dtype == dtype
    wanted = torch.cat([items[i]["score"] for _, i in pack.refs]).view(torch.uint8)
    assert torch.equal(score[~pack.padding_mask].view(torch.uint8).flatten(), wanted.flatten())
    assert not score[pack.padding_mask].view(torch.uint8).any()
    batch = next(Batch(IterableWrapper(items), micro_batch_size=2, sequence_length=4, token_keys=("score",)))
    rows = batch["score"]
    assert rows.dtype == dtype
    for row, item in zip(rows, items, strict=True):
        n = len(item["tokens"])
        assert torch.equal(row[:n].view(torch.uint8), item["score"].view(torch.uint8))


def test_a_loss_mask_in_bfloat16_is_one_in_float32() -> None:
    items = [{"tokens": torch.arange(3), "loss_mask": torch.tensor([0, 1, 0.5]).bfloat16()}]
    (pack,) = next(Reroute(Pack(IterableWrapper(items), ParallelLayout(1, 1, 16), global_batch_size=1))).batches
    assert pack.loss_mask[:3].tolist() == [0, 1, 0.5]


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([{"tokens": torch.ones(2).bfloat16()}], TypeError, "must hold integers, has dtype torch.bfloat16"),
        (
            [{"tokens": [1], "score": torch.ones(1).bfloat16()}, {"tokens": [1], "score": torch.ones(1)}],
            ValueError,
            "score has dtype float32 and shape .* other samples differ",
        ),
        (
            [{"tokens": [1], "score": np.ones(1, np.uint16)}, {"tokens": [1], "score": torch.ones(1).bfloat16()}],
            ValueError,
            "score has dtype torch.bfloat16",
        ),
    ],
)
def test_dtypes_that_do_not_fit(items: list[dict[str, Any]], error: type[Exception], message: str) -> None:
    keys = ["score"] if "score" in items[0] else []
    node = Pack(IterableWrapper(items), ParallelLayout(1, 1, 16), global_batch_size=len(items), token_keys=keys)
    with pytest.raises(error, match=message):
        next(node)
