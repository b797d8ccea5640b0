"""Blends with changing weights: the native loops against the rule written down with NumPy, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron import _C
from tdp_megatron.datasets import weights as weights_module
from tdp_megatron.datasets.weights import CallableWeights, PiecewiseLinearWeights, WeightSchedule

Floats = npt.NDArray[np.float64]

# Around the sizes at which the lanes of a vector are partly filled.
sizes = st.one_of(st.integers(1, 20), st.sampled_from([7, 8, 9, 15, 16, 17, 33, 100]))


class State:
    """Where a blend stands."""

    def __init__(self, k: int) -> None:
        self.targets = np.zeros(k)
        self.counts = np.zeros(k, dtype=np.int64)

    def copy(self) -> State:
        other = State(len(self.counts))
        other.targets[:], other.counts[:] = self.targets, self.counts
        return other

    def same(self, other: State) -> bool:
        bits = self.targets.view(np.int64).tolist() == other.targets.view(np.int64).tolist()
        return bits and self.counts.tolist() == other.counts.tolist()


def reference(rows: Floats, state: State, active: npt.NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """The source furthest behind its target among those with weight; ``argmax`` takes the first of equals."""
    chosen, numbers = [], []
    for row in rows:
        state.targets += row
        offered = active & (row > 0)
        offered = offered if offered.any() else active
        source = int(np.argmax(np.where(offered, state.targets - state.counts, -np.inf)))
        chosen.append(source)
        numbers.append(int(state.counts[source]))
        state.counts[source] += 1
    return chosen, numbers


def points_of(seed: int, k: int, count: int, kind: str) -> list[tuple[int, list[float]]]:
    rng = np.random.default_rng(seed)
    numbers = np.cumsum(rng.integers(1, 60, count)) - (1 if seed % 3 else 0)
    rows = []
    for _ in range(count):
        row = rng.integers(0, 3, k).astype(float) if kind == "ties and zeros" else rng.random(k) ** 4
        if kind == "one source" or not row.sum():
            row = np.zeros(k)
            row[rng.integers(k)] = 2.0
        rows.append(row.tolist())
    return list(zip(numbers.tolist(), rows, strict=True))


def active_of(seed: int, k: int) -> npt.NDArray[np.bool_]:
    rng = np.random.default_rng(seed)
    active = rng.random(k) < (1.0 if seed % 2 else 0.6)
    active[rng.integers(k)] = True
    return active


def check(schedule: WeightSchedule, begin: int, parts: list[int], state: State, active: npt.NDArray[np.bool_]) -> None:
    theirs = state.copy()
    for part in parts:
        sources, numbers = schedule.draw(begin, part, state.targets, state.counts, active)
        assert (sources.dtype, numbers.dtype) == (np.int32, np.int64)
        expected = reference(schedule.weights(begin, begin + part), theirs, active)
        assert (sources.tolist(), numbers.tolist()) == expected
        assert state.same(theirs)
        begin += part


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["random", "ties and zeros", "one source"]),
    sizes,
    st.integers(1, 5),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 90), min_size=1, max_size=5),
)
def test_lines(kind: str, k: int, count: int, seed: int, parts: list[int]) -> None:
    schedule = PiecewiseLinearWeights(points_of(seed, k, count, kind))
    check(schedule, 0, parts, State(k), active_of(seed, k))


@pytest.mark.parametrize("begin", [10**9, 2**40, 2**53 - 200])
def test_lines_far_into_a_run(begin: int) -> None:
    schedule = PiecewiseLinearWeights([(3, [1, 2, 3]), (begin + 10, [3, 0, 0.3]), (begin + 60, [0, 1, 0])])
    state = State(3)
    state.counts[:] = [begin // 2, begin // 4, begin // 4]
    state.targets[:] = state.counts + [0.25, 0.5, 0.125]
    check(schedule, begin, [7, 80, 50], state, np.array([True, True, True]))


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 2**31), st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 40))
def test_functions_in_blocks_of_any_size(k: int, seed: int, parts: list[int], block: int) -> None:
    points = points_of(seed, k, 4, "ties and zeros")
    schedule = CallableWeights(lambda n: points[n // 7 % 4][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "_VALUES_AT_ONCE", block)
        check(schedule, 0, parts, State(k), active_of(seed, k))


def test_a_function_and_a_line_that_agree_draw_the_same() -> None:
    line = PiecewiseLinearWeights([(0, [1, 3]), (64, [3, 1])])  # slopes that are exact
    function = CallableWeights(lambda n: [0.25 + 0.5 * min(n, 64) / 64, 0.75 - 0.5 * min(n, 64) / 64])
    drawn = []
    for schedule in (line, function):
        state = State(2)
        drawn.append(schedule.draw(0, 300, state.targets, state.counts, np.array([True, True])))
    np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize("value", [1, 2.5, np.float32(0.5), np.int64(3)])
def test_numbers_a_function_may_give(value: Any) -> None:
    assert CallableWeights(lambda n: [value, value]).weights(0, 3).tolist() == [[0.5, 0.5]] * 3
    assert CallableWeights(lambda n: np.array([value, value])).weights(5, 6).tolist() == [[0.5, 0.5]]
    assert CallableWeights(lambda n: [value]).weights(4, 4).shape == (0, 1)


@pytest.mark.parametrize(
    ("late", "error", "message"),
    [
        ([1.0, True], TypeError, "must be a number, got True"),
        ([1.0, "2"], TypeError, "must be a number, got '2'"),
        ([1.0], ValueError, "1 weights for 2 sources"),
        ([1.0, 2.0, 3.0], ValueError, "3 weights for 2 sources"),
        ([1.0, -1e-9], ValueError, "not negative"),
        ([0, 0], ValueError, "all 2 weights are zero"),
        ([1.0, float("nan")], ValueError, "is nan"),
        ([1.0, float("inf")], ValueError, "is inf"),
        ([1e308, 1e308], ValueError, "infinite"),
    ],
)
def test_a_function_that_goes_wrong_is_told_with_the_sample(
    late: list[Any], error: type[Exception], message: str
) -> None:
    schedule = CallableWeights(lambda n: late if n == 70 else [1.0, 2.0], name="late")
    with pytest.raises(error, match=rf"function late, sample 70: .*{message}"):
        schedule.weights(60, 90)


def test_sums_of_weights_are_added_one_by_one() -> None:
    """Python 3.12 and NumPy add up in other ways than a plain loop; the order must not depend on that."""
    row = [0.1] * 300
    total = list(itertools.accumulate(row))[-1]
    assert total != np.sum(row)
    assert PiecewiseLinearWeights([(0, row)]).weights(0, 1)[0, 0] == 0.1 / total
    assert CallableWeights(lambda n: row).weights(0, 1)[0, 0] == 0.1 / total


def arguments(**changed: Any) -> tuple[Any, ...]:
    given = {
        "points": np.array([0.0, 5.0]),
        "rows": np.array([[0.5, 0.5], [1.0, 0.0]]),
        "targets": np.zeros(2),
        "counts": np.zeros(2, dtype=np.int64),
        "active": np.array([True, True]),
        "position": 0,
        "n": 4,
    }
    return tuple({**given, **changed}.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"points": np.zeros(0)}, "points must not be empty"),
        ({"points": np.array([0.0, 0.0])}, r"points\[1\] is 0"),
        ({"points": np.array([0.5, 1.0])}, r"points\[0\] is 0.5"),
        ({"points": np.array([-1.0, 1.0])}, r"points\[0\] is -1"),
        ({"points": np.array([0.0, np.nan])}, r"points\[1\] is nan"),
        ({"points": np.array([0.0, 2.0**53])}, r"points\[1\] is 9007199254740992"),
        ({"points": np.array([0.0])}, "2 rows for 1 points"),
        ({"rows": np.zeros((2, 3))}, "rows must have two dimensions, the second of 2"),
        ({"rows": np.zeros(4)}, "rows must have two dimensions"),
        ({"rows": np.array([[0.5, 0.5], [np.nan, 0.0]])}, r"rows\[1, 0\] is nan"),
        ({"rows": np.array([[0.5, 0.5], [1.5, 0.0]])}, r"rows\[1, 0\] is 1.5"),
        ({"rows": np.array([[0.5, -0.5], [1.0, 0.0]])}, r"rows\[0, 1\] is -0.5"),
        ({"targets": np.array([0.0, np.inf])}, r"targets\[1\] is inf"),
        ({"counts": np.zeros(3, dtype=np.int64)}, "counts has 3 elements, expected 2"),
        ({"counts": np.array([0, -1])}, r"counts\[1\] is -1"),
        ({"counts": np.array([0, 2**53 - 4])}, r"counts\[1\] is 9007199254740988"),
        ({"active": np.array([True])}, "active has 1 elements, expected 2"),
        ({"active": np.array([False, False])}, "at least one source must be active"),
        ({"position": -1}, "position must not be negative"),
        ({"position": 2**53 - 3}, r"position \+ n must be at most"),
        ({"n": -1}, r"position \+ n must be at most"),
        ({"n": 2**62}, r"position \+ n must be at most"),
    ],
)
def test_bad_arguments_of_lines(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.blend_linear(*arguments(**changed))


def test_bad_arguments_of_rows() -> None:
    _, rows, targets, counts, active, _, _ = arguments()
    for wrong, message in ((rows * 3, "is 1.5"), (rows[0], "two dimensions"), (np.full((2, 2), np.nan), "is nan")):
        with pytest.raises(ValueError, match=message):
            _C.blend_weighted(wrong, targets, counts, active)
    with pytest.raises(ValueError, match="at least one dataset"):
        _C.blend_weighted(np.zeros((3, 0)), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    for wrong in (rows.astype(np.float32), rows[:, ::-1], "x"):
        with pytest.raises(TypeError):
            _C.blend_weighted(wrong, targets, counts, active)  # type: ignore[arg-type]


def test_a_call_that_is_given_up_changes_nothing() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    points, rows, targets, counts, active, _, _ = arguments()
    with pytest.raises(KeyboardInterrupt):
        _C.blend_linear(points, rows, targets, counts, active, 0, 2_000_000, stop)
    assert targets.tolist() == [0, 0]
    assert counts.tolist() == [0, 0]
