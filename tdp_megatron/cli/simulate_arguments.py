"""Arguments of ``tdp simulate``, and the layout and cost model that they say."""

from __future__ import annotations

import argparse

from tdp_megatron.errors import FormatError
from tdp_megatron.schedule import PRESETS, CostModel, Mode, algorithms, cost_from_dimensions, preset
from tdp_megatron.schedule.distributions import DISTRIBUTIONS
from tdp_megatron.types import ParallelLayout

__all__ = ["add_arguments", "algorithms_of", "cost_of", "layout_of"]

_DIMENSIONS = ("active_parameters", "attention_width", "num_layers", "kv_width")
#: Ranks have different numbers of microbatches, which lockstep and pipelines cannot run.
_UNEQUAL = ("balanced_hybrid_cp", "buddy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp simulate``."""
    parser.add_argument(
        "lengths",
        metavar="LENGTHS",
        help=f"prefix of a .bin/.idx pair, a .csv file, or a distribution: {', '.join(sorted(DISTRIBUTIONS))}",
    )
    parser.add_argument("--column", metavar="NAME", help="column of the CSV file")
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences (4 full microbatches' worth of tokens per rank)"
    )
    parser.add_argument(
        "--max-seqlen", type=int, metavar="N", help="longer sequences are cut to N tokens (the most that fits)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (0)")

    layout = parser.add_argument_group("layout; a rank is one TP x PP column")
    layout.add_argument("--dp", type=int, required=True, metavar="N", help="data-parallel size")
    layout.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel size of static CP (1)")
    layout.add_argument(
        "--cp-sizes",
        metavar="LIST",
        help="sizes that dynamic CP may use, as 1,2,4,8, or static for --cp alone (all powers of two that divide the "
        "ranks)",
    )
    layout.add_argument(
        "--max-seqlen-per-rank", type=int, default=16_384, metavar="N", help="tokens per rank and microbatch (16384)"
    )
    layout.add_argument("--sp", type=int, default=1, metavar="N", help="sequence-parallel (tensor-parallel) size (1)")
    layout.add_argument("--fp8-multiple", type=int, default=1, metavar="N", help="FP8 pads tokens per rank to this (1)")

    cost = parser.add_argument_group("cost model; one of three forms")
    cost.add_argument("--preset", choices=sorted(PRESETS), help="a known model on H100 (llama-8b)")
    cost.add_argument("--cost-file", metavar="FILE", help="what `tdp calibrate` wrote")
    cost.add_argument("--active-parameters", type=float, metavar="N", help="parameters that one token meets")
    cost.add_argument("--attention-width", type=int, metavar="N", help="heads * head dimension")
    cost.add_argument("--num-layers", type=int, metavar="N")
    cost.add_argument("--kv-width", type=int, metavar="N", help="elements of K of one token in one layer")
    cost.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (1)")
    cost.add_argument("--window", type=int, default=0, metavar="N", help="sliding attention window, tokens (0: none)")

    parser.add_argument(
        "--mode",
        default="free",
        help="free, lockstep (expert parallelism, FSDP), barrier, or pipeline(STAGES[, VIRTUAL]) (free)",
    )
    parser.add_argument("--algorithms", metavar="LIST", help=f"of auto, {', '.join(algorithms())} (all that suit)")
    parser.add_argument("--microbatches-multiple", type=int, default=1, metavar="N", help="VPP group (1)")
    parser.add_argument("--max-sequences", type=int, default=0, metavar="N", help="per microbatch (0: no limit)")
    parser.add_argument("--draw", metavar="LIST", help="algorithms in trace and pictures (dp_balanced,auto)")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (chrome://tracing, Perfetto)")
    parser.add_argument("--png", metavar="FILE", help="write a picture; needs matplotlib")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no other file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def layout_of(args: argparse.Namespace) -> ParallelLayout:
    """The layout.

    Raises:
        ValueError: sizes that do not go together.
    """
    # ParallelLayout names fields; here the values are arguments.
    for name in ("dp", "cp", "max_seqlen_per_rank", "sp", "fp8_multiple"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    ranks = args.dp * args.cp
    if args.cp_sizes is None:
        # Aligned blocks nest only for powers of two.
        dynamic = args.cp & (args.cp - 1) == 0
        sizes = tuple(1 << s for s in range(ranks.bit_length()) if ranks % (1 << s) == 0) if dynamic else (args.cp,)
    elif args.cp_sizes == "static":
        sizes = (args.cp,)
    else:
        try:
            sizes = tuple(int(item) for item in args.cp_sizes.split(","))
        except ValueError:
            raise ValueError(f"--cp-sizes must be a list as 1,2,4,8, or static; got {args.cp_sizes!r}") from None
    return ParallelLayout(
        args.dp, args.cp, args.max_seqlen_per_rank, cp_sizes=sizes, sp=args.sp, fp8_multiple=args.fp8_multiple
    )


def cost_of(args: argparse.Namespace) -> tuple[str, CostModel]:
    """The cost model and what to call it.

    Raises:
        FormatError: the file is no cost model.
        ValueError: several forms, or some dimensions without the others.
    """
    dimensions = [name for name in _DIMENSIONS if getattr(args, name) is not None]
    forms = [
        *(["--preset"] if args.preset else []),
        *(["--cost-file"] if args.cost_file else []),
        *(["--" + dimensions[0].replace("_", "-")] if dimensions else []),
    ]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(forms)} exclude each other; give one form of the cost model")
    if not dimensions and (args.tp != 1 or args.window):
        raise ValueError("--tp and --window go with --active-parameters and the other dimensions")
    if args.cost_file:
        with open(args.cost_file, "rb") as file:
            text = file.read()
        try:
            return args.cost_file, CostModel.from_json(text)
        except (TypeError, ValueError) as error:
            raise FormatError(f"{args.cost_file}: {error}") from None
    if not dimensions:
        name = args.preset or "llama-8b"
        return name, preset(name)
    missing = [name for name in _DIMENSIONS if name not in dimensions]
    if missing:
        raise ValueError(f"{forms[0]} needs --{missing[0].replace('_', '-')} beside it")
    return f"{args.active_parameters:.3g} parameters", cost_from_dimensions(
        active_parameters=args.active_parameters,
        attention_width=args.attention_width,
        layers=args.num_layers,
        kv_width=args.kv_width,
        tp=args.tp,
        window=args.window,
    )


def algorithms_of(text: str | None, mode: Mode) -> list[str]:
    """Names of the algorithms to compare, Megatron's first, ``auto`` last.

    Raises:
        ValueError: an unknown name.
    """
    if text is not None:
        names = list(dict.fromkeys(item.strip() for item in text.split(",")))
        unknown = [name for name in names if name != "auto" and name not in algorithms()]
        if unknown:
            raise ValueError(f"unknown algorithm {unknown[0]!r}; known are auto, {', '.join(algorithms())}")
        return names
    first = ["dp_balanced", "balanced_hybrid_cp", "default_dynamic_cp"]
    names = [*first, *(name for name in algorithms() if name not in first), "auto"]
    return [name for name in names if not (mode.needs_equal_count and name in _UNEQUAL)]
