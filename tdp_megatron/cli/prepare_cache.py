"""``tdp prepare-cache``: write the index caches of a training run before it starts."""

from __future__ import annotations

import argparse
import os
from typing import Any

from tdp_megatron.cli.data_arguments import add_data_arguments, blends_of, read_sequences_per_dataset
from tdp_megatron.cli.progress_bar import ProgressBar
from tdp_megatron.cli.target_sizes import data_parallel_size, global_batch_size, target_sizes
from tdp_megatron.cli.tokenizer_arguments import add_tokenizer_arguments, tokenizer_spec_of
from tdp_megatron.errors import CacheError

__all__ = ["add_arguments", "run"]

#: What Megatron takes when --data-path comes without --split.
_DEFAULT_SPLIT = "969, 30, 1"

_REFUSED = {
    "mock_data": "--mock-data: made-up data has no caches",
    "sft": "--sft: its samples need the texts, not an order of token files",
    "fim_data": "--fim-data: its samples are made with other indices",
    "step_batch_size_schedule": "--step-batch-size-schedule: the number of samples cannot be told from the batch size",
    "rampup_batch_size": "--rampup-batch-size: the number of samples cannot be told from the batch size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp prepare-cache``, under Megatron's names."""
    add_data_arguments(parser)
    add_tokenizer_arguments(parser)
    group = parser.add_argument_group("datasets")
    group.add_argument("--data-cache-path", metavar="DIR", help="where the caches go; required")
    group.add_argument("--split", metavar="SHARES", help=f'with --data-path: shares, as "99,1,0" ("{_DEFAULT_SPLIT}")')
    group.add_argument("--seq-length", type=int, required=True, metavar="N", help="tokens of a sample")
    group.add_argument("--seed", type=int, default=1234, metavar="N", help="1234")
    group.add_argument("--multiple-validation-sets", action="store_true")
    group.add_argument("--full-validation", action="store_true")
    group.add_argument("--mid-level-dataset-surplus", type=float, default=0.005, metavar="SHARE", help="0.005")
    group.add_argument("--num-dataset-builder-threads", type=int, default=1, metavar="N", help="1")
    group.add_argument("--no-mmap-bin-files", dest="mmap_bin_files", action="store_false")
    group.add_argument("--object-storage-cache-path", metavar="DIR", help="folder for .idx files of s3:// and msc://")
    group.add_argument("--per-dataset-sequences-path", metavar="FILE", help="what `tdp sequences` wrote; is checked")
    for name in ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--allow-ambiguous-pad-tokens"):
        group.add_argument(name, action="store_true", help="does not change the caches")
    group.add_argument(
        "--no-create-attention-mask-in-dataloader",
        dest="create_attention_mask_in_dataloader",
        action="store_false",
        help="does not change the caches",
    )
    for name in ("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"):
        group.add_argument(name, action="store_true", help="has no effect here")
    _add_run_arguments(parser)
    group = parser.add_argument_group("refused", "what has no caches to prepare")
    for name in ("--mock-data", "--sft", "--fim-data"):
        group.add_argument(name, action="store_true")
    group.add_argument("--step-batch-size-schedule", metavar="SCHEDULE")
    group.add_argument("--rampup-batch-size", nargs="*", metavar="N")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run", "what decides how many samples are taken")
    group.add_argument("--train-samples", type=int, metavar="N")
    group.add_argument("--train-iters", type=int, metavar="N")
    group.add_argument("--eval-interval", type=int, default=1000, metavar="N", help="1000")
    group.add_argument("--eval-iters", type=int, default=100, metavar="N", help="100")
    group.add_argument("--global-batch-size", type=int, metavar="N")
    group.add_argument("--micro-batch-size", type=int, metavar="N")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--context-parallel-size", type=int, default=1, metavar="N")
    group.add_argument(
        "--prepare-cache-world-size", type=int, metavar="N", help="ranks of the training run (WORLD_SIZE, or 1)"
    )
    group.add_argument(
        "--ignore-other-arguments",
        action="store_true",
        help="accept, and do nothing with, arguments unknown here: those of a whole training command",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``tdp prepare-cache``."""
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"{reason}; it is not supported by prepare-cache")
    if not args.data_cache_path:
        raise ValueError("--data-cache-path is missing: the folder of the caches, the same as in training")
    world_size = _world_size(args.prepare_cache_world_size)
    dp_size = data_parallel_size(
        world_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
    )
    batch = global_batch_size(args.global_batch_size, args.micro_batch_size, dp_size)
    sizes = target_sizes(
        batch,
        train_samples=args.train_samples,
        train_iters=args.train_iters,
        eval_interval=args.eval_interval,
        eval_iters=args.eval_iters,
        full_validation=args.full_validation,
    )
    config = _config(args, dp_size)
    for name, value in (
        ("world size", world_size),
        ("data parallel size", dp_size),
        ("global batch size", batch),
        ("cache path", args.data_cache_path),
        *((f"target samples {split}", size) for split, size in zip(("train", "valid", "test"), sizes, strict=True)),
    ):
        print(f"{name:20} {value}")
    for name in ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"):
        if getattr(args, name):
            print(f"--{name.replace('_', '-')} has no effect: these caches are being written")
    from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset
    from tdp_megatron.datasets.cache_writer import UNWRITABLE_REMEDY

    try:
        with ProgressBar("prefixes") as bar:
            built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config, progress=bar).build()
    except CacheError as error:
        # Of the library's settings, which have other names here.
        remedy = "Give --data-cache-path a folder with room that this process may write"
        raise CacheError(str(error).replace(UNWRITABLE_REMEDY, remedy)) from error
    for split, dataset in zip(("train", "valid", "test"), built, strict=True):
        print(f"{f'built samples {split}':20} {_length(dataset)}")
    return 0


def _world_size(given: int | None) -> int:
    if given is not None:
        if given < 1:
            raise ValueError(f"--prepare-cache-world-size must be at least 1, got {given}")
        return given
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or not int(text):
        raise ValueError(f"WORLD_SIZE is {text!r}, not a number of ranks; give --prepare-cache-world-size")
    return int(text)


def _config(args: argparse.Namespace, dp_size: int) -> Any:
    from tdp_megatron.datasets import GPTDatasetConfig

    blend, blend_per_split = blends_of(args)
    split = args.split
    if blend is not None and split is None:
        split = _DEFAULT_SPLIT
        print(f"--split is not given: {split!r}, as in Megatron")
    counts = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer_spec_of(args),
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        object_storage_cache_path=args.object_storage_cache_path,
        sequences_per_dataset=None if counts is None else read_sequences_per_dataset(counts),
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=dp_size,
    )


def _length(dataset: Any) -> str:
    if isinstance(dataset, list):
        return ", ".join(_length(one) for one in dataset)
    return "none" if dataset is None else str(len(dataset))
