"""How long does it take to decide which dataset each sample of a blend comes from?

* ``megatron``: megatron-core's C++ helper.
* ``ours``: ``_C.blend_continue``; equal draws are checked in the same run.

Weights are cubes of uniform numbers, so that there are large and small datasets.

    python benchmarks/blend.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import Case, main, optional, timed

from tdp_megatron import _C


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


if __name__ == "__main__":
    main(__doc__ or "", cases)
