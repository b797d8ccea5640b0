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
LARGE_RANKS = (48, 64, 96, 128, 256)
#: Sizes of a real training run for one case in so many.
LARGE = 6


def random_layout(rng: np.random.Generator, large: bool) -> ParallelLayout:
    num_ranks = int(rng.choice(LARGE_RANKS if large else RANKS))
    powers = [1 << shift for shift in range(9) if num_ranks % (1 << shift) == 0]
    sizes = tuple(sorted(set(rng.choice(powers, size=rng.integers(1, len(powers) + 1)).tolist())))
    tail = int(rng.choice([1, 16, 32, 128]))
    cap = int(rng.integers(max(tail, 2), 5000))
    cp = int(rng.choice(sizes))
    return ParallelLayout(num_ranks // cp, cp, cap, cp_sizes=sizes, tail_multiple=tail)


def random_seqlens(rng: np.random.Generator, layout: ParallelLayout, large: bool) -> np.ndarray:
    # A sequence must fit on layout.cp as well, so that dp_balanced can be compared with.
    longest = pack_token_cap(layout, layout.cp)
    most = 1500 if large else 150
    n = int(rng.integers(0, 5)) if rng.random() < 0.2 else int(rng.integers(0, most))
    kind = rng.integers(0, 7)
    if kind == 0:
        lengths = rng.integers(0, longest + 1, n)
    elif kind == 1:
        lengths = rng.lognormal(np.log(max(longest / 40, 1)), 1.5, n)
    elif kind == 2:
        lengths = np.full(n, rng.integers(0, longest + 1))
    elif kind == 3:
        lengths = np.where(rng.random(n) < 0.1, longest, longest // 50)
    elif kind == 4:
        lengths = rng.choice([0, 1, longest, longest // 2, longest // 2 + 1, longest // 3], n)
    elif kind == 5:
        # One below, at and above multiples of the pad and tail multiples.
        units = [layout.tail_multiple, *(layout.pad_multiple(k) for k in layout.cp_sizes)]
        lengths = rng.choice(units, n) * rng.integers(1, 40, n) + rng.integers(-1, 2, n)
    else:
        lengths = rng.choice(rng.integers(0, longest + 1, 4), n)
    return np.clip(lengths, 0, longest).astype(np.int64)


def random_cost(rng: np.random.Generator) -> CostModel:
    kind = rng.random()
    if kind < 0.6:
        return list(PRESETS.values())[int(rng.integers(len(PRESETS)))]
    a, b, c0 = 10.0 ** rng.uniform(-6, -3), 10.0 ** rng.uniform(-10, -6), 10.0 ** rng.uniform(-5, -1)
    if kind < 0.75:
        return CostModel(a=a, b=b, c0=c0)
    if kind < 0.8:
        return CostModel(a=a, b=0.0, c0=c0)
    return CostModel(a=a, b=b, c0=c0, window=int(rng.integers(1, 500)), layers=2, kv_bytes=1e4, node_ranks=4)


def random_keys(rng: np.random.Generator, seqlens: np.ndarray, layout: ParallelLayout, limit: int) -> dict[str, object]:
    """Now and then a few sequences that belong together and fit, and a few that must be apart, none of them both."""
    n = len(seqlens)
    if n < 2 or rng.random() < 0.8:
        return {}
    widest = layout.cp_sizes[-1]
    keys: dict[str, object] = {}
    order = rng.permutation(n)
    half = order[: n // 2]
    if rng.random() < 0.7:
        together = np.full(n, -1)
        for key, pair in enumerate(half[: len(half) // 2 * 2].reshape(-1, 2)[:20]):
            tokens = sum(layout.padded_seqlen(int(seqlens[i]), widest) for i in pair)
            if tokens <= pack_token_cap(layout, layout.cp) and limit != 1:
                together[pair] = key
        keys["together"] = together
    if rng.random() < 0.7:
        apart = np.full(n, -1)
        others = order[n // 2 :]
        apart[others] = rng.integers(-1, 5, len(others))
        keys["apart"] = apart
    return keys


def check(case: int) -> None:
    rng = np.random.default_rng(case)
    large = case % LARGE == 0
    layout, cost, mode = random_layout(rng, large), random_cost(rng), MODES[int(rng.integers(len(MODES)))]
    seqlens = random_seqlens(rng, layout, large)
    limits = {
        "equal_count": bool(rng.random() < 0.3),
        "microbatches_multiple": int(rng.choice([1, 1, 2, 3, 8])),
        "max_sequences_per_microbatch": int(rng.choice([0, 0, 0, 1, 5])),
    }
    keys = random_keys(rng, seqlens, layout, limits["max_sequences_per_microbatch"])
    plan = schedule(seqlens, layout, cost, mode, **limits, **keys)
    validate(plan, **{**limits, **keys, "equal_count": limits["equal_count"] or mode[0] in "lp"})
    step = simulate(plan, cost, mode).step_seconds
    assert step >= lower_bound(seqlens, layout, cost) * (1 - 1e-9), f"case {case}"
    if not keys:
        # With keys sequences are moved after the best plan has been chosen.
        base = simulate(schedule(seqlens, layout, cost, mode, "dp_balanced", **limits), cost, mode).step_seconds
        assert step <= base * (1 + 1e-12), f"case {case}"

    longest = max(pack_token_cap(layout, k) for k in layout.cp_sizes)
    where = int(rng.integers(0, len(seqlens) + 1))
    with pytest.raises(ScheduleError, match=f"sequence {where} has {longest + 1} tokens, the limit is {longest} "):
        schedule(np.insert(seqlens, where, longest + 1), layout, cost, mode, **limits)


@pytest.mark.parametrize("block", range(10))
def test_random_batches(block):
    for case in range(block, CASES, 10):
        check(case)
