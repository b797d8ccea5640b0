"""What describes a blend of datasets and its samples, under Megatron's names, with every combination checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tdp_megatron.datasets.blend import check_weights
from tdp_megatron.datasets.splits import Split, parse_split, split_matrix

__all__ = ["BlendedMegatronDatasetConfig", "GPTDatasetConfig", "PadMasking"]

logger = logging.getLogger(__name__)

#: How padding is told from data: by where it was added, or, as Megatron does, by the value of the id.
PadMasking = Literal["position", "megatron"]

_Blend: TypeAlias = "tuple[list[str], list[float] | None]"

_MOCK_SPLIT = "1,1,1"


def _checked_blend(blend: Any, name: str) -> _Blend:
    if not isinstance(blend, Sequence) or isinstance(blend, str) or len(blend) != 2:
        raise ValueError(f"{name} must be (prefixes, weights) with weights None or one per prefix, got {blend!r}")
    prefixes, weights = blend
    if isinstance(prefixes, str) or not isinstance(prefixes, Sequence) or not prefixes:
        raise ValueError(f"{name} must begin with a list of at least one prefix, got {prefixes!r}")
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise TypeError(f"{name} has a prefix that is not a string: {prefix!r}")
    if weights is None:
        return list(prefixes), None
    if len(weights) != len(prefixes):
        raise ValueError(f"{name} has {len(prefixes)} prefixes and {len(weights)} weights; give one weight per prefix")
    check_weights(weights, prefixes)
    return list(prefixes), list(weights)


def _require_whole(name: str, value: Any, least: int, below: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least or (below is not None and value >= below):
        limit = f"at least {least}" if below is None else f"in [{least}, {below})"
        raise ValueError(f"{name} must be {limit}, got {value}")


@dataclass
class BlendedMegatronDatasetConfig:
    """Where the data is, how it is split and mixed, and where the indices are kept.

    Raises:
        ValueError, TypeError: fields that contradict each other; the message names them.
    """

    random_seed: int
    """Seed of every draw, 0 <= seed < 2^32."""

    sequence_length: int
    """Tokens of a sample."""

    blend: _Blend | None = None
    """(prefixes, weights) for all splits; weights None for shares by size. Not with ``blend_per_split``."""

    blend_per_split: Sequence[_Blend | None] | None = None
    """One blend, or None, for train, valid and test. Not with ``blend`` or ``split``."""

    multiple_validation_sets: bool | None = None
    """Whether the prefixes of the valid blend are validation sets of their own; ``build`` then gives a list."""

    full_validation: bool | None = None
    """Whether each validation runs over a whole epoch; its size must be None."""

    split: str | None = None
    """Shares of train, valid and test, such as ``"99,1,0"``; required with ``blend``."""

    split_matrix: list[tuple[float, float] | None] | None = field(init=False, default=None)
    """Per split (begin, end) as shares of the sequences, from ``split``."""

    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""

    path_to_cache: str | None = None
    """Folder of the index caches; None for ``<prefix>/cache``, ``""`` for none (a blend has none then, too)."""

    mmap_bin_files: bool = True
    """Whether ``.bin`` files are mapped, or read."""

    mock: bool = field(init=False, default=False)
    """Whether there is no data and samples are made up; true when no blend is given."""

    tokenizer: Any = None
    """Gives ``eod``, ``pad``, ``vocab_size`` and ``unique_identifiers``: Megatron's, or a ``TokenizerSpec``."""

    mid_level_dataset_surplus: float = 0.005
    """Share of samples to build beyond what a weighted blend should draw."""

    allow_ambiguous_pad_tokens: bool | None = False
    """Whether a pad id that is also another special token still counts as padding (``pad_masking="megatron"``)."""

    fast_cache_load: bool = False
    """Open nothing and wait for no rank at start-up; all caches must exist."""

    defer_npy_index_mmap: bool = False
    """Open each index at its first use; all caches must exist."""

    def __post_init__(self) -> None:
        _require_whole("random_seed", self.random_seed, 0, 2**32)
        _require_whole("sequence_length", self.sequence_length, 1)
        _require_whole("num_dataset_builder_threads", self.num_dataset_builder_threads, 1)
        if not 0 <= self.mid_level_dataset_surplus < float("inf"):
            raise ValueError(f"mid_level_dataset_surplus must be 0 or more, got {self.mid_level_dataset_surplus}")
        self._check_start_up()
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
            return
        if self.blend is not None:
            self.blend = _checked_blend(self.blend, "blend")
            if self.split is None:
                raise ValueError('blend needs split, such as "99,1,0": the shares of train, valid and test')
        else:
            self.mock = True
            self.split = _MOCK_SPLIT
            logger.info("neither blend nor blend_per_split is given: mock data, split %s", self.split)
        self.split_matrix = list(split_matrix(parse_split(self.split)))

    def _check_start_up(self) -> None:
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, name) and not self.path_to_cache:
                raise ValueError(f"{name} needs path_to_cache: the folder of the caches that are there already")
        if self.fast_cache_load and self.blend is not None:
            raise ValueError("fast_cache_load does not go with blend; give blend_per_split")

    def _check_blend_per_split(self, blends: Sequence[_Blend | None]) -> None:
        if self.blend is not None:
            raise ValueError("blend and blend_per_split exclude each other; give one")
        if self.split is not None:
            raise ValueError(f"split {self.split!r} does not go with blend_per_split: each split has files of its own")
        if len(blends) != len(Split):
            raise ValueError(f"blend_per_split must have {len(Split)} entries (train, valid, test), got {len(blends)}")
        self.blend_per_split = [
            None if blend is None else _checked_blend(blend, f"blend_per_split[{split.name}]")
            for split, blend in zip(Split, blends, strict=True)
        ]


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Configuration of fixed-length GPT samples."""

    reset_position_ids: bool | None = None
    """Whether position ids start again after each end of document. Must be given."""

    reset_attention_mask: bool | None = None
    """Whether the attention mask stops at ends of documents. Must be given."""

    eod_mask_loss: bool | None = None
    """Whether positions of the end-of-document token have no loss. Must be given."""

    create_attention_mask: bool = True
    """Whether samples carry ``attention_mask``, bool [1, S, S]; never with ``inter_document_masking``."""

    drop_last_partial_validation_sequence: bool = True
    """Whether a last, shorter sample of the valid split is left out."""

    add_extra_token_to_sequence: bool = True
    """Whether a sample reads one token more, so that its last label is known."""

    object_storage_cache_path: str | None = None
    """Folder for index files of object storage."""

    data_parallel_size: int = 1
    """Data-parallel ranks."""

    sequence_parallel_size: int = 0
    """Tensor-parallel ranks under sequence parallelism, else 0."""

    hybrid_context_parallel: bool = False
    """Whether the context-parallel size changes from sample to sample."""

    sequences_per_dataset: Mapping[str, Sequence[int]] | None = None
    """``{prefix: (sequence_count, document_count)}``, checked against each file."""

    token_dtype_code: int | None = field(init=False, default=None)
    """Always None: the dtype is what each file's header says, not what the vocabulary suggests."""

    context_parallel_size: int | None = None
    """Context-parallel ranks."""

    inter_document_masking: bool = False
    """Whether samples carry ``cu_seqlens`` and ``max_seqlen`` of their documents, and position ids per document."""

    pad_masking: PadMasking = "position"
    """``"position"``: what was padded has no loss. ``"megatron"``, for the same values as Megatron: every token of the
    pad id has no loss and becomes id 0, genuine ones included; and unless masks are reset or ``eod_mask_loss`` is set,
    the positions masked in the first sample that is read are masked in all that this dataset object gives later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ValueError("tokenizer is missing: the samples need its eod id, the cache key its identifiers")
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be True or False, it has no default")
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and getattr(self.tokenizer, "eod", None) is None:
                raise ValueError(
                    f"{name} needs the end-of-document id, but tokenizer ({type(self.tokenizer).__name__}) has no eod"
                )
        if self.pad_masking not in get_args(PadMasking):
            raise ValueError(f"pad_masking must be one of {', '.join(get_args(PadMasking))}, got {self.pad_masking!r}")
