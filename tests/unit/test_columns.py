"""Samples read where they lie: what a column takes, what it refuses, and that it never reads memory that is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron import _C
from tdp_megatron.reading import read_block
from tdp_megatron.samples import MappingReader, block_from_items, token_facts
from tdp_megatron.types import IGNORE_LABEL


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def find(value: Any, floats: bool = False) -> _C.Column | None:
    return _C.Column.find([{"tokens": value}], "tokens", floats)


def content(column: _C.Column, itemsize: int = 8) -> bytes:
    n = int(column.lengths[0])
    out = np.zeros(n * itemsize, dtype=np.uint8)
    column.copy_spans(ints(0), ints(0), ints(n), out, ints(0))
    return out.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(5),
        torch.arange(5),
        torch.arange(10)[3:8],
        torch.arange(0),
        torch.arange(9).reshape(3, 3)[1],
        torch.arange(3)[::2][:1],
    ],
)
def test_flat_contiguous_integers_are_read_where_they_lie(value: Any) -> None:
    column = find(value)
    assert column is not None
    assert content(column) == np.asarray(value).astype(np.int64).tobytes()


def unaligned() -> Any:
    return np.frombuffer(bytes(17), dtype=np.uint8)[1:].view(np.int64)


NOT_FOUND = {
    "int32": torch.arange(5, dtype=torch.int32),
    "float64": np.ones(3),
    "list": [1, 2],
    "strided": torch.arange(6)[::2],
    "strided array": np.arange(6)[::2],
    "matrix": torch.zeros(2, 2, dtype=torch.int64),
    "scalar": torch.tensor(3),
    "big endian": np.arange(3, dtype=">i8"),
    "unaligned": unaligned(),
    "meta": torch.zeros(3, dtype=torch.int64, device="meta"),
    "sparse": torch.zeros(3, dtype=torch.int64).to_sparse(),
    "subclass": torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "none": None,
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_anything_else_is_left_to_the_slow_way(name: str) -> None:
    assert find(NOT_FOUND[name]) is None


@pytest.mark.parametrize("name", ["int32", "list", "strided", "strided array", "big endian", "unaligned", "subclass"])
def test_the_slow_way_reads_the_same_values(name: str) -> None:
    value = NOT_FOUND[name]
    block = block_from_items([{"tokens": value, "labels": value}], 0, 0)
    sample = block[0]
    expected = np.asarray(value).astype(np.int64).tolist()
    assert sample["tokens"].tolist() == expected
    assert sample["labels"].tolist() == expected


def test_floats_with_gradients_or_lazy_signs_keep_their_values() -> None:
    grad = torch.ones(3, requires_grad=True)
    negated = torch.tensor([1 + 2j]).conj().imag
    for mask, expected in ((grad, [1, 1, 1]), (negated, [-2])):
        block = block_from_items([{"tokens": torch.arange(len(mask)), "loss_mask": mask}], 0, 0)
        assert block[0]["loss_mask"].tolist() == expected


def test_other_lengths_other_mappings_and_missing_keys_are_not_found() -> None:
    like = find(torch.arange(3))
    assert like is not None
    assert _C.Column.find([{"labels": torch.arange(4)}], "labels", False, like) is None
    assert _C.Column.find([{"labels": torch.arange(3)}] * 2, "labels", False, like) is None
    assert _C.Column.find([{"tokens": torch.arange(3)}], "labels", False) is None
    assert _C.Column.find([range(3)], "labels", False) is None  # type: ignore[list-item]


def test_a_tensor_that_is_resized_while_it_waits_is_an_error() -> None:
    tokens = torch.arange(4)
    block = block_from_items([{"tokens": tokens}], 0, 0)
    tokens.resize_(1 << 16)
    with pytest.raises(RuntimeError, match=r"tensor of sample 0 was resized .* yield a new one"):
        read_block(block).joined("tokens")


def test_a_tensor_lives_as_long_as_its_column() -> None:
    items = [{"tokens": torch.arange(1 << 15)} for _ in range(3)]
    column = _C.Column.find(items, "tokens", False)
    assert column is not None
    items.clear()
    del items
    assert content(column) == np.arange(1 << 15).tobytes()


@pytest.mark.parametrize(
    ("samples", "starts", "lengths", "targets"),
    [
        (ints(1), ints(0), ints(1), ints(0)),
        (ints(-1), ints(0), ints(1), ints(0)),
        (ints(0), ints(3), ints(2), ints(0)),
        (ints(0), ints(-1), ints(2), ints(0)),
        (ints(0), ints(0), ints(-1), ints(0)),
        (ints(0), ints(0), ints((1 << 63) - 1), ints(0)),
        (ints(0), ints(0), ints(2), ints(20)),
        (ints(0), ints(0), ints(1), ints(-8)),
        (ints(0), ints(0), ints(1), ints((1 << 63) - 1)),
    ],
)
def test_spans_outside_samples_or_target_are_refused(samples: Any, starts: Any, lengths: Any, targets: Any) -> None:
    column = find(torch.arange(4))
    assert column is not None
    target = np.zeros(24, dtype=np.uint8)
    with pytest.raises(IndexError):
        column.copy_spans(samples, starts, lengths, target, targets)
    with pytest.raises(IndexError):
        column.narrow_spans(5, samples, starts, lengths, ints(0), ints(0), target, targets)


def test_wrong_arrays_and_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="array 1 of a column"):
        _C.Column([np.arange(3), np.arange(3.0)])
    with pytest.raises(TypeError, match="array 1 of a column"):
        _C.Column([np.zeros((3, 2)), np.zeros((3, 4))])
    with pytest.raises(TypeError, match="Python objects"):
        _C.Column([np.array([None])])
    with pytest.raises(IndexError, match="leave its array"):
        _C.Column(np.arange(3), ints(2, 2))
    with pytest.raises(TypeError, match="tokens is not a column"):
        _C.Column([np.ones(3)]).narrow_spans(
            8, ints(0), ints(0), ints(1), ints(0), ints(0), np.zeros(8, np.uint8), ints(0)
        )
    column = _C.Column([np.arange(3)])
    with pytest.raises(ValueError, match="dtype code 6"):
        column.narrow_spans(6, ints(0), ints(0), ints(1), ints(0), ints(0), np.zeros(8, dtype=np.uint8), ints(0))
    with pytest.raises(ValueError, match="other lengths than tokens"):
        _C.scan_samples(column, _C.Column([np.arange(2)]), _C.Column([np.ones(3, np.float32)]), None, IGNORE_LABEL)


def test_tokens_of_python_objects_are_named() -> None:
    reader = block_from_items([{"tokens": ints(1), "extra": np.array([None])}], 2, 7).readers[0]
    assert isinstance(reader, MappingReader)
    with pytest.raises(TypeError, match="sample 7 of source 2: extra is an array of Python objects"):
        reader.declare_token_keys(["extra"])


@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 2048, 3000])
def test_one_odd_value_anywhere_is_seen(length: int) -> None:
    """The scan looks at blocks; the plain rules must hold at their edges, too."""
    document = np.arange(length + 1) % 1000
    for place in sorted({0, length // 2, length - 1, min(1023, length - 1), min(1024, length - 1)}):
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            sample = {
                "tokens": document[:-1].copy(),
                "labels": document[1:].copy(),
                "loss_mask": np.ones(length, dtype=np.float32),
                "position_ids": np.arange(length),
            }
            columns = {name: _C.Column([array]) for name, array in sample.items()}
            assert token_facts(columns).bits == 31
            assert int(token_facts(columns).largest).bit_length() == int(document.max()).bit_length()
            sample[key][place] = 70_001
            facts = token_facts(columns)
            follow = np.array_equal(sample["labels"][:-1], sample["tokens"][1:])
            loss_is_one = bool((sample["loss_mask"] == 1).all())
            counts = np.array_equal(sample["position_ids"], np.arange(length))
            assert bool(facts.bits & 1) == follow
            assert bool(facts.bits & 8) == loss_is_one
            assert bool(facts.bits & 16) == counts
            assert facts.num_loss_tokens.tolist() == [length]
            assert (facts.largest >= 1 << 16) == (key == "tokens" or (key == "labels" and place == length - 1))
