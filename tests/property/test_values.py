"""Per-sample values come out of the bytes they travel in as what they were, types included."""

from __future__ import annotations

import collections
import enum
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tdp_megatron.distributed.values import decode_values, encode_values


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(bits(a), bits(b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)  # NaN and -0.0 included


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([1 << 5000, 2**63, -(2**63)]),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st_numpy.from_dtype(np.dtype(np.int16)),
    st_numpy.from_dtype(np.dtype(np.float64)),
    st.sampled_from([np.str_("a"), np.str_(""), np.bool_(True), np.datetime64("2026-01-01T00:00:01.5")]),
)
arrays = st_numpy.arrays(
    st.sampled_from([np.int64, np.uint8, np.float16, np.bool_, np.complex64, ">i4", "U3", "S2", "M8[ms]"]),
    st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype),
    st.sampled_from([torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]),
    st.sampled_from([(), (0,), (3,), (2, 0, 2), (2, 3)]),
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(keys, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
    )


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(scalars | arrays | tensors, containers, max_leaves=8), max_size=4))
def test_values_come_back_with_their_types(values: dict[str, Any]) -> None:
    assert same(decode_values(encode_values(values)), values)


def test_numbers_beyond_the_limit_on_digits() -> None:
    huge = -(1 << 70_000)
    assert decode_values(encode_values({"n": huge})) == {"n": huge}


def test_lists_that_look_like_the_header_stay_lists() -> None:
    values = {"a": ["t", [1, 2]], "b": ["i", "ff"], "c": ["d", []], "d": {"T": ["b", 3]}}
    assert same(decode_values(encode_values(values)), values)


def test_views_of_memory_come_back_as_what_they_show() -> None:
    matrix = np.arange(12).reshape(3, 4)
    values = {
        "strided": torch.arange(9)[::2],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "gradient": torch.ones(2, requires_grad=True),
        "columns": matrix[:, ::2],
        "fortran": np.asfortranarray(matrix),
    }
    came = decode_values(encode_values(values))
    for key, value in values.items():
        assert torch.equal(torch.as_tensor(came[key]), torch.as_tensor(value).detach()), key
    came["columns"][0, 0] = 7  # it can be written to


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "holds a builtins.object"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        ({"deep": [({1: range(3)},)]}, "holds a builtins.range"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (np.array([None]), "array of dtype object"),
        (np.zeros(1, dtype=[("a", "i4")]), r"array of dtype \[\('a', '<i4'\)\]"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (LOOP, "contains itself"),
        ({Colour.RED: 1}, "Colour"),
    ],
)
def test_what_would_change_its_type_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"key 'meta' .*{said}") as caught:
        encode_values({"fine": 1, "meta": value})
    assert re.search(r"exchanged", str(caught.value))
