"""What the user of ``train_gpt.py`` can set."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["TrainOptions", "parse_options"]

#: torch counts it in milliseconds; nobody waits for a year.
_LONGEST_DEADLINE_S = 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Options of one run, checked as far as they can be without reading the data."""

    data: tuple[str, ...]
    """Prefixes of .bin/.idx files, one per dataset."""
    weights: tuple[float, ...]
    """Share of each dataset in the blend; they need not add up to 1."""
    tokenizer: Path | None
    """The tokenizer.json the data was made with, to learn the vocabulary size."""
    vocab_size: int
    """Token ids the model knows; 0 takes it from ``tokenizer``."""
    dp: int
    """Data-parallel size."""
    cp: int
    """Context-parallel size."""
    steps: int
    """Optimizer steps when training is complete, those before a resume included."""
    exit_interval: int
    """Save and exit after a step divisible by this, before training is complete; 0 means never."""
    global_batch_size: int
    """Samples per optimizer step over all ranks."""
    max_seqlen: int
    """Tokens of the longest sample; longer documents are split."""
    max_seqlen_per_rank: int
    """Most tokens one rank holds in one microbatch."""
    algorithm: str
    """Packing algorithm."""
    reroute: str
    """``plan`` or ``exchange``."""
    prefetch: int
    """Steps read ahead."""
    seed: int
    """Seed of the model's weights and of the data order."""
    hidden_size: int
    """Channels of the model."""
    num_layers: int
    """Blocks of the model."""
    num_attention_heads: int
    """Heads of each block."""
    lr: float
    """Largest learning rate."""
    min_lr: float
    """Learning rate at the end."""
    lr_warmup_steps: int
    """Steps in which the learning rate rises."""
    weight_decay: float
    """Weight decay of the matrices."""
    clip_grad: float
    """Largest norm of the gradient; 0 means any."""
    output: Path
    """Folder of checkpoints and logs."""
    save_interval: int
    """Steps between checkpoints; 0 saves only at the end."""
    resume: str
    """``auto``, ``none`` or a path."""
    device: str
    """``auto``, ``cpu`` or ``cuda``."""
    deadline: float
    """Seconds until a collective that some rank does not reach becomes an error."""
    live: bool = False
    """Whether rank 0 shows tables of the data graph while it trains, in a terminal."""

    def __post_init__(self) -> None:
        least = {
            "dp": 1,
            "cp": 1,
            "steps": 1,
            "exit_interval": 0,
            "global_batch_size": 1,
            "max_seqlen": 1,
            "max_seqlen_per_rank": 1,
            "prefetch": 1,
            "lr_warmup_steps": 0,
            "save_interval": 0,
            "vocab_size": 0,
            "seed": 0,
            "lr": 0,
            "min_lr": 0,
            "weight_decay": 0,
            "clip_grad": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if not value >= limit:  # NaN is neither above nor below
                raise ValueError(f"--{name.replace('_', '-')} must be at least {limit}, got {value}")
            if value >= 2**63:
                raise ValueError(f"--{name.replace('_', '-')} must be below 2**63, got {value}")
        if not 0 < self.deadline <= _LONGEST_DEADLINE_S:
            raise ValueError(
                f"--deadline must be above 0 seconds and at most {_LONGEST_DEADLINE_S:,}, got {self.deadline}"
            )
        for prefix in self.data:
            for suffix in (".idx", ".bin"):
                if not Path(prefix + suffix).is_file():
                    raise FileNotFoundError(
                        f"--data {prefix}: there is no {prefix}{suffix}; give the path without .idx or .bin, "
                        "`tdp preprocess` makes both files"
                    )
        if self.tokenizer is None and not self.vocab_size:
            raise ValueError("give --tokenizer or --vocab-size: the model needs the number of token ids")
        if self.tokenizer is not None and not self.tokenizer.is_file():
            raise FileNotFoundError(f"--tokenizer {self.tokenizer}: no such file")
        if self.resume not in ("auto", "none") and not Path(self.resume).is_dir():
            raise FileNotFoundError(f"--resume {self.resume}: no such folder; or say auto or none")

    def to_json(self) -> dict[str, Any]:
        """The options with plain values."""
        values = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


class _RankZeroParser(argparse.ArgumentParser):
    """torchrun starts one process per rank; the user wants to read about a wrong option once."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _parser() -> argparse.ArgumentParser:
    parser = _RankZeroParser(
        prog="train_gpt.py",
        description="Train a small GPT from packed, rerouted documents. Start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", action="append", required=True, metavar="PREFIX", help="PREFIX.bin/.idx; repeatable")
    data.add_argument("--weights", nargs="+", type=float, default=[], help="one per --data; default: all equal")
    data.add_argument("--tokenizer", type=Path, help="tokenizer.json, to learn the vocabulary size")
    data.add_argument("--vocab-size", type=int, default=0, help="instead of --tokenizer")
    data.add_argument("--global-batch-size", type=int, default=32, help="samples per step over all ranks")
    data.add_argument("--max-seqlen", type=int, default=1024, help="longer documents are split, tokens")
    data.add_argument("--seed", type=int, default=1234, help="of weights and data order")
    data.add_argument("--prefetch", type=int, default=2, help="steps read ahead")

    layout = parser.add_argument_group("layout")
    layout.add_argument("--dp", type=int, help="data-parallel size; default: ranks / cp")
    layout.add_argument("--cp", type=int, default=1, help="context-parallel size")
    layout.add_argument("--max-seqlen-per-rank", type=int, help="tokens per rank and microbatch; default: --max-seqlen")
    layout.add_argument("--algorithm", default="lpt", help="how documents are packed and placed")
    layout.add_argument("--reroute", choices=["plan", "exchange"], default="plan", help="how samples reach their ranks")

    model = parser.add_argument_group("model and optimizer")
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--lr", type=float, default=3e-3)
    model.add_argument("--min-lr", type=float, default=3e-4)
    model.add_argument("--lr-warmup-steps", type=int, default=5)
    model.add_argument("--weight-decay", type=float, default=0.1)
    model.add_argument("--clip-grad", type=float, default=1.0)

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=100, help="steps when complete, those before a resume included")
    run.add_argument("--exit-interval", type=int, default=0, help="save and exit at a step divisible by this")
    run.add_argument("--output", type=Path, default=Path("out/train"), help="folder of checkpoints and logs")
    run.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: only at the end")
    run.add_argument("--resume", default="auto", help="auto (latest in --output, if any), none, or a checkpoint's path")
    run.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    run.add_argument("--live", action="store_true", help="keep tables of the data graph on the screen; in a terminal")
    run.add_argument("--deadline", type=float, default=120.0, help="seconds for a collective that a rank misses")
    return parser


def parse_options(arguments: Sequence[str] | None, world_size: int) -> TrainOptions:
    """Options from the command line.

    Args:
        arguments: Words of the command line; None takes ``sys.argv``.
        world_size: Ranks that torchrun started.

    Raises:
        ValueError: A value is out of range, or dp x cp is not ``world_size``.
        FileNotFoundError: A file or folder is missing.
        SystemExit: The command line does not parse (code 2), or asks for help.
    """
    values = vars(_parser().parse_args(arguments))
    cp = values["cp"]
    if values["dp"] is None:
        if cp < 1 or world_size % cp:
            raise ValueError(f"--cp {cp} does not divide the {world_size} ranks that torchrun started")
        values["dp"] = world_size // cp
    if values["dp"] * cp != world_size:
        raise ValueError(
            f"--dp {values['dp']} x --cp {cp} is {values['dp'] * cp} ranks but torchrun started {world_size}; "
            f"start it with --nproc-per-node {values['dp'] * cp} or change --dp or --cp"
        )
    if values["max_seqlen_per_rank"] is None:
        values["max_seqlen_per_rank"] = values["max_seqlen"]
    values["data"] = tuple(values["data"])
    values["weights"] = tuple(values["weights"]) or (1.0,) * len(values["data"])
    return TrainOptions(**values)
