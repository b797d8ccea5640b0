"""Step time over its lower bound, simulated, for our schedulers beside Megatron's in the same run; no GPU needed.

    python benchmarks/schedule.py                    # the grid of the docs up to 128 ranks, a few minutes
    python benchmarks/schedule.py --ranks 512,1024 --seeds 1 --json out/large.json
    python benchmarks/schedule.py --planning --json out/planning.json
    python benchmarks/schedule_tables.py out/*.json  # tables in Markdown

Megatron's schedulers are priced as they run there: sequences are padded before they are scheduled, to a multiple of
2 * CP * SP when CP is static and of 2 * DP * CP * SP when it is dynamic, and hybrid CP waits after each of its groups.
The lower bound is that of the real lengths, for every mode; in lockstep ``reach`` is the auto plan over the tighter
``lockstep_bound``, which counts that the longest sequence keeps all ranks in its wave.
"""

from __future__ import annotations

import argparse
import itertools
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
from tdp_megatron.schedule import preset, schedule
from tdp_megatron.schedule.bounds import lockstep_bound
from tdp_megatron.schedule.compare import compare
from tdp_megatron.schedule.distributions import DISTRIBUTIONS, global_batch_seqlens
from tdp_megatron.types import ParallelLayout

CAP, STATIC_CP, MICROBATCHES_PER_RANK = 16_384, 8, 4
PRESETS = {"8b": "llama-8b", "70b": "llama-70b", "1.7b": "qwen-1.7b"}
SP = {"8b": 1, "70b": 8, "1.7b": 1}
COLUMNS = ("dp_balanced", "balanced_hybrid_cp", "default_dynamic_cp", "lpt", "auto")
#: Targets by mode: step over lower bound, and from 128 ranks up how much faster than dp_balanced.
TARGETS = {"free": (1.02, 1.29), "lockstep": (1.12, None), "pipeline(4)": (None, 1.3)}
#: No target was set for fewer ranks.
RANKS_FOR_SPEED, RANKS_FOR_RATIO = 128, 32
MOST_PADDING = 0.005
#: Ranks, sequences and most milliseconds.
PLANNING = ((64, 4096, 5.0), (1024, 65_536, 100.0))
PLANNING_REPEATS = 7


def layout_of(model: str, ranks: int) -> ParallelLayout:
    """CP 8 for the static algorithms, every power of two for the others."""
    sizes = tuple(1 << shift for shift in range(ranks.bit_length()) if ranks % (1 << shift) == 0)
    return ParallelLayout(ranks // STATIC_CP, STATIC_CP, CAP, cp_sizes=sizes, sp=SP[model])


def measure(mode: str, model: str, ranks: int, data: str, seeds: int) -> dict[str, Any]:
    """One row: step over lower bound by column, mean of the seeds."""
    cost, layout = preset(PRESETS[model]), layout_of(model, ranks)
    ratios: dict[str, list[float]] = {column: [] for column in COLUMNS}
    plan_seconds, padding, chosen, sequences, reach = [], [], [], [], []
    for seed in range(seeds):
        seqlens = global_batch_seqlens(data, ranks * CAP * MICROBATCHES_PER_RANK, seed=seed)
        sequences.append(len(seqlens))
        # Hybrid CP gives ranks different numbers of microbatches: neither lockstep nor a pipeline can run it.
        columns = [c for c in COLUMNS if mode == "free" or c != "balanced_hybrid_cp"]
        for result in compare(seqlens, layout, cost, mode, columns):
            if result.simulation is None:
                continue
            ratios[result.algorithm].append(result.simulation.ratio)
            if result.algorithm == "auto":
                plan_seconds.append(result.plan_seconds)
                padding.append(result.simulation.padding)
                chosen.append(result.simulation.plan.algorithm)
                if mode == "lockstep":
                    reach.append(result.simulation.step_seconds / lockstep_bound(seqlens, layout, cost))
    row: dict[str, Any] = {"mode": mode, "model": model, "ranks": ranks, "data": data, "sequences": sequences[0]}
    row.update({column: statistics.mean(values) if values else None for column, values in ratios.items()})
    row["seeds"] = seeds
    row["faster"] = statistics.mean(b / a for b, a in zip(ratios["dp_balanced"], ratios["auto"], strict=True))
    row["reach"] = statistics.mean(reach) if reach else None
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
        if most is not None and row["ranks"] >= RANKS_FOR_RATIO and row["auto"] > most:
            reach = f", {row['reach']:.3f} x what lockstep allows" if row["reach"] else ""
            missed.append(f"{where}: {row['auto']:.3f} x lower bound, target {most}{reach}")
        if row["ranks"] >= RANKS_FOR_RATIO and row["padding"] > MOST_PADDING:
            missed.append(f"{where}: {row['padding']:.2%} padding, target {MOST_PADDING:.1%}")
        if faster is not None and row["ranks"] >= RANKS_FOR_SPEED and row["faster"] < faster:
            missed.append(f"{where}: {row['faster']:.2f} x dp_balanced's speed, target {faster}")
    return missed


def planning_times() -> list[dict[str, Any]]:
    """How long ``schedule`` takes on one core, best of some runs, each with other lengths in the same numbers."""
    rows = []
    for ranks, count, target_ms in PLANNING:
        for mode in TARGETS:
            for algorithm in ("auto", "buddy" if mode == "free" else "waves"):
                best, worst = float("inf"), 0.0
                for model, data in itertools.product(PRESETS, sorted(DISTRIBUTIONS)):
                    cost, layout = preset(PRESETS[model]), layout_of(model, ranks)
                    seqlens = DISTRIBUTIONS[data].draw(np.random.default_rng(0), count, 131_072)
                    times = []
                    for _ in range(PLANNING_REPEATS):
                        # Of this process alone, so that a busy machine does not count.
                        started = time.process_time()
                        schedule(seqlens, layout, cost, mode, algorithm)
                        times.append(time.process_time() - started)
                    best, worst = min(best, min(times)), max(worst, min(times))
                rows.append(
                    {
                        "ranks": ranks,
                        "sequences": count,
                        "mode": mode,
                        "algorithm": algorithm,
                        "fastest_ms": 1e3 * best,
                        "slowest_ms": 1e3 * worst,
                        "target_ms": target_ms,
                    }
                )
                print(
                    f"{ranks} ranks, {count} sequences, {mode}, {algorithm}: {1e3 * best:.1f} to {1e3 * worst:.1f} ms "
                    f"by model and distribution, target {target_ms:g}",
                    flush=True,
                )
    return rows


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
    parser.add_argument("--planning", action="store_true", help="planning times instead of the grid")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one small case: does it run at all?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.models, options.ranks, options.data, options.seeds = "8b", "8", "sft_chat", 1
    print(" ".join(f"{key}={value}" for key, value in machine().items()))
    command = "python benchmarks/schedule.py " + " ".join(
        word for word in arguments if word != "--json" and word != str(options.json)
    )
    content: dict[str, Any] = {"machine": machine(), "command": command.rstrip()}
    if options.planning:
        content["planning"] = planning_times()
    else:
        rows = run_grid(options)
        missed = missed_targets(rows)
        print(f"\n{len(rows)} rows, {len(missed)} figures outside the targets")
        print("\n".join(missed))
        content.update(rows=rows, missed=missed)
    if options.json:
        write_json(options.json, content)
    return 0


def run_grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, each printed when it is done."""
    print(
        f"cap {CAP} tokens, {MICROBATCHES_PER_RANK} microbatches' worth of tokens per rank, {options.seeds} seed(s)\n"
    )
    names = ("dp_balanced", "hybrid_cp", "dynamic_cp", "lpt", "auto", "faster", "reach", "padding", "plan", "chosen")
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
                    reach = "-" if row["reach"] is None else f"{row['reach']:.3f}"
                    print(
                        f"| {mode} | {model} | {ranks} | {data} | {row['sequences']} | {ratios} | {row['faster']:.2f}x "
                        f"| {reach} | {row['padding']:.2%} | {row['plan_ms']:.1f} ms | {row['chosen']} |",
                        flush=True,
                    )
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
