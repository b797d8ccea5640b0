"""The native kernels called directly with arguments no caller of ours gives: an error, never a read out of bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tdp_megatron import _C

INT64_MAX = 2**63 - 1


def ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def pieces(sample: int, start: int, length: int) -> Any:
    lengths = np.array([5, 5], dtype=np.int32)
    rows = np.array([[0, 0], [0, 4], [1, 3]], dtype=np.int32)
    document_index = np.array([0, 1], dtype=np.int32)
    shuffle = ints(0, 1, 2, INT64_MAX)
    spans = ints(sample), ints(start), ints(length)
    reader = _C.gpt_reader(None, 8, lengths, ints(0, 10), document_index, rows, shuffle, 1, -100, -1, -1)
    return reader.pieces(*spans)


def test_pieces_of_a_span() -> None:
    offsets, counts, begins = pieces(1, 1, 3)
    assert (offsets.tolist(), counts.tolist(), begins.tolist()) == ([10], [3], [0, 1])


@pytest.mark.parametrize("sample", [-1, 2, 3, 4, INT64_MAX])
def test_a_sample_that_is_not_there(sample: int) -> None:
    with pytest.raises(IndexError, match=r"sample -?\d+ (is )?outside"):
        pieces(sample, 0, 1)


@pytest.mark.parametrize(("start", "length"), [(-1, 3), (0, -1), (-INT64_MAX, 1)])
def test_a_span_before_its_sample(start: int, length: int) -> None:
    with pytest.raises(IndexError, match="neither may be negative"):
        pieces(1, start, length)


def test_numbers_that_leave_int64() -> None:
    with pytest.raises(ValueError, match="position \\+ n"):
        _C.blend_continue(np.ones(1), ints(0), INT64_MAX, 3)
    with pytest.raises(ValueError, match=r"counts\[1\] \+ n"):
        _C.blend_continue(np.ones(2), ints(0, INT64_MAX), 0, 3)
    with pytest.raises(ValueError, match="num_samples \\* sequence_length"):
        _C.build_sample_index(np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32), 4, 1, INT64_MAX, True)


STRIDED = np.zeros(8, dtype=np.int64)[::2]
WRONG: list[Any] = [STRIDED, ints()[None], np.zeros(4, dtype=">i8"), np.zeros(4, dtype=np.int32), [0, 1], None, "text"]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{type(w).__name__}-{getattr(w, 'dtype', '')}")
def test_arrays_of_another_kind_are_not_copied(wrong: Any) -> None:
    target = np.zeros(16, dtype=np.uint8)
    with pytest.raises((TypeError, ValueError)):
        _C.copy_spans(np.zeros(16, dtype=np.uint8), ints(0, 1, 2, 3), target, ints(0, 1, 2, 3), wrong)
    with pytest.raises((TypeError, ValueError)):
        _C.blend_continue(np.ones(4), wrong, 0, 1)
    with pytest.raises((TypeError, ValueError)):
        _C.cp_positions(np.zeros((2, 2), dtype=np.int64), 1, 0)


def test_an_output_that_is_read_only() -> None:
    target = np.zeros(16, dtype=np.uint8)
    target.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        _C.copy_spans(np.zeros(16, dtype=np.uint8), ints(0), target, ints(0), ints(1))
    counts = ints(0, 0)
    counts.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        _C.blend_continue(np.ones(2), counts, 0, 1)
