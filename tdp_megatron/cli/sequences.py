"""``tdp sequences``: the counts of all files of a blend, for a start that opens none of them."""

from __future__ import annotations

import argparse
import json
import sys

from tdp_megatron.cli.data_arguments import add_data_arguments, blends_of, unique_prefixes
from tdp_megatron.cli.messages import message_of
from tdp_megatron.cli.output import check_outputs, write_file
from tdp_megatron.errors import TdpError
from tdp_megatron.indexed import DType, IndexedDataset, ObjectStorageConfig, is_object_storage_path

__all__ = ["add_arguments", "entry_of", "open_prefix", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp sequences``."""
    add_data_arguments(parser)
    parser.add_argument(
        "--per-dataset-sequences-path",
        required=True,
        metavar="FILE",
        help="JSON file to write: {prefix: [sequences, documents + 1]}",
    )
    parser.add_argument(
        "--with-sizes",
        action="store_true",
        help="add [dtype code, bytes of .bin, bytes of .idx] to each entry, so that changed files are noticed; "
        "tdp_megatron reads both forms, Megatron only the shorter one",
    )
    parser.add_argument("--multimodal", action="store_true", help="the indices have a mode per sequence")
    parser.add_argument("--object-storage-cache-path", metavar="DIR", help="folder for .idx files of s3:// and msc://")


def run(args: argparse.Namespace) -> int:
    """Run ``tdp sequences``: every bad file is told, and nothing written if there is one."""
    prefixes = unique_prefixes(*blends_of(args))
    check_outputs(args.per_dataset_sequences_path)
    entries: dict[str, list[int]] = {}
    for prefix in prefixes:
        try:
            dataset = open_prefix(prefix, args.multimodal, args.object_storage_cache_path)
        except (TdpError, OSError) as error:
            print(f"tdp: error: {message_of(error)}", file=sys.stderr)
            continue
        entries[prefix] = entry_of(dataset, args.with_sizes)
    if len(entries) < len(prefixes):
        print(f"tdp: error: {len(prefixes) - len(entries)} bad files, nothing was written", file=sys.stderr)
        return 1
    path = args.per_dataset_sequences_path
    write_file(path, json.dumps(entries).encode())
    print(f"{path}: {len(entries)} prefixes, {sum(entry[0] for entry in entries.values())} sequences")
    return 0


def open_prefix(prefix: str, multimodal: bool, object_storage_cache_path: str | None) -> IndexedDataset:
    """Open a prefix of either kind; files are mapped, objects are not."""
    remote = is_object_storage_path(prefix)
    config = ObjectStorageConfig(object_storage_cache_path) if remote and object_storage_cache_path else None
    return IndexedDataset(prefix, multimodal=multimodal, mmap=not remote, object_storage_config=config)


def entry_of(dataset: IndexedDataset, with_sizes: bool) -> list[int]:
    """What ``sequences_per_dataset`` says of a dataset: counts, and if wanted dtype code and sizes in bytes."""
    counts = [len(dataset), len(dataset.document_indices)]
    if not with_sizes:
        return counts
    return [*counts, DType.code_from_dtype(dataset.dtype), dataset.bin_nbytes, dataset.idx_nbytes]
