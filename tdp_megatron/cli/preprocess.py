"""``tdp preprocess``: text to ``{prefix}_{key}_document.bin`` and ``.idx``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tdp_megatron.cli.documents import MAX_BAD_EXAMPLES, DocumentEncoder, EncodedBatch
from tdp_megatron.cli.inputs import InputFile, find_inputs, iter_batches
from tdp_megatron.cli.output import check_outputs
from tdp_megatron.cli.workers import OrderedPool
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path
from tdp_megatron.tokenization import BYTES, load_tokenizer

__all__ = ["PreprocessStats", "add_arguments", "preprocess", "run"]

_DTYPES = ("auto", "uint8", "uint16", "int32", "int64")


@dataclass(slots=True)
class PreprocessStats:
    """What one run did."""

    documents: int = 0
    empty_documents: int = 0
    """Documents without a token in any key."""
    tokens: int = 0
    """Tokens over all keys, ends of documents included."""
    text_bytes: int = 0
    """UTF-8 bytes of the texts."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Bad lines and files by reason."""
    examples: list[str] = field(default_factory=list)
    """Messages of the first bad ones."""
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp preprocess``."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSONL files (.gz and .zst too), .txt files, or folders, where other files are documents",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (text)")
    parser.add_argument(
        "--tokenizer",
        default=BYTES,
        metavar="PATH",
        help="a tokenizer.json, a tiktoken or SentencePiece file, or 'bytes' (default): 256 byte ids and EOD 256; "
        "special tokens spelled out in a text are encoded as plain text",
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document that is not empty with EOD")
    parser.add_argument("--eod-token", metavar="TOKEN", help="its spelling (default: the first usual one there is)")
    parser.add_argument("--workers", type=int, default=None, metavar="N", help="processes (default: one per core)")
    parser.add_argument(
        "--text-glob", nargs="+", default=[], metavar="GLOB", help="which files of a folder are documents"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="auto: uint16 below 65500 ids, else int32")
    bad = parser.add_mutually_exclusive_group()
    bad.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with a bad line or file (raise); skip counts and names it, and keeps the whole lines of a cut "
        "file",
    )
    bad.add_argument("--skip-bad-lines", dest="on_error", action="store_const", const="skip", help="--on-error skip")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp preprocess``."""
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    stats = preprocess(
        args.input,
        args.output_prefix,
        json_keys=args.json_keys,
        tokenizer=args.tokenizer,
        append_eod=args.append_eod,
        eod_token=args.eod_token,
        workers=workers,
        text_globs=args.text_glob,
        dtype=args.dtype,
        skip_bad=args.on_error == "skip",
        progress=not args.quiet and sys.stderr.isatty(),
    )
    if stats.skipped:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.skipped.items()))
        print(f"tdp: skipped {stats.skipped.total()} bad lines or files: {counts}", file=sys.stderr)
        for message in stats.examples:
            print(f"tdp:   {message}", file=sys.stderr)
    if not args.quiet:
        seconds = max(stats.seconds, 1e-9)
        print(
            f"{stats.documents} documents ({stats.empty_documents} empty), {stats.tokens} tokens from "
            f"{stats.text_bytes / 1e6:.1f} MB of text in {stats.seconds:.1f} s: {stats.text_bytes / 1e6 / seconds:.1f} "
            f"MB/s, {stats.tokens / seconds:.0f} tokens/s"
        )
        for key in args.json_keys:
            print(f"{_output_prefix(args.output_prefix, key)}.bin, .idx")
    return 0


def preprocess(
    inputs: list[str],
    output_prefix: str,
    *,
    json_keys: list[str],
    tokenizer: str = BYTES,
    append_eod: bool = False,
    eod_token: str | None = None,
    workers: int = 1,
    text_globs: list[str] | None = None,
    dtype: str = "auto",
    skip_bad: bool = False,
    progress: bool = False,
) -> PreprocessStats:
    """Tokenize text into one ``.bin``/``.idx`` pair per key; the same files for any number of workers.

    Args:
        inputs: JSONL or text files and folders.
        output_prefix: start of the output names.
        json_keys: keys to tokenize; a bad one makes the whole line bad, so that the outputs keep in step.
        tokenizer: path, or "bytes".
        append_eod: end every document that is not empty with EOD.
        eod_token: spelling of EOD.
        workers: processes.
        text_globs: which files of a folder are documents; all when empty.
        dtype: element type, or "auto".
        skip_bad: leave bad lines and files out instead of raising.
        progress: show a bar on stderr.

    Raises:
        FormatError: a bad line or file, an EOD the tokenizer lacks, or no document at all. Nothing is written then.
        FileNotFoundError: an input does not exist.
        NotADirectoryError: the output's folder is a file.
        ValueError: an argument is wrong.
    """
    started = time.perf_counter()
    _check_keys(json_keys, output_prefix)
    outputs = {key: _output_prefix(output_prefix, key) for key in json_keys}
    own = [name for prefix in outputs.values() for name in (get_bin_path(prefix), get_idx_path(prefix))]
    files = find_inputs(inputs, text_globs or [], exclude=own)
    if len(json_keys) > 1 and (plain := next((file for file in files if not file.is_jsonl), None)):
        raise ValueError(f"{plain.path} is plain text and has no keys; give one --json-keys for it")
    loaded = load_tokenizer(tokenizer)
    out_dtype = _choose_dtype(dtype, loaded.vocab_size)
    eod = loaded.eod_id(eod_token) if append_eod else None
    if eod_token is not None and not append_eod:
        raise ValueError("--eod-token has no effect without --append-eod")
    encoder = DocumentEncoder(tokenizer, tuple(json_keys), eod, out_dtype.name, not skip_bad)
    folder = os.path.dirname(output_prefix) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"--output-prefix {output_prefix}: {folder} is a file or lies in one") from None

    check_outputs(*own)
    stats = PreprocessStats()
    with contextlib.ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), out_dtype))
            for key, prefix in outputs.items()
        }
        advance = stack.enter_context(_progress(files, progress))
        pool = stack.enter_context(OrderedPool(encoder, workers))
        for result in pool.map(iter_batches(files)):
            _count(stats, result, skip_bad)
            for key, builder in builders.items():
                lengths = result.lengths[key]
                builder.add_sequences(result.tokens[key], lengths[lengths > 0], lengths > 0)
            advance(result.disk_bytes)
        if stats.documents == 0:
            skipped = f" ({stats.skipped.total()} bad ones were skipped)" if stats.skipped else ""
            raise FormatError(f"no documents in {', '.join(inputs)}{skipped}; nothing was written")
        for key, builder in builders.items():
            builder.finalize(get_idx_path(outputs[key]))
    stats.seconds = time.perf_counter() - started
    return stats


def _count(stats: PreprocessStats, result: EncodedBatch, skip_bad: bool) -> None:
    if result.bad and not skip_bad:
        raise FormatError(f"{result.bad_examples[0]} (--skip-bad-lines leaves it out)")
    stats.skipped += result.bad
    stats.examples = [*stats.examples, *result.bad_examples][:MAX_BAD_EXAMPLES]
    stats.documents += result.documents
    stats.empty_documents += int((np.sum(list(result.lengths.values()), axis=0) == 0).sum())
    stats.tokens += sum(len(tokens) for tokens in result.tokens.values())
    stats.text_bytes += result.text_bytes


def _check_keys(keys: list[str], output_prefix: str) -> None:
    if os.path.basename(output_prefix) == "":
        raise ValueError(f"--output-prefix {output_prefix!r} ends in a folder; add the start of a file name")
    for key in keys:
        if not key or os.sep in key or "\0" in key:
            raise ValueError(f"key {key!r} cannot be part of a file name")
    if len(set(keys)) != len(keys):
        raise ValueError(f"--json-keys has {', '.join(keys)}: each key may be there once")


def _output_prefix(output_prefix: str, key: str) -> str:
    return f"{output_prefix}_{key}_document"


def _choose_dtype(name: str, vocab_size: int) -> np.dtype[np.generic]:
    if name == "auto":
        return DType.optimal_dtype(vocab_size)
    dtype = np.dtype(name)
    if vocab_size > np.iinfo(dtype).max + 1:
        raise ValueError(
            f"--dtype {name} holds ids below {np.iinfo(dtype).max + 1}, the tokenizer has {vocab_size}; use auto"
        )
    return dtype


@contextlib.contextmanager
def _progress(files: list[InputFile], shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda disk_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("preprocess"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("preprocess", total=sum(file.size for file in files))
        yield lambda disk_bytes: bar.advance(task, disk_bytes)
