"""The three indices that define Megatron's GPT sample order, bit for bit.

Source: Megatron-LM (Aug 2026) behaviour; the draws are those of NumPy's legacy ``RandomState``, which NumPy has
frozen and ``_C.LegacyRandom`` repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.memory import require_memory

__all__ = ["GPTIndices", "build_gpt_indices", "epoch_plan", "needs_int64"]

_Shuffle: TypeAlias = "Callable[[npt.NDArray[Any]], None]"

_INT32_MAX = np.iinfo(np.int32).max

#: A last epoch that contributes less than this share of its samples is shuffled apart from the others.
_SEPARATE_FINAL_EPOCH_SHARE = 0.80

# Sequences handled at a time, so that temporaries stay small beside the indices.
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class GPTIndices:
    """Sample ``i`` of the dataset is row ``shuffle_index[i]`` of ``sample_index``."""

    document_index: npt.NDArray[np.int32]
    """int32 [epochs * sequences], the shuffled sequence numbers, epoch after epoch."""
    sample_index: npt.NDArray[Any]
    """int32 or int64 [n + 1, 2], rows (place in document_index, token offset)."""
    shuffle_index: npt.NDArray[Any]
    """uint32 (int64 from 2^32 - 2 samples on) [n]."""
    num_epochs: int
    """How often the sequences are used."""
    tokens_per_epoch: int
    """Tokens of all sequences."""

    def __len__(self) -> int:
        return len(self.shuffle_index)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How many epochs a number of samples needs."""

    num_epochs: int
    num_samples: int
    """Samples those epochs hold."""
    separate_final_epoch: bool
    """Whether the last epoch is shuffled apart."""
    samples_before_final: int
    """Samples that end before the last epoch does begin."""


def epoch_plan(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    *,
    extra_token: int,
    drop_last: bool,
) -> EpochPlan:
    """Epochs and samples for a request, by arithmetic.

    Args:
        tokens_per_epoch: tokens of the split.
        sequence_length: tokens of one sample, the extra one not counted.
        num_samples: samples wanted; None for what one epoch gives.
        extra_token: 1 when samples carry the token after the last, else 0.
        drop_last: whether a last partial sample is dropped.
    """
    if num_samples is None:
        epochs = 1
    else:
        epochs = max(1, -(-(num_samples * sequence_length + extra_token) // tokens_per_epoch))
    usable = epochs * tokens_per_epoch - extra_token
    total = usable // sequence_length if drop_last else -(-usable // sequence_length)
    before = ((epochs - 1) * tokens_per_epoch - extra_token) // sequence_length
    separate = False
    if epochs > 1 and num_samples is not None:
        per_epoch = (tokens_per_epoch - extra_token) // sequence_length
        separate = num_samples - before < int(_SEPARATE_FINAL_EPOCH_SHARE * per_epoch)
    return EpochPlan(epochs, total, separate, before)


def _shuffled_documents(
    indices: npt.NDArray[np.int32] | range, epochs: int, separate_final: bool, shuffle: _Shuffle
) -> npt.NDArray[np.int32]:
    count = len(indices)
    document_index = np.empty(epochs * count, dtype=np.int32)
    rows = document_index.reshape(epochs, count)
    if isinstance(indices, range):
        # In chunks: a whole np.arange would be a second array of this size.
        for first in range(0, count, _CHUNK):
            part = indices[first : first + _CHUNK]
            rows[:, first : first + len(part)] = np.arange(part.start, part.stop, dtype=np.int32)
    else:
        rows[:] = indices
    boundary = (epochs - 1) * count if separate_final else 0
    for part_of_index in (document_index[:boundary], document_index[boundary:]):
        shuffle(part_of_index)
    return document_index


def _shuffled_samples(total: int, boundary: int, shuffle: _Shuffle) -> npt.NDArray[Any]:
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffle_index = np.arange(total, dtype=dtype)
    for part in (shuffle_index[:boundary], shuffle_index[boundary:]):
        shuffle(part)
    return shuffle_index


def _total_and_longest(lengths: npt.NDArray[np.int32], indices: npt.NDArray[np.int32] | range) -> tuple[int, int]:
    total = longest = 0
    for first in range(0, len(indices), _CHUNK):
        part = indices[first : first + _CHUNK]
        chosen = lengths[part.start : part.stop] if isinstance(part, range) else lengths[part]
        total += int(chosen.sum(dtype=np.int64))
        longest = max(longest, int(chosen.max()))
    return total, longest


def _require_memory(
    plan: EpochPlan, num_sequences: int, num_samples: int | None, sequence_length: int, longest: int, name: str
) -> None:
    entries = plan.num_epochs * num_sequences
    row = 2 * (8 if needs_int64(entries, longest) else 4)
    shuffled = 8 if plan.num_samples >= np.iinfo(np.uint32).max - 1 else 4
    wanted = "one epoch" if num_samples is None else f"num_samples {num_samples}"
    require_memory(
        4 * entries + (row + shuffled) * plan.num_samples,
        f"{name}: the order of {wanted} of {sequence_length} tokens ({plan.num_epochs} epochs)",
        "ask for fewer samples (--train-samples or --train-iters), or take GPTSample with order='instant', which "
        "builds no index",
    )


def needs_int64(num_entries: int, longest: int) -> bool:
    """Whether rows of the sample index, (place in document_index, token offset), need more than int32.

    Args:
        num_entries: epochs * sequences.
        longest: tokens of the longest sequence.
    """
    return max(num_entries, longest) > _INT32_MAX


def build_gpt_indices(
    sequence_lengths: npt.NDArray[np.int32],
    indices: npt.NDArray[np.int32] | range,
    *,
    sequence_length: int,
    num_samples: int | None,
    random_seed: int,
    add_extra_token_to_sequence: bool = True,
    drop_last_partial_sequence: bool = True,
    name: str = "dataset",
    stop: Callable[[], None] | None = None,
) -> GPTIndices:
    """Document, sample and shuffle index of fixed-length samples.

    Args:
        sequence_lengths: int32 [N], tokens of every sequence of the file.
        indices: int32 [M], the sequences of this split; a range (step 1) saves the array.
        sequence_length: tokens of one sample.
        num_samples: samples wanted, as many epochs as that takes, at least one; None for one epoch.
        random_seed: seed of the legacy generator, 0 <= seed < 2^32.
        add_extra_token_to_sequence: whether each sample reads one token more, for its last label.
        drop_last_partial_sequence: whether a last sample that is cut short is dropped.
        name: what error messages call this data.
        stop: called a few times per second; may raise to end the build. Ctrl-C ends it anyway, in the main thread.

    Returns:
        The indices; of length 0 when one epoch is shorter than a sample and ``num_samples`` is None, as in Megatron.

    Raises:
        ValueError: the split has no token (Megatron loops for ever or aborts there), or the indices do not fit into the
            memory of this machine.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    if num_samples is not None and num_samples < 0:
        raise ValueError(f"num_samples must not be negative, got {num_samples}")
    extra = int(add_extra_token_to_sequence)
    if isinstance(indices, range) and indices.step != 1:
        raise ValueError(f"indices must be an int32 array or a range of step 1, got {indices!r}")
    tokens, longest = _total_and_longest(sequence_lengths, indices)
    if tokens == 0:
        raise ValueError(
            f"{name}: the split holds {len(indices)} sequences and no token; give it a larger share or more data"
        )
    plan = epoch_plan(tokens, sequence_length, num_samples, extra_token=extra, drop_last=drop_last_partial_sequence)
    _require_memory(plan, len(indices), num_samples, sequence_length, longest, name)
    shuffle: _Shuffle = functools.partial(_C.LegacyRandom(random_seed).shuffle, stop=stop)
    document_index = _shuffled_documents(indices, plan.num_epochs, plan.separate_final_epoch, shuffle)
    wide = needs_int64(len(document_index), longest)
    sample_index = _C.build_sample_index(
        sequence_lengths, document_index, sequence_length, extra, plan.num_samples, wide, stop
    )
    boundary = plan.samples_before_final if plan.separate_final_epoch else 0
    shuffle_index = _shuffled_samples(plan.num_samples, boundary, shuffle)
    return GPTIndices(document_index, sample_index, shuffle_index, plan.num_epochs, tokens)
