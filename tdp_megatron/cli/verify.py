"""``tdp verify``: check pairs of files, every token included."""

from __future__ import annotations

import argparse
import sys

from tdp_megatron.cli.data_arguments import read_sequences_per_dataset
from tdp_megatron.cli.messages import message_of
from tdp_megatron.errors import FormatError, TdpError
from tdp_megatron.indexed import verify

__all__ = ["add_arguments", "run", "strip_suffix"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp verify``."""
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="path or URL without .bin or .idx")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="every token must be below N")
    parser.add_argument("--multimodal", action="store_true", help="the index has a mode per sequence")
    parser.add_argument(
        "--per-dataset-sequences-path",
        metavar="FILE",
        help="what `tdp sequences` wrote: each prefix must agree with it; without prefixes, all of it are checked",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``tdp verify``: all prefixes are checked, also after a bad one."""
    manifest_path = args.per_dataset_sequences_path
    manifest = None if manifest_path is None else read_sequences_per_dataset(manifest_path)
    prefixes = [strip_suffix(prefix) for prefix in args.prefixes] or list(manifest or ())
    if not prefixes:
        raise ValueError("nothing to verify; give prefixes, or --per-dataset-sequences-path with some")
    failed = 0
    for prefix in prefixes:
        try:
            if manifest is not None and prefix not in manifest:
                raise FormatError(f"{manifest_path} has no entry for {prefix}")
            report = verify(prefix, args.vocab_size, args.multimodal, manifest)
        except (TdpError, OSError) as error:
            failed += 1
            print(f"tdp: error: {message_of(error)}", file=sys.stderr)
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
