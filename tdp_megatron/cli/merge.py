"""``tdp merge``: all pairs of a folder into one."""

from __future__ import annotations

import argparse
import os

from tdp_megatron.cli.output import check_outputs
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path

__all__ = ["add_arguments", "find_prefixes", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp merge``."""
    parser.add_argument("--input", required=True, metavar="DIR", help="folder whose pairs are merged, in order of name")
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin and PREFIX.idx; not in DIR, where the next merge would take the result for an input",
    )
    parser.add_argument("--multimodal", action="store_true", help="the indices have a mode per sequence")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp merge``: everything is checked before anything is written."""
    output = args.output_prefix
    if not os.path.basename(output):
        raise ValueError(f"--output-prefix {output!r} ends in a folder; add the start of a file name")
    if not os.path.isdir(args.input):
        what = "is no folder" if os.path.exists(args.input) else "does not exist"
        raise NotADirectoryError(f"--input {args.input} {what}; give the folder that holds the pairs")
    prefixes = find_prefixes(args.input)
    if os.path.realpath(os.path.dirname(output) or ".") == os.path.realpath(args.input):
        raise ValueError(
            f"--output-prefix {output} lies in the folder to merge, whose next merge would count its documents twice; "
            "write the result to another folder"
        )
    check_outputs(get_bin_path(output), get_idx_path(output))
    # Not kept open: there may be thousands.
    dtypes = {prefix: IndexedDataset(prefix, multimodal=args.multimodal).dtype for prefix in prefixes}
    first = prefixes[0]
    for prefix, dtype in dtypes.items():
        if dtype != dtypes[first]:
            raise FormatError(
                f"{prefix} holds {dtype.name}, {first} {dtypes[first].name}; only one dtype can be merged"
            )
    with IndexedDatasetBuilder(get_bin_path(output), dtypes[first], args.multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        counts = f"{builder.num_documents} documents, {builder.num_sequences} sequences, {builder.num_tokens} tokens"
        builder.finalize(get_idx_path(output))
    print(f"{output}: {len(prefixes)} pairs, {counts} of {dtypes[first].name}")
    return 0


def find_prefixes(folder: str) -> list[str]:
    """Prefixes of the pairs in a folder, by name; other files are left alone.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        FormatError: half of a pair is missing, or there is no pair.
    """
    names = {name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))}
    found = {os.path.splitext(name)[0] for name in names if name.endswith((".bin", ".idx"))}
    for name in sorted(found):
        for path in (get_bin_path(name), get_idx_path(name)):
            if path not in names:
                raise FormatError(f"{os.path.join(folder, path)} is missing, its partner is there")
    if not found:
        raise FormatError(f"{folder} holds no pair of .bin and .idx files")
    return [os.path.join(folder, name) for name in sorted(found)]
