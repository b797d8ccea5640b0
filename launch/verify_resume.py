"""Prove from the logs of a stopped and resumed run that it consumed exactly the right samples, and sum it up.

The expected order comes from an uninterrupted walk over the blended documents on one rank, without packing,
rerouting, reading ahead or any checkpoint. Every global batch of every attempt must equal it, order included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data_graph import blended_documents
from files import write_text
from options import TrainOptions
from tdp_megatron.nodes import Loader
from tdp_megatron.types import Sample

Refs = list[tuple[int, int]]
"""Samples as (dataset_id, sample_id)."""


class ProofError(Exception):
    """The logs differ from what they must be."""


@dataclass(frozen=True)
class Attempt:
    """One start of the training script."""

    name: str
    options: TrainOptions
    start_step: int
    batches: dict[int, Refs]
    """Global batch of each optimizer step, put together from the logs of all ranks."""
    metrics: list[dict[str, Any]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def join_ranks(lines: Iterable[dict[str, Any]], options: TrainOptions) -> dict[int, Refs]:
    """The global batches that ranks logged their parts of.

    Raises:
        ProofError: Ranks that share a pack disagree about it, or a batch lacks or repeats a sample.
    """
    packs: dict[int, dict[tuple[int, int], dict[int, list[Any]]]] = {}
    for line in lines:
        if line["index"] != line["step"]:
            raise ProofError(f"optimizer step {line['step']} trained on global batch {line['index']}")
        blocks = packs.setdefault(line["step"], {})
        for batch in line["microbatches"]:
            by_rank = blocks.setdefault((batch["first_rank"], batch["cp_size"]), {})
            by_rank.setdefault(line["rank"], []).append((batch["sample_ids"], batch["refs"]))
    joined: dict[int, Refs] = {}
    for step, blocks in packs.items():
        samples: list[tuple[int, tuple[int, int]]] = []
        for (first_rank, cp_size), by_rank in blocks.items():
            members = list(range(first_rank, first_rank + cp_size))
            if sorted(by_rank) != members or any(by_rank[r] != by_rank[first_rank] for r in members):
                raise ProofError(f"step {step}: ranks {members} share packs but logged different ones")
            for sample_ids, refs in by_rank[first_rank]:
                samples += zip(sample_ids, (tuple(ref) for ref in refs), strict=True)
        samples.sort()
        ids = [sample_id for sample_id, _ in samples]
        if ids != list(range(options.global_batch_size)):
            raise ProofError(
                f"step {step}: {len(ids)} samples of which {len(set(ids))} differ, "
                f"expected each of {options.global_batch_size} once"
            )
        joined[step] = [ref for _, ref in samples]
    return joined


def without_unfinished_step(lines: list[dict[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    """The lines without those of a last step that only some ranks logged, because the others were killed in it."""
    last = dict.fromkeys(range(num_ranks), -1)
    for line in lines:
        last[line["rank"]] = max(last[line["rank"]], line["step"])
    first, end = min(last.values()), max(last.values())
    return [line for line in lines if line["step"] <= first] if end == first + 1 else lines


def read_attempt(folder: Path, *, is_last: bool) -> Attempt:
    """The logs of one attempt; only one that another follows may have been killed in the middle of a step."""
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    values = facts["options"]
    values.update(data=tuple(values["data"]), weights=tuple(values["weights"]), output=Path(values["output"]))
    # The data is checked, the rest was when the run started and may be gone.
    values.update(tokenizer=None, resume="none")
    options = TrainOptions(**values)
    num_ranks = options.dp * options.cp
    logs = sorted(folder.glob("refs-rank*.jsonl"))
    if len(logs) != num_ranks:
        raise ProofError(f"{folder.name}: {num_ranks} ranks ran but there are logs of {len(logs)}")
    lines = [line for log in logs for line in read_lines(log)]
    return Attempt(
        folder.name,
        options,
        facts["start_step"],
        join_ranks(lines if is_last else without_unfinished_step(lines, num_ranks), options),
        read_lines(folder / "metrics.jsonl"),
    )


def uninterrupted_walk(options: TrainOptions, num_batches: int) -> list[Refs]:
    """The first global batches, from one pass over the samples in their global order."""
    loader: Loader[Sample] = Loader(blended_documents(options))
    samples = iter(loader)
    size = options.global_batch_size
    return [[sample.ref for sample in islice(samples, size)] for _ in range(num_batches)]


def data_settings(options: TrainOptions) -> tuple[Any, ...]:
    """What decides the global order of samples."""
    return options.data, options.weights, options.global_batch_size, options.max_seqlen, options.seed


def prove(attempts: Sequence[Attempt]) -> list[Refs]:
    """Check all attempts.

    Returns:
        The global batches that training consists of, in order.

    Raises:
        ProofError: Training was not resumed, or a batch is not the expected one.
    """
    if len(attempts) < 2:
        raise ProofError(f"found {len(attempts)} attempts; there must be a first run and a resumed one")
    if any(data_settings(a.options) != data_settings(attempts[0].options) for a in attempts):
        raise ProofError("the attempts used different data, weights, batch sizes, lengths or seeds")
    end = max(max(a.batches, default=-1) for a in attempts) + 1
    expected = uninterrupted_walk(attempts[0].options, end)
    for attempt in attempts:
        for step, batch in sorted(attempt.batches.items()):
            if batch != expected[step]:
                at = next(i for i, (got, want) in enumerate(zip(batch, expected[step], strict=True)) if got != want)
                raise ProofError(
                    f"{attempt.name}, step {step}: sample {at} of the global batch is {batch[at]}, "
                    f"the uninterrupted walk has {expected[step][at]}"
                )
    history: list[Refs] = []
    for number, attempt in enumerate(attempts):
        last = number == len(attempts) - 1
        stop = end if last else attempts[number + 1].start_step
        if len(history) != attempt.start_step:
            raise ProofError(
                f"{attempt.name} starts at step {attempt.start_step}, the one before ended at {len(history)}"
            )
        for step in range(attempt.start_step, stop):
            if step not in attempt.batches:
                raise ProofError(f"{attempt.name} lacks step {step}, the next attempt starts at {stop}")
            history.append(attempt.batches[step])
    return history


def averages(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Figures over some steps; time-like ones are weighted by time."""
    seconds = sum(m["seconds"] for m in metrics)
    return {
        "loss_first": metrics[0]["loss"],
        "loss_last": metrics[-1]["loss"],
        "tokens_per_s": sum(m["tokens"] for m in metrics) / seconds,
        "data_wait_share": sum(m["data_wait_s"] for m in metrics) / seconds,
        "imbalance": sum(m["imbalance"] for m in metrics) / len(metrics),
        "padding": sum(m["padding"] for m in metrics) / len(metrics),
    }


def summarise(attempts: Sequence[Attempt], history: Sequence[Refs], problem: str) -> dict[str, Any]:
    """Content of ``summary.json``."""
    metrics = [m for a in attempts for m in a.metrics]
    losses = [m["loss"] for m in metrics]
    # One batch is noisy, so the means over some at both ends decide whether training works.
    ends = max(1, min(5, len(losses) // 2))
    samples = [ref for batch in history for ref in batch]
    return {
        **averages(metrics),
        "loss_fell": sum(losses[-ends:]) < sum(losses[:ends]),
        "resumed_exactly": not problem,
        "problem": problem,
        "steps": len(history),
        "samples": len(samples),
        "distinct_samples": len(set(samples)),
        "runs": [
            {
                "dp": a.options.dp,
                "cp": a.options.cp,
                "first_step": a.start_step + 1,
                "last_step": a.start_step + len(a.metrics),
                **averages(a.metrics),
            }
            for a in attempts
            if a.metrics
        ],
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
    }


def print_table(summary: dict[str, Any]) -> None:
    """The summary for people."""
    table = Table(title="Quickstart")
    table.add_column("")
    for run in summary["runs"]:
        ranks = run["dp"] * run["cp"]
        layout = f"{ranks} rank{'s' * (ranks > 1)}, DP {run['dp']} x CP {run['cp']}"
        table.add_column(f"{layout}\nsteps {run['first_step']}-{run['last_step']}", justify="right")
    rows = {
        "loss, first step": ("loss_first", "{:.3f}"),
        "loss, last step": ("loss_last", "{:.3f}"),
        "tokens/s": ("tokens_per_s", "{:,.0f}"),
        "time waiting for data": ("data_wait_share", "{:.2%}"),
        "imbalance (max/mean work)": ("imbalance", "{:.3f}"),
        "padding": ("padding", "{:.2%}"),
    }
    for label, (name, form) in rows.items():
        table.add_row(label, *(form.format(run[name]) for run in summary["runs"]))
    console = Console(soft_wrap=True)
    console.print(table)
    if summary["resumed_exactly"]:
        again = summary["samples"] - summary["distinct_samples"]
        repeats = f"{again} came again in a further epoch, as they should" if again else "none lost or repeated"
        console.print(
            f"Resumed exactly: all {summary['steps']} global batches equal an uninterrupted walk, order included "
            f"({summary['samples']} samples, {repeats})."
        )
    else:
        console.print(f"NOT resumed exactly: {summary['problem']}")
    fell = "fell" if summary["loss_fell"] else "DID NOT FALL"
    console.print(f"Loss {fell}: {summary['loss_first']:.3f} to {summary['loss_last']:.3f}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove, print the table, write the summary.

    Returns:
        0 when the resume is exact and the loss fell, 1 otherwise.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="output folder of train_gpt.py")
    parser.add_argument("--summary", type=Path, required=True, help="JSON file to write")
    paths = parser.parse_args(arguments)
    history: list[Refs] = []
    problem = ""
    try:
        folders = sorted(paths.run.glob("attempt-*"))
        attempts = [read_attempt(folder, is_last=folder == folders[-1]) for folder in folders]
    except (OSError, ProofError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        history = prove(attempts)
    except ProofError as error:
        problem = str(error)
    if not any(a.metrics for a in attempts):
        print(f"error: {problem or 'no step was trained'}", file=sys.stderr)
        return 1
    summary = summarise(attempts, history, problem)
    print_table(summary)
    try:
        write_text(paths.summary, json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written to {paths.summary}")
    return 0 if summary["resumed_exactly"] and summary["loss_fell"] else 1


if __name__ == "__main__":
    sys.exit(main())
