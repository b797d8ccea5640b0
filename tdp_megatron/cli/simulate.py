"""``tdp simulate``: what each scheduling algorithm would make of a global batch, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tdp_megatron.cli.output import check_outputs, write_file
from tdp_megatron.cli.progress_bar import ProgressBar
from tdp_megatron.cli.seqlens import draw_global_batch
from tdp_megatron.cli.simulate_arguments import add_arguments, algorithms_of, cost_of, layout_of
from tdp_megatron.cli.timeline import Timeline, chrome_trace
from tdp_megatron.cli.timeline_html import page
from tdp_megatron.cli.timeline_png import png
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule import CostModel, Limits, Mode, Simulation, lower_bound
from tdp_megatron.schedule.bounds import lockstep_bound
from tdp_megatron.schedule.compare import Compared, compare
from tdp_megatron.schedule.problem import pack_token_cap
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["add_arguments", "run"]

_MICROBATCHES_PER_RANK = 4
_DRAWN = ("dp_balanced", "auto")
#: Below this the choice of the algorithm does not matter.
_NOTHING_TO_GAIN = 1.02
_HEADER = (
    "algorithm",
    "step ms",
    "step / LB",
    "vs dp_balanced",
    "max/mean",
    "idle",
    "padding",
    "CP GB",
    "microbatches",
    "plan ms",
)
_WIDTH_WITHOUT_TERMINAL = 160
#: Beyond these a simulation takes minutes.
_MOST_RANKS = 1 << 16
_MOST_SEQUENCES = 1_000_000
_MOST_TOKENS = 1 << 32


def run(args: argparse.Namespace) -> int:
    """Run ``tdp simulate``; 1 if no algorithm has a plan."""
    layout = layout_of(args)
    cost_name, cost = cost_of(args)
    mode = Mode.parse(args.mode)
    for name in ("global_batch_size", "max_seqlen"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    names = algorithms_of(args.algorithms, mode)
    check_outputs(args.trace, args.png, args.html)
    _check_size(args, layout)
    fits = max(pack_token_cap(layout, k) for k in layout.cp_sizes)
    seqlens, cut = draw_global_batch(
        args.lengths,
        num_sequences=args.global_batch_size,
        num_tokens=layout.num_ranks * layout.tokens_per_rank_limit * _MICROBATCHES_PER_RANK,
        longest=args.max_seqlen,
        fits=fits,
        seed=args.seed,
        column=args.column,
    )
    limits = Limits(microbatches_multiple=args.microbatches_multiple, max_sequences_per_microbatch=args.max_sequences)
    results: list[Compared] = []
    with ProgressBar("algorithms") as bar:
        for name in names:
            bar(len(results), len(names))
            results += compare(seqlens, layout, cost, mode, [name], **asdict(limits))
    drawn = _drawn(args.draw, results, wanted=bool(args.trace or args.png or args.html))
    summary = _summary(args.lengths, seqlens, cut, layout, cost_name, cost, mode)
    title = f"{args.lengths}: dp {layout.dp} x cp {layout.cp}, {args.mode}, {cost_name}"
    written = _write(args, title, summary, results, drawn)
    if args.json:
        print(json.dumps(_facts(args, seqlens, cut, layout, cost_name, cost, results), allow_nan=False))
    else:
        _print(title, summary, results, written)
    return 0 if any(result.simulation is not None for result in results) else 1


def _check_size(args: argparse.Namespace, layout: ParallelLayout) -> None:
    """Refuse what would take longer than anybody waits.

    Raises:
        ValueError: too many ranks or sequences.
    """
    if layout.num_ranks > _MOST_RANKS:
        raise ValueError(f"dp x cp is {layout.num_ranks} ranks, {_MOST_RANKS} can be simulated; lower --dp or --cp")
    if args.global_batch_size is not None and args.global_batch_size > _MOST_SEQUENCES:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is more than the {_MOST_SEQUENCES} sequences that are "
            "simulated at most; lower it"
        )
    tokens = layout.num_ranks * layout.tokens_per_rank_limit * _MICROBATCHES_PER_RANK
    if args.global_batch_size is None and tokens > _MOST_TOKENS:
        raise ValueError(
            f"{layout.num_ranks} ranks of {layout.tokens_per_rank_limit} tokens make a global batch of {tokens} tokens "
            f"by default, at most {_MOST_TOKENS} are drawn; give --global-batch-size, or lower --dp, --cp or "
            "--max-seqlen-per-rank"
        )


def _drawn(text: str | None, results: Sequence[Compared], wanted: bool) -> list[tuple[str, Simulation]]:
    """What goes into trace and pictures."""
    by_name = {result.algorithm: result for result in results}
    if text is None:
        chosen = [name for name in _DRAWN if name in by_name and by_name[name].simulation] or list(by_name)
    else:
        chosen = list(dict.fromkeys(item.strip() for item in text.split(",")))
        for name in chosen:
            if name not in by_name:
                raise ValueError(f"--draw {name}: it is not among the algorithms compared: {', '.join(by_name)}")
    made = [(name, simulation) for name in chosen if (simulation := by_name[name].simulation) is not None]
    if wanted and not made:
        raise ScheduleError(f"nothing to draw: {by_name[chosen[0]].reason}")
    return made


def _summary(
    source: str,
    seqlens: Int64Array,
    cut: int,
    layout: ParallelLayout,
    cost_name: str,
    cost: CostModel,
    mode: Mode,
) -> list[str]:
    shares = np.percentile(seqlens, (50, 90, 99)).tolist() if len(seqlens) else [0.0] * 3
    batch = (
        f"Global batch: {len(seqlens):,} sequences of {source}, {int(seqlens.sum()):,} tokens; median "
        f"{shares[0]:,.0f}, p90 {shares[1]:,.0f}, p99 {shares[2]:,.0f}, longest {int(seqlens.max(initial=0)):,}"
    )
    if cut:
        batch += f"; {cut:,} cut"
    ranks = (
        f"{layout.num_ranks} ranks, {layout.tokens_per_rank_limit:,} tokens per rank and microbatch, static CP "
        f"{layout.cp}, dynamic CP {', '.join(map(str, layout.cp_sizes))}; cost model {cost_name}"
    )
    bound = lower_bound(seqlens, layout, cost)
    bounds = f"Lower bound (LB): {bound * 1e3:,.1f} ms"
    if mode.name == "lockstep":
        tighter = lockstep_bound(seqlens, layout, cost)
        bounds += f"; with ranks in lockstep no plan is below {tighter / bound:.3f} LB"
    return [batch + ".", ranks + ".", bounds + "."]


def _cells(results: Sequence[Compared]) -> list[tuple[str, ...]]:
    """A row of figures for each result, or its name and the reason why it has none."""
    base = next((r.simulation for r in results if r.algorithm == "dp_balanced"), None)
    rows: list[tuple[str, ...]] = []
    for result in results:
        simulation = result.simulation
        if simulation is None:
            rows.append((result.algorithm, result.reason))
            continue
        chosen = simulation.plan.algorithm
        counts = simulation.plan.num_microbatches_per_rank
        least, most = int(counts.min()), int(counts.max())
        rows.append(
            (
                result.algorithm if chosen == result.algorithm else f"{result.algorithm} ({chosen})",
                f"{simulation.step_seconds * 1e3:,.1f}",
                f"{simulation.ratio:.3f}",
                f"{base.step_seconds / simulation.step_seconds:.2f}x" if base and simulation.step_seconds else "-",
                f"{simulation.imbalance:.3f}",
                f"{_idle_share(simulation):.1%}",
                f"{simulation.padding:.2%}",
                f"{result.cp_bytes / 1e9:,.1f}",
                str(most) if least == most else f"{least} to {most}",
                f"{result.plan_seconds * 1e3:,.1f}",
            )
        )
    return rows


def _idle_share(simulation: Simulation) -> float:
    whole = simulation.step_seconds * simulation.plan.layout.num_ranks
    return float(simulation.idle.sum()) / whole if whole > 0 else 0.0


def _best(results: Sequence[Compared]) -> int | None:
    """Number of the result with the shortest step; the last of equal ones, which is ``auto``."""
    steps = [(r.simulation.step_seconds, -i) for i, r in enumerate(results) if r.simulation is not None]
    return -min(steps)[1] if steps else None


def _advice(results: Sequence[Compared]) -> list[str]:
    steps = {r.algorithm: r.simulation.step_seconds for r in results if r.simulation is not None}
    if "dp_balanced" in steps and steps["dp_balanced"] <= min(steps.values()) * _NOTHING_TO_GAIN:
        return ["Nothing to gain here: dp_balanced is within 2 % of the best."]
    return []


def _write(
    args: argparse.Namespace,
    title: str,
    summary: list[str],
    results: Sequence[Compared],
    drawn: Sequence[tuple[str, Simulation]],
) -> list[str]:
    timelines = [Timeline.of(name, simulation) for name, simulation in drawn] if args.png or args.html else []
    written = []
    if args.trace:
        write_file(args.trace, json.dumps(chrome_trace(drawn)).encode())
        written.append(args.trace)
    if args.png:
        write_file(args.png, png(title, timelines))
        written.append(args.png)
    if args.html:
        paragraphs = [*summary, *_advice(results)]
        made = page(title, paragraphs, _HEADER, _cells(results), _best(results), timelines)
        write_file(args.html, made.encode())
        written.append(args.html)
    return written


def _print(title: str, summary: list[str], results: Sequence[Compared], written: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    for paragraph in (title, *summary):
        console.print(Text(paragraph))
    table = Table()
    for number, name in enumerate(_HEADER):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    best = _best(results)
    without: dict[str, list[str]] = {}
    for number, cells in enumerate(_cells(results)):
        if len(cells) == len(_HEADER):
            table.add_row(*map(Text, cells), style="bold green" if number == best else None)
        else:
            without.setdefault(cells[1], []).append(cells[0])
    if table.row_count:
        console.print(table)
    reasons = (f"{', '.join(names)}: {reason}" for reason, names in without.items())
    for paragraph in (*reasons, *_advice(results), *(f"wrote {path}" for path in written)):
        console.print(Text(paragraph))


def _facts(
    args: argparse.Namespace,
    seqlens: Int64Array,
    cut: int,
    layout: ParallelLayout,
    cost_name: str,
    cost: CostModel,
    results: Sequence[Compared],
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for result in results:
        row: dict[str, Any] = {"algorithm": result.algorithm, "plan_seconds": result.plan_seconds}
        simulation = result.simulation
        if simulation is None:
            rows.append({**row, "reason": result.reason})
            continue
        counts = simulation.plan.num_microbatches_per_rank
        rows.append(
            {
                **row,
                "chosen": simulation.plan.algorithm,
                "step_seconds": simulation.step_seconds,
                "ratio": simulation.ratio,
                "imbalance": simulation.imbalance,
                "idle": _idle_share(simulation),
                "padding": simulation.padding,
                "cp_bytes": result.cp_bytes,
                "microbatches": [int(counts.min()), int(counts.max())],
                "peak_tokens": simulation.peak_tokens,
                "digest": simulation.plan.digest(),
            }
        )
    return {
        "lengths": args.lengths,
        "seed": args.seed,
        "sequences": len(seqlens),
        "tokens": int(seqlens.sum()),
        "cut": cut,
        "layout": asdict(layout),
        "mode": args.mode,
        "cost": cost_name,
        "cost_model": asdict(cost),
        "lower_bound": lower_bound(seqlens, layout, cost),
        "results": rows,
    }
