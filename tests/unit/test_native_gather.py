"""The gather kernels on damaged indices and wrong arguments, and their threads after a fork."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tdp_megatron import _C

# Three documents of 4, 0 and 6 tokens; two samples of four tokens and the extra one.
FILE = np.arange(100, 110, dtype=np.uint16).view(np.uint8)


def arguments(**changes: Any) -> list[Any]:
    values: dict[str, Any] = {
        "source": FILE,
        "dtype_code": 8,
        "lengths": np.array([4, 0, 6], dtype=np.int32),
        "pointers": np.array([0, 8, 8], dtype=np.int64),
        "document_index": np.array([0, 1, 2], dtype=np.int32),
        "sample_index": np.array([[0, 0], [2, 0], [2, 4]], dtype=np.int32),
        "shuffle_index": np.array([1, 0], dtype=np.uint32),
        "extra_tokens": 1,
        "sample": np.array([1, 0]),
        "start": np.zeros(2, dtype=np.int64),
        "length": np.full(2, 4),
        "destination": np.array([0, 4]),
        "tokens": np.zeros(8, dtype=np.int64),
        "labels": np.zeros(8, dtype=np.int64),
        "loss_mask": np.zeros(8, dtype=np.float32),
        "position_ids": np.zeros(8, dtype=np.int64),
        "ignore_label": -100,
        "eod_no_loss": -1,
        "eod_reset": -1,
    }
    assert set(changes) <= set(values)
    return list({**values, **changes}.values())


def read(given: list[Any]) -> None:
    """The spans of the samples of ``arguments``."""
    _C.read_spans([_C.gpt_reader(*given[:8], *given[16:])], None, *given[8:16])


@pytest.mark.parametrize("rows", [np.int32, np.int64])
@pytest.mark.parametrize("shuffle", [np.uint32, np.int64])
def test_the_intact_index(rows: Any, shuffle: Any) -> None:
    given = arguments(
        sample_index=np.array([[0, 0], [2, 0], [2, 4]], dtype=rows), shuffle_index=np.array([1, 0], dtype=shuffle)
    )
    read(given)
    tokens, labels, loss_mask, positions = given[12:16]
    assert tokens.tolist() == [100, 101, 102, 103, 104, 105, 106, 107]
    assert labels.tolist() == [101, 102, 103, 104, 105, 106, 107, 108]
    assert loss_mask.tolist() == [1.0] * 8
    assert positions.tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample": np.array([0, 2])}, "sample 2 is outside the shuffle index of 2"),
        ({"sample": np.array([-1, 0])}, "sample -1 is outside"),
        ({"shuffle_index": np.array([7, 0], dtype=np.uint32)}, r"sample 7 outside \[0, 2\)"),
        ({"shuffle_index": np.array([-3, 0])}, r"sample -3 outside \[0, 2\)"),
        ({"sample_index": np.array([[0, 0], [9, 0], [2, 4]], dtype=np.int32)}, "documents 0..9 of 3"),
        ({"sample_index": np.array([[-1, 0], [2, 0], [2, 4]], dtype=np.int32)}, "documents -1..2 of 3"),
        ({"sample_index": np.array([[2, 0], [0, 0], [2, 4]], dtype=np.int32)}, "documents 2..0 of 3"),
        ({"sample_index": np.array([[0, -2], [2, 0], [2, 4]], dtype=np.int32)}, "leaves sequence 0 of length 4"),
        ({"sample_index": np.array([[0, 0], [2, 0], [2, 9]], dtype=np.int32)}, "leaves sequence 2 of length 6"),
        ({"document_index": np.array([0, 1, 5], dtype=np.int32)}, r"document_index\[2\] is 5"),
        ({"document_index": np.array([0, -1, 2], dtype=np.int32)}, r"document_index\[1\] is -1"),
        ({"pointers": np.array([0, 8, 14])}, "leaves the file of 20 bytes"),
        ({"pointers": np.array([-2, 8, 8])}, "leaves the file of 20 bytes"),
        ({"pointers": np.array([2**63 - 2, 8, 8])}, "leaves the file of 20 bytes"),
        ({"destination": np.array([0, 5])}, "leaves the output of 8 tokens"),
        ({"destination": np.array([-1, 4])}, "leaves the output of 8 tokens"),
        ({"start": np.array([0, -1])}, "start -1 and length 4"),
        ({"length": np.array([4, 2**62])}, f"start 0 and length {2**62}"),
        ({"length": np.array([4, -1])}, "start 0 and length -1"),
        ({"start": np.array([0, 3])}, "wants 4 tokens, its pieces hold 2"),
    ],
)
def test_what_is_not_there_is_an_index_error(changes: dict[str, Any], message: str) -> None:
    given = arguments(**changes)
    with pytest.raises(IndexError, match=message):
        read(given)
    assert not given[12].any(), "something was written"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype_code": 6}, ValueError, "dtype code 6 is not an integer type"),
        ({"labels": np.zeros(7, dtype=np.int64)}, ValueError, "labels has 7 elements, expected 8"),
        ({"position_ids": np.zeros(9, dtype=np.int64)}, ValueError, "position_ids has 9 elements, expected 8"),
        ({"destination": np.zeros(1, dtype=np.int64)}, ValueError, "destination has 1 elements, expected 2"),
        ({"sample_index": np.zeros((3, 3), dtype=np.int32)}, ValueError, r"shape \[n \+ 1, 2\]"),
        ({"tokens": np.zeros(8, dtype=np.int32)}, TypeError, "incompatible"),
        ({"tokens": np.zeros(16, dtype=np.int64)[::2]}, TypeError, "incompatible"),
        ({"shuffle_index": np.array([1, 0], dtype=np.int32)}, TypeError, "incompatible"),
        ({"source": FILE.view(np.uint16)}, TypeError, "incompatible"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(arguments(**changes))


def test_a_run_that_leaves_its_document() -> None:
    outputs = arguments()[12:16]
    readers = [_C.run_reader(FILE, 8, np.array([0]), np.array([4]), -100, -1, -1)]
    with pytest.raises(IndexError, match="starts at token 5 of 4"):
        _C.read_spans(readers, None, np.array([0]), np.array([5]), np.array([1]), np.array([0]), *outputs)
    with pytest.raises(IndexError, match="wants 6 tokens, its pieces hold 4"):
        _C.read_spans(readers, None, np.array([0]), np.array([0]), np.array([6]), np.array([0]), *outputs)
    with pytest.raises(IndexError, match="sample 1 is outside the table"):
        _C.read_spans(readers, None, np.array([1]), np.array([0]), np.array([1]), np.array([0]), *outputs)


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, np.uint8), (2, np.int8), (3, np.int16), (4, np.int32), (5, np.int64), (8, np.uint16)]
)
def test_every_integer_type_keeps_its_values(code: int, dtype: Any) -> None:
    # Long enough for whole vectors and a rest, from odd places.
    limits = np.iinfo(dtype)
    values = np.random.default_rng(1).integers(limits.min, limits.max, 203, dtype=dtype, endpoint=True)
    for begin in range(5):
        n = len(values) - begin - 1
        tokens, labels = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        run = np.array([begin * values.itemsize]), np.array([n + 1])
        reader = _C.run_reader(values.view(np.uint8), code, *run, -100, -1, -1)
        zero = np.array([0])
        _C.read_spans(
            [reader], None, zero, zero, np.array([n]), zero, tokens, labels, np.zeros(n, dtype=np.float32), None
        )
        np.testing.assert_array_equal(tokens, values[begin:-1])
        np.testing.assert_array_equal(labels, values[begin + 1 :])


_FORK = """
import os, sys
import numpy as np
from tdp_megatron import _C

source = np.random.default_rng(0).integers(0, 60000, 1 << 19).astype(np.uint16)
n, length = 128, 4095
starts = np.arange(n, dtype=np.int64) * 8192
reader = _C.run_reader(source.view(np.uint8), 8, starts, np.full(n, 4096), -100, -1, -1)

def read():
    tokens, labels = np.zeros(n * length, dtype=np.int64), np.zeros(n * length, dtype=np.int64)
    one = np.arange(n, dtype=np.int64)
    _C.read_spans([reader], None, one, np.zeros_like(one), np.full(n, length), one * length, tokens, labels,
                  np.zeros(n * length, dtype=np.float32), None)
    return tokens

_C.set_num_threads(3)
expected = source.reshape(n, 4096)[:, :length].reshape(-1)
assert (read() == expected).all()
for _ in range(4):
    child = os.fork()
    if child == 0:
        os._exit(0 if all((read() == expected).all() for _ in range(3)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (read() == expected).all()
"""


def test_threads_after_a_fork() -> None:
    # In a process of its own: this one may have threads that do not survive a fork.
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=60)
