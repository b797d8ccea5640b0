"""The arithmetic of batch and target sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdp_megatron.cli.target_sizes import data_parallel_size, global_batch_size, target_sizes

RUN: dict[str, Any] = {"train_samples": None, "train_iters": 1000, "eval_interval": 100, "eval_iters": 10}


@pytest.mark.parametrize(
    ("batch", "changes", "expected"),
    [
        (32, {}, (32_000, 11 * 10 * 32, 320)),
        (32, {"train_iters": 999}, (31_968, 10 * 10 * 32, 320)),
        (32, {"eval_interval": 1001}, (32_000, 320, 320)),
        (32, {"eval_iters": 0}, (32_000, 0, 0)),
        (32, {"full_validation": True}, (32_000, None, 320)),
        # A last, partial step trains on its samples, but no validation follows it.
        (32, {"train_iters": None, "train_samples": 32_031}, (32_031, 11 * 10 * 32, 320)),
        (32, {"train_iters": None, "train_samples": 31_999}, (31_999, 10 * 10 * 32, 320)),
        (32, {"train_iters": None, "train_samples": 5}, (5, 320, 320)),
        (1, {"train_iters": 10**12, "eval_interval": 1}, (10**12, (10**12 + 1) * 10, 10)),
    ],
)
def test_target_sizes(batch: int, changes: dict[str, Any], expected: tuple[int, int | None, int]) -> None:
    assert target_sizes(batch, **{**RUN, **changes}) == expected


@given(st.integers(1, 5000), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(0, 1000))
def test_there_is_enough_for_every_validation(batch: int, iters: int, interval: int, eval_iters: int) -> None:
    train, valid, test = target_sizes(
        batch, train_samples=None, train_iters=iters, eval_interval=interval, eval_iters=eval_iters
    )
    validations = len(range(interval, iters + 1, interval)) + 1  # one more at the end
    assert (train, valid, test) == (iters * batch, validations * eval_iters * batch, eval_iters * batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_samples": 5}, "one of them"),
        ({"train_iters": None}, "one of them"),
        ({"train_iters": 0}, "--train-iters must be at least 1, got 0"),
        ({"train_iters": None, "train_samples": 0}, "--train-samples must be at least 1, got 0"),
        ({"eval_interval": 0}, "--eval-interval must be at least 1"),
        ({"eval_iters": -1}, "--eval-iters must be at least 0"),
    ],
)
def test_bad_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target_sizes(8, **{**RUN, **changes})


def test_data_parallel_size() -> None:
    assert data_parallel_size(1) == 1
    assert data_parallel_size(64, tensor=4, pipeline=2, context=2) == 4
    with pytest.raises(ValueError, match="world size 12 is not a multiple of 8"):
        data_parallel_size(12, tensor=4, pipeline=2)
    for bad in ({"tensor": 0}, {"pipeline": -1}, {"context": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            data_parallel_size(8, **bad)
    with pytest.raises(ValueError, match="world size must be at least 1, got 0"):
        data_parallel_size(0)


@pytest.mark.parametrize(
    ("given_size", "micro", "dp", "expected"), [(None, 2, 8, 16), (32, None, 8, 32), (32, 2, 8, 32), (8, 1, 8, 8)]
)
def test_global_batch_size(given_size: int | None, micro: int | None, dp: int, expected: int) -> None:
    assert global_batch_size(given_size, micro, dp) == expected


@pytest.mark.parametrize(
    ("given_size", "micro", "dp", "message"),
    [
        (None, None, 8, "give --global-batch-size, or --micro-batch-size"),
        (0, 1, 1, "--global-batch-size must be at least 1"),
        (8, 0, 1, "--micro-batch-size must be at least 1"),
        (20, 2, 8, "not a multiple of 16, .*; the nearest are 16 or 32"),
        (5, None, 8, "not a multiple of 8, .*; the nearest are 8"),
    ],
)
def test_bad_global_batch_size(given_size: int | None, micro: int | None, dp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_batch_size(given_size, micro, dp)
