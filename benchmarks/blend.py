"""How long does it take to decide which dataset each sample of a blend comes from?

* ``megatron``: megatron-core's C++ helper.
* ``ours``: ``_C.blend_continue``; equal draws are checked in the same run.

Weights are cubes of uniform numbers, so that there are large and small datasets. ``changing`` weights lie on lines
between three points; ``numpy`` is the plain rule, with ``argmax``.

    python benchmarks/blend.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import Case, main, optional, timed

from tdp_megatron import _C
from tdp_megatron.datasets.weights import PiecewiseLinearWeights


def cases(smoke: bool, repeat: int) -> Iterator[Case]:
    helpers, reason = optional("megatron.core.datasets.helpers")
    if helpers is None:
        print(f"megatron is left out: {reason}")
    for k in (2, 8, 32, 64, 256, 1000, 5000):
        weights = np.random.default_rng(k).random(k) ** 3 + 1e-6
        weights /= weights.sum()
        n = 2000 if smoke else max(20_000, min(4_000_000, 40_000_000 // k))

        def ours(k: int = k, n: int = n, weights: Any = weights) -> Any:
            return _C.blend_continue(weights, np.zeros(k, dtype=np.int64), 0, n)

        def theirs(k: int = k, n: int = n, weights: Any = weights) -> Any:
            dataset, sample = np.zeros(n, dtype=np.int16), np.zeros(n, dtype=np.int64)
            helpers.build_blending_indices(dataset, sample, weights, k, n, False)
            return dataset, sample

        ways: dict[str, Any] = {"ours": ours}
        if helpers is not None:
            for a, b in zip(ours(), theirs(), strict=True):
                np.testing.assert_array_equal(a, b)
            ways = {"megatron": theirs, **ways}
        yield Case(f"{k} datasets", timed(ways, repeat), work=n, unit="samples/s", peer="megatron")
    for k in (20, 5000):
        yield changing(k, 2000 if smoke else 20_000, repeat)


def changing(k: int, n: int, repeat: int) -> Case:
    """Weights that change with every sample."""
    rows = np.random.default_rng(k).random((3, k)) ** 3 + 1e-6
    schedule = PiecewiseLinearWeights([(i * n // 2, row.tolist()) for i, row in enumerate(rows)])
    active = np.ones(k, dtype=bool)

    def ours() -> Any:
        return schedule.draw(0, n, np.zeros(k), np.zeros(k, dtype=np.int64), active)

    def plainly() -> Any:
        targets, counts = np.zeros(k), np.zeros(k, dtype=np.int64)
        chosen, numbers = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64)
        for begin in range(0, n, 100):
            for j, row in enumerate(schedule.weights(begin, min(begin + 100, n)), start=begin):
                targets += row
                chosen[j] = np.argmax(targets - counts)
                numbers[j] = counts[chosen[j]]
                counts[chosen[j]] += 1
        return chosen, numbers

    for a, b in zip(ours(), plainly(), strict=True):
        np.testing.assert_array_equal(a, b)
    timings = timed({"numpy": plainly, "ours": ours}, repeat)
    return Case(f"{k} datasets, changing", timings, work=n, unit="samples/s", peer="numpy")


if __name__ == "__main__":
    main(__doc__ or "", cases)
