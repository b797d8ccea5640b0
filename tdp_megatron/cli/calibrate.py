"""``tdp calibrate``: the cost model of a transformer block, measured on this machine's device."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np

import tdp_megatron
from tdp_megatron.cli.output import check_outputs, write_file
from tdp_megatron.errors import FormatError, TdpError
from tdp_megatron.schedule import CostModel, fit_cost

__all__ = ["add_arguments", "read_measurements", "run"]

_COLUMNS = ("tokens_per_rank", "squares", "cp_size", "seconds")
#: Of the median; the fit is of little use beyond it.
_LARGE_ERROR = 0.2
_SMOKE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "ffn_hidden_size": 128,
    "num_layers": 2,
    "max_tokens": 512,
    "min_seqlen": 64,
    "repeats": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp calibrate``."""
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON file for `tdp simulate --cost-file`")
    parser.add_argument(
        "--measurements", metavar="CSV", help=f"fit these instead of measuring; columns {', '.join(_COLUMNS)}"
    )
    block = parser.add_argument_group("block to measure: what one tensor-parallel rank has")
    block.add_argument("--hidden-size", type=int, default=4096, metavar="N", help="(4096)")
    block.add_argument("--num-attention-heads", type=int, default=32, metavar="N", help="(32)")
    block.add_argument("--num-query-groups", type=int, metavar="N", help="heads of K and V (as many as of Q)")
    block.add_argument("--kv-channels", type=int, metavar="N", help="head dimension (hidden size / heads)")
    block.add_argument("--ffn-hidden-size", type=int, metavar="N", help="of the gated MLP (3.5 * hidden size)")
    block.add_argument("--num-layers", type=int, default=32, metavar="N", help="one is measured and multiplied (32)")
    grid = parser.add_argument_group("grid of microbatches")
    grid.add_argument("--max-tokens", type=int, default=32_768, metavar="N", help="of one microbatch (32768)")
    grid.add_argument("--min-seqlen", type=int, default=512, metavar="N", help="shortest sequences (512)")
    grid.add_argument("--repeats", type=int, default=5, metavar="N", help="of each; the median counts (5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(cuda if there is one)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(bfloat16 on cuda, float32 on cpu)")
    parser.add_argument("--smoke", action="store_true", help="a tiny block and grid, to see that it runs")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp calibrate``."""
    check_outputs(args.output)
    if args.measurements is not None:
        if args.smoke:
            raise ValueError("--measurements and --smoke exclude each other: nothing is measured with the former")
        measured = read_measurements(args.measurements)
        try:
            cost = fit_cost(*measured.T)
        except ValueError as error:
            raise FormatError(f"{args.measurements}: {error}") from None
        notes: dict[str, Any] = {"measurements": args.measurements}
        print(
            "tdp: note: measurements say nothing of the exchange of K and V: layers and kv_bytes are 0 in the file and "
            "context parallelism costs no communication until you fill them in",
            file=sys.stderr,
        )
    else:
        if args.smoke:
            vars(args).update(_SMOKE)
        measured, cost, notes = _measure(args)
    predicted = cost.c0 + cost.a * measured[:, 0] + cost.b * measured[:, 1] / measured[:, 2]
    errors = np.abs(predicted / measured[:, 3] - 1.0)
    notes.update(
        made_by=f"tdp calibrate {tdp_megatron.__version__}",
        microbatches=len(measured),
        median_error=float(np.median(errors)),
        largest_error=float(errors.max()),
    )
    _print(measured, predicted, cost)
    if notes["median_error"] > _LARGE_ERROR:
        print(
            f"tdp: warning: half of the measurements are more than {notes['median_error']:.0%} off the fit: the device "
            "was busy, or the microbatches are too small to fill it; raise --max-tokens or --repeats",
            file=sys.stderr,
        )
    write_file(args.output, cost.to_json(notes).encode())
    print(f"wrote {args.output}; use it with `tdp simulate --cost-file {args.output}` or CostModel.from_json")
    return 0


def _measure(args: argparse.Namespace) -> tuple[np.ndarray[Any, np.dtype[np.float64]], CostModel, dict[str, Any]]:
    # torch is loaded by the command that needs it, and not for --help or --measurements.
    from tdp_megatron.cli.block import Block, BlockShape, device_name

    for name in ("num_layers", "max_tokens", "min_seqlen", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.min_seqlen * 4 > args.max_tokens:
        raise ValueError(
            f"--min-seqlen {args.min_seqlen} and --max-tokens {args.max_tokens} leave no grid; tokens must be at least "
            "4 times the shortest sequence"
        )
    shape = BlockShape.of(
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
    )
    block = Block.on(shape, args.device, args.dtype)
    rows = []
    for seqlen, count in grid(args.max_tokens, args.min_seqlen):
        try:
            seconds = statistics.median(block.seconds(seqlen, count, args.repeats))
        except RuntimeError as error:
            if "memory" not in str(error).lower():
                raise
            raise TdpError(f"{count} x {seqlen} tokens do not fit into memory; lower --max-tokens: {error}") from error
        rows.append((seqlen * count, count * float(seqlen) ** 2, 1.0, seconds * args.num_layers))
    measured = np.array(rows, dtype=np.float64)
    try:
        fitted = fit_cost(*measured.T)
    except ValueError as error:
        raise TdpError(f"the measurements give no cost model: {error}; raise --max-tokens") from None
    cost = replace(fitted, layers=args.num_layers, kv_bytes=float(block.kv_bytes))
    return measured, cost, {"device": device_name(block.device), "dtype": block.dtype_name, "block": shape.describe()}


def grid(max_tokens: int, min_seqlen: int) -> list[tuple[int, int]]:
    """(seqlen, count) of the microbatches to time: full, half and quarter ones, of short to long sequences."""
    made = []
    for tokens in (max_tokens // 4, max_tokens // 2, max_tokens):
        seqlen = min_seqlen
        while seqlen < tokens:
            made.append((seqlen, tokens // seqlen))
            seqlen *= 4
        made.append((tokens, 1))
    return made


def _print(measured: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any], cost: CostModel) -> None:
    print("tokens per rank   tokens^2 / cp   measured ms     fitted ms    off")
    for (tokens, squares, cp_size, seconds), fitted in zip(measured.tolist(), predicted.tolist(), strict=True):
        off = fitted / seconds - 1.0
        print(f"{tokens:15,.0f} {squares / cp_size:15.3e} {seconds * 1e3:13.3f} {fitted * 1e3:13.3f} {off:+6.1%}")
    print(f"a = {cost.a:.4e} s per token, b = {cost.b:.4e} s per token^2, c0 = {cost.c0:.4e} s per microbatch")
    if cost.a > 0 and cost.b > 0:
        print(f"attention outweighs the rest above {cost.a / cost.b:,.0f} tokens")


def read_measurements(path: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [n, 4] of a CSV file: tokens per rank, squares, CP size, seconds.

    Raises:
        FormatError: a column is missing, or a cell is no number.
    """
    rows = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True, strict=True)
        try:
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise FormatError(f"{path}: no column {missing[0]!r} in its first line; it needs {', '.join(_COLUMNS)}")
            for row in reader:
                try:
                    rows.append([float(row[name]) for name in _COLUMNS])
                except (TypeError, ValueError):
                    cells = ", ".join(str(row[name]) for name in _COLUMNS)
                    raise FormatError(f"{path}: line {reader.line_num}: not four numbers: {cells}") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: line {reader.line_num + 1}: not CSV: {error}") from None
    return np.array(rows, dtype=np.float64).reshape(-1, len(_COLUMNS))
