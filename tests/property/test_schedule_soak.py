"""Many random batches: no error, no broken constraint, no deadlock, and ``auto`` never behind ``dp_balanced``.

``TDP_SCHEDULE_CASES`` sets how many; 5,000 unless it says otherwise.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, lower_bound, schedule, simulate, validate
from tdp_megatron.schedule.presets import PRESETS
from tdp_megatron.schedule.problem import pack_token_cap
from tdp_megatron.types import ParallelLayout

CASES = int(os.environ.get("TDP_SCHEDULE_CASES", "5000"))
MODES = ("free", "lockstep", "barrier", "pipeline(2)", "pipeline(4, 2)")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def random_layout(rng: np.random.Generator) -> ParallelLayout:
    num_ranks = int(rng.choice(RANKS))
    powers = [k for k in (1, 2, 4, 8, 16, 32) if num_ranks % k == 0]
    sizes = tuple(sorted(set(rng.choice(powers, size=rng.integers(1, len(powers) + 1)).tolist())))
    tail = int(rng.choice([1, 16, 32, 128]))
    cap = int(rng.integers(max(tail, 2), 5000))
    cp = int(rng.choice(sizes))
    return ParallelLayout(num_ranks // cp, cp, cap, cp_sizes=sizes, tail_multiple=tail)


def random_seqlens(rng: np.random.Generator, longest: int) -> np.ndarray:
    n = int(rng.integers(0, 5)) if rng.random() < 0.2 else int(rng.integers(0, 150))
    kind = rng.integers(0, 5)
    if kind == 0:
        lengths = rng.integers(0, longest + 1, n)
    elif kind == 1:
        lengths = rng.lognormal(np.log(max(longest / 40, 1)), 1.5, n)
    elif kind == 2:
        lengths = np.full(n, rng.integers(0, longest + 1))
    elif kind == 3:
        lengths = np.where(rng.random(n) < 0.1, longest, longest // 50)
    else:
        lengths = rng.choice([0, 1, longest, longest // 2, longest // 2 + 1, longest // 3], n)
    return np.clip(lengths, 0, longest).astype(np.int64)


def random_cost(rng: np.random.Generator) -> CostModel:
    if rng.random() < 0.7:
        return list(PRESETS.values())[int(rng.integers(len(PRESETS)))]
    return CostModel(a=10.0 ** rng.uniform(-6, -3), b=10.0 ** rng.uniform(-10, -6), c0=10.0 ** rng.uniform(-5, -1))


def check(case: int) -> None:
    rng = np.random.default_rng(case)
    layout, cost, mode = random_layout(rng), random_cost(rng), MODES[int(rng.integers(len(MODES)))]
    # A sequence must fit on layout.cp as well, so that dp_balanced can be compared with.
    seqlens = random_seqlens(rng, pack_token_cap(layout, layout.cp))
    limits = {
        "equal_count": bool(rng.random() < 0.3),
        "microbatches_multiple": int(rng.choice([1, 1, 2, 3])),
        "max_sequences_per_microbatch": int(rng.choice([0, 0, 0, 1, 5])),
    }
    plan = schedule(seqlens, layout, cost, mode, **limits)
    validate(plan, **{**limits, "equal_count": limits["equal_count"] or mode[0] in "lp"})
    step = simulate(plan, cost, mode).step_seconds
    base = simulate(schedule(seqlens, layout, cost, mode, "dp_balanced", **limits), cost, mode).step_seconds
    assert lower_bound(seqlens, layout, cost) * (1 - 1e-9) <= step <= base * (1 + 1e-12), f"case {case}"

    longest = max(pack_token_cap(layout, k) for k in layout.cp_sizes)
    where = int(rng.integers(0, len(seqlens) + 1))
    with pytest.raises(ScheduleError, match=f"sequence {where} has {longest + 1} tokens, the limit is {longest} "):
        schedule(np.insert(seqlens, where, longest + 1), layout, cost, mode, **limits)


@pytest.mark.parametrize("block", range(10))
def test_random_batches(block):
    for case in range(block, CASES, 10):
        check(case)
