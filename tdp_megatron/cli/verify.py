"""``tdp verify``: check pairs of files, every token included."""

from __future__ import annotations

import argparse
import sys

from tdp_megatron.errors import TdpError
from tdp_megatron.indexed import verify

__all__ = ["add_arguments", "run", "strip_suffix"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp verify``."""
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path without .bin or .idx")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="every token must be below N")
    parser.add_argument("--multimodal", action="store_true", help="the index has a mode per sequence")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp verify``: all prefixes are checked, also after a bad one."""
    failed = 0
    for prefix in args.prefixes:
        try:
            report = verify(strip_suffix(prefix), args.vocab_size, args.multimodal)
        except (TdpError, OSError) as error:
            failed += 1
            print(f"tdp: error: {error}", file=sys.stderr)
            continue
        print(
            f"{report.path_prefix}: ok, {report.documents} documents ({report.empty_documents} empty), "
            f"{report.sequences} sequences ({report.empty_sequences} empty), {report.tokens} tokens of {report.dtype} "
            f"from {report.min_token} to {report.max_token}"
        )
    return 1 if failed else 0


def strip_suffix(prefix: str) -> str:
    """The prefix when a file name was given, as a shell completes it."""
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
