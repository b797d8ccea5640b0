"""Step time over its lower bound, simulated, for our schedulers beside Megatron's in the same run; no GPU needed.

    python benchmarks/schedule.py                    # the grid of the docs up to 128 ranks, a few minutes
    python benchmarks/schedule.py --ranks 512,1024 --seeds 1
    python benchmarks/schedule.py --json out/schedule.json

Megatron's schedulers are priced as they run there: sequences are padded before they are scheduled, to a multiple of
2 * CP * SP when CP is static and of 2 * DP * CP * SP when it is dynamic. The lower bound is that of the real lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import tdp_megatron
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, Plan, lower_bound, preset, schedule, simulate, validate
from tdp_megatron.schedule.distributions import DISTRIBUTIONS, global_batch_seqlens
from tdp_megatron.types import ParallelLayout

CAP, STATIC_CP, MICROBATCHES_PER_RANK = 16_384, 8, 4
PRESETS = {"8b": "llama-8b", "70b": "llama-70b", "1.7b": "qwen-1.7b"}
SP = {"8b": 1, "70b": 8, "1.7b": 1}
COLUMNS = ("dp_balanced", "default_dynamic_cp", "lpt", "auto")
#: Targets by mode: step over lower bound, and from 128 ranks up how much faster than dp_balanced.
TARGETS = {"free": (1.02, 1.29), "lockstep": (1.12, None), "pipeline(4)": (None, 1.3)}
RANKS_FOR_SPEED = 128


def layouts(model: str, ranks: int) -> tuple[ParallelLayout, ParallelLayout]:
    """Static CP, and every power of two."""
    sizes = tuple(1 << shift for shift in range(ranks.bit_length()) if ranks % (1 << shift) == 0)
    dp = ranks // STATIC_CP
    static = ParallelLayout(dp, STATIC_CP, CAP, sp=SP[model])
    return static, ParallelLayout(dp, STATIC_CP, CAP, cp_sizes=sizes, sp=SP[model])


def plan_of(column: str, seqlens: np.ndarray, model: str, ranks: int, cost: CostModel, mode: str) -> Plan:
    """The plan of one column of the table."""
    static, dynamic = layouts(model, ranks)
    if column == "dp_balanced":
        unit = 2 * STATIC_CP * SP[model]
        padded = np.minimum(-(-seqlens // unit) * unit, CAP * STATIC_CP)
        return schedule(padded, static, cost, mode, column)
    if column == "default_dynamic_cp":
        return schedule(seqlens, dynamic, cost, mode, column, pad="before")
    return schedule(seqlens, static if column == "lpt" else dynamic, cost, mode, column)


def measure(mode: str, model: str, ranks: int, data: str, seeds: int) -> dict[str, Any]:
    """One row: step over lower bound by column, mean of the seeds."""
    cost = preset(PRESETS[model])
    ratios: dict[str, list[float]] = {column: [] for column in COLUMNS}
    plan_seconds, padding, chosen, sequences = [], [], [], []
    for seed in range(seeds):
        seqlens = global_batch_seqlens(data, ranks * CAP * MICROBATCHES_PER_RANK, seed=seed)
        sequences.append(len(seqlens))
        bound = lower_bound(seqlens, layouts(model, ranks)[1], cost)
        for column in COLUMNS:
            started = time.perf_counter()
            try:
                plan = plan_of(column, seqlens, model, ranks, cost, mode)
            except ScheduleError:
                continue
            seconds = time.perf_counter() - started
            validate(plan, equal_count=mode != "free")
            result = simulate(plan, cost, mode)
            ratios[column].append(result.step_seconds / bound)
            if column == "auto":
                plan_seconds.append(seconds)
                padding.append(result.padding)
                chosen.append(plan.algorithm)
    row: dict[str, Any] = {"mode": mode, "model": model, "ranks": ranks, "data": data, "sequences": sequences[0]}
    row.update({column: statistics.mean(values) if values else None for column, values in ratios.items()})
    row["faster"] = statistics.mean(b / a for b, a in zip(ratios["dp_balanced"], ratios["auto"], strict=True))
    row["padding"] = max(padding)
    row["plan_ms"] = 1e3 * min(plan_seconds)
    row["chosen"] = "/".join(sorted(set(chosen)))
    return row


def missed_targets(rows: list[dict[str, Any]]) -> list[str]:
    """What lies outside ``TARGETS``."""
    missed = []
    for row in rows:
        most, faster = TARGETS.get(row["mode"], (None, None))
        where = f"{row['mode']} {row['model']} {row['ranks']} ranks {row['data']}"
        if most is not None and row["auto"] > most:
            missed.append(f"{where}: {row['auto']:.3f} x lower bound, target {most}")
        if faster is not None and row["ranks"] >= RANKS_FOR_SPEED and row["faster"] < faster:
            missed.append(f"{where}: {row['faster']:.2f} x dp_balanced's speed, target {faster}")
    return missed


def machine() -> dict[str, str]:
    """What the planning times were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": name,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tdp_megatron": tdp_megatron.__version__,
    }


def write_json(path: Path, content: object) -> None:
    """Under a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def main(arguments: list[str]) -> int:
    """Run the grid, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="free,lockstep,pipeline(4)")
    parser.add_argument("--models", default="8b,70b,1.7b")
    parser.add_argument("--ranks", default="32,128")
    parser.add_argument("--data", default=",".join(sorted(DISTRIBUTIONS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(" ".join(f"{key}={value}" for key, value in machine().items()))
    print(
        f"cap {CAP} tokens, {MICROBATCHES_PER_RANK} microbatches' worth of tokens per rank, {options.seeds} seed(s)\n"
    )
    names = ("dp_balanced", "dynamic_cp", "lpt", "auto", "faster", "padding", "plan", "chosen")
    print(f"| mode | model | ranks | data | sequences | {' | '.join(names)} |")
    print("|" + "---|" * (5 + len(names)))
    rows = []
    for mode in options.modes.split(","):
        for model in options.models.split(","):
            for ranks in map(int, options.ranks.split(",")):
                for data in options.data.split(","):
                    row = measure(mode, model, ranks, data, options.seeds)
                    rows.append(row)
                    ratios = " | ".join("-" if row[c] is None else f"{row[c]:.3f}" for c in COLUMNS)
                    print(
                        f"| {mode} | {model} | {ranks} | {data} | {row['sequences']} | {ratios} "
                        f"| {row['faster']:.2f}x | {row['padding']:.2%} | {row['plan_ms']:.1f} ms | {row['chosen']} |",
                        flush=True,
                    )
    missed = missed_targets(rows)
    print(f"\n{len(rows)} rows, {len(missed)} figures outside the targets")
    print("\n".join(missed))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows, "missed": missed})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
