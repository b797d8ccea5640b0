"""The C++ functions on numbers no plan would give: an error, or a write inside the outputs, never anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron import _C

GUARD = 77


def arguments(rows: Any, *, size: int = 8, source: int = 8, edges: Any = None) -> tuple[list[Any], list[np.ndarray]]:
    """Arguments of ``_C.pack`` whose outputs lie between guards, and what holds the guards."""
    holders = [
        np.full(size + 16, GUARD, dtype=dtype)
        for dtype in (np.int64, np.int64, np.float32, np.int64, np.uint8, np.int32)
    ]
    outputs = [holder[8:-8] for holder in holders]
    outputs[4] = outputs[4].view(np.bool_)
    tokens = np.arange(source, dtype=np.int64).view(np.uint8)
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    return [rows, edges, tokens, 5, None, None, None, *outputs, 0, -100, -100, False], holders


GOOD = [[0, 4], [0, 4], [3, 2], [0, 0], [2, 1], [0, 1], [0, 0], [0, 0]]


def changed(line: int, column: int, value: int) -> list[list[int]]:
    rows = [list(values) for values in GOOD]
    rows[line][column] = value
    return rows


def test_good_rows() -> None:
    call, _ = arguments(GOOD)
    _C.pack(*call)
    assert call[7].tolist() == [0, 1, 2, 0, 4, 5, 0, 0]
    assert call[8].tolist() == [1, 2, -100, -100, 5, -100, -100, -100]


@pytest.mark.parametrize(
    ("line", "column", "value", "message"),
    [
        (0, 0, 1, "first span must begin at 0"),
        (0, 0, -1, "first span must begin at 0"),
        (1, 0, 6, "span 0 of 3 tokens at 6 leaves the source of 8"),
        (1, 1, -1, "span 1 of 2 tokens at -1 leaves the source"),
        (1, 1, 2**63 - 1, "leaves the source"),
        (2, 0, 5, "span 0 of 5 tokens leaves \\[0, 4\\) of 8"),
        (2, 1, -1, "span 1 of -1 tokens"),
        (4, 0, 4, "span 0 has 4 labels"),
        (4, 0, -1, "span 0 has -1 labels"),
    ],
)
def test_spans_that_leave_their_place(line: int, column: int, value: int, message: str) -> None:
    call, _ = arguments(changed(line, column, value))
    with pytest.raises(IndexError, match=message):
        _C.pack(*call)


def test_a_label_behind_the_source() -> None:
    call, _ = arguments([[0], [6], [2], [0], [2], [0], [0], [0]])
    with pytest.raises(IndexError, match="span 0 has 2 labels, which leave its tokens or the source"):
        _C.pack(*call)


@pytest.mark.parametrize(("line", "value"), [(6, -1), (6, 5), (7, 3), (7, -1)])
def test_loss_edges_outside(line: int, value: int) -> None:
    call, _ = arguments(changed(line, 0, value), edges=np.array([1, 2], dtype=np.int64))
    with pytest.raises(IndexError, match="span 0 has loss edges"):
        _C.pack(*call)


def test_shapes_and_types() -> None:
    call, _ = arguments(GOOD)
    for place, wrong, error in (
        (0, np.zeros((7, 2), dtype=np.int64), ValueError),
        (0, np.zeros((8, 2), dtype=np.int32), TypeError),
        (0, np.zeros((8, 4), dtype=np.int64)[:, ::2], TypeError),
        (2, np.zeros(8, dtype=np.int64), TypeError),
        (3, 6, ValueError),
        (4, np.zeros(7, dtype=np.int64), ValueError),
        (4, np.zeros(8, dtype=np.int32), TypeError),
        (5, np.zeros(8, dtype=np.float64), TypeError),
        (8, np.zeros(7, dtype=np.int64), ValueError),
        (11, np.zeros(8, dtype=np.uint8), TypeError),
    ):
        broken = list(call)
        broken[place] = wrong
        with pytest.raises(error):
            _C.pack(*broken)
    with pytest.raises(ValueError, match="width must not be negative"):
        _C.pack_bytes(call[0], call[2], -1, np.zeros(8, dtype=np.uint8))


odd_numbers = st.integers(-3, 12) | st.sampled_from([2**31, 2**62, -(2**63), 2**63 - 1])


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(odd_numbers, min_size=n, max_size=n), min_size=8, max_size=8)
    ),
    st.booleans(),
)
def test_any_numbers(rows: list[list[int]], with_edges: bool) -> None:
    edges = np.array([1, 2, 5, 6], dtype=np.int64) if with_edges else None
    call, holders = arguments(rows, edges=edges)
    bytes_out = np.full(8 * 3 + 16, GUARD, dtype=np.uint8)
    for run in (
        lambda: _C.pack(*call),
        lambda: _C.pack_bytes(call[0], call[2], 3, bytes_out[8:-8]),
    ):
        try:
            run()
        except (IndexError, ValueError):
            continue
    for holder in (*holders, bytes_out):
        assert (holder[:8] == GUARD).all()
        assert (holder[-8:] == GUARD).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(odd_numbers, max_size=5), st.integers(-1, 5), st.integers(-1, 5))
def test_any_cumulative_lengths(cu: list[int], cp_size: int, cp_rank: int) -> None:
    if cu and abs(cu[-1]) > 2**30:
        cu[-1] = 12  # a result that would fill the memory is not what is looked for
    try:
        found = _C.cp_positions(np.array(cu, dtype=np.int64), cp_size, cp_rank)
    except ValueError:
        return
    assert len(found) == cu[-1] // cp_size
    assert ((found >= 0) & (found < max(cu[-1], 1))).all()
