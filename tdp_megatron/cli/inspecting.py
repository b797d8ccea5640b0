"""``tdp inspect``: what a pair of files holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from tdp_megatron.cli.verify import strip_suffix
from tdp_megatron.indexed import IndexedDataset, is_object_storage_path

__all__ = ["add_arguments", "describe", "run"]

_PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_BAR_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp inspect``."""
    parser.add_argument("prefix", metavar="PREFIX", help="path without .bin or .idx")
    parser.add_argument("--multimodal", action="store_true", help="the index has a mode per sequence")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="first tokens of the first sequence (16)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp inspect``."""
    if args.tokens < 0:
        raise ValueError(f"--tokens must not be negative, got {args.tokens}")
    prefix = strip_suffix(args.prefix)
    dataset = IndexedDataset(prefix, multimodal=args.multimodal, mmap=not is_object_storage_path(prefix))
    facts = describe(dataset, args.tokens)
    if args.json:
        print(json.dumps(facts))
        return 0
    for name in (
        "path_prefix",
        "dtype",
        "documents",
        "sequences",
        "tokens",
        "bin_bytes",
        "empty_sequences",
        "empty_documents",
    ):
        print(f"{name:16} {facts[name]}")
    print(f"{'first_tokens':16} {' '.join(str(token) for token in facts['first_tokens'])}")
    if facts["sequences"]:
        print("sequence length  " + "  ".join(f"p{p} {v:g}" for p, v in facts["length_percentiles"].items()))
        most = max(row["sequences"] for row in facts["length_histogram"])
        for row in facts["length_histogram"]:
            bar = "#" * round(_BAR_WIDTH * row["sequences"] / most)
            print(f"  {row['from']:>10} to {row['to']:<10} {row['sequences']:>12} {bar}")
    return 0


def describe(dataset: IndexedDataset, num_first_tokens: int = 16) -> dict[str, Any]:
    """Facts about a dataset, ready for JSON.

    Args:
        dataset: what to describe.
        num_first_tokens: tokens shown of the first sequence that has any.

    Returns:
        Counts, dtype, percentiles of the sequence lengths, a histogram by powers of two, first tokens, fingerprint.
    """
    lengths = np.array(dataset.sequence_lengths)
    count = min(num_first_tokens, int(lengths[lengths > 0][0])) if lengths.any() else 0
    first = dataset.read_pieces(np.zeros(1, dtype=np.int64), np.array([count]))
    percentiles = np.percentile(lengths, _PERCENTILES).tolist() if len(lengths) else []
    return {
        "path_prefix": dataset.path_prefix,
        "dtype": dataset.dtype.name,
        "documents": len(dataset.document_indices) - 1,
        "sequences": len(lengths),
        "tokens": dataset.num_tokens,
        "bin_bytes": dataset.bin_nbytes,
        "empty_sequences": int((lengths == 0).sum()),
        "empty_documents": int((np.diff(dataset.document_indices) == 0).sum()),
        "length_percentiles": {str(p): value for p, value in zip(_PERCENTILES, percentiles, strict=False)},
        "length_histogram": _histogram(lengths),
        "first_tokens": first.tolist(),
        "fingerprint": dataset.fingerprint(),
    }


def _histogram(lengths: np.ndarray[Any, np.dtype[np.int32]]) -> list[dict[str, int]]:
    # Bucket b holds 2**(b-1) to 2**b - 1 tokens; bucket 0 the empty sequences. frexp is exact up to 2**31.
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    return [
        {"from": 1 << (b - 1) if b else 0, "to": (1 << b) - 1 if b else 0, "sequences": int(n)}
        for b, n in enumerate(counts)
        if n
    ]
