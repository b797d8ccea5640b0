"""What GPT index caches are made from, and how one that nobody vouches for is checked."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.cache import Arrays, Provenance
from tdp_megatron.datasets.gpt_indices import epoch_plan
from tdp_megatron.indexed import get_idx_path

__all__ = ["INDEX_NAMES", "content_complaint", "provenance_of", "shape_complaint"]

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


def provenance_of(low_level: Any, *, extra_token: int, drop_last: bool) -> Provenance:
    """What the indices depend on beyond the cache key: two settings, and the lengths of the sequences.

    Args:
        low_level: the sequences; has ``sequence_lengths``, and ``path_prefix`` where they are in files.
        extra_token: 1 when samples read one token more, else 0.
        drop_last: whether a last, shorter sample is left out.
    """

    def fingerprint() -> dict[str, Any]:
        lengths = np.ascontiguousarray(low_level.sequence_lengths)
        return {
            "sequences": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "lengths_crc32": zlib.crc32(lengths.view(np.uint8).data),
        }

    try:
        status = os.stat(get_idx_path(low_level.path_prefix))
        stamp = {"idx_size": status.st_size, "idx_mtime_ns": status.st_mtime_ns}
    except (AttributeError, OSError):  # mock data, object storage
        stamp = None
    settings = {"add_extra_token_to_sequence": bool(extra_token), "drop_last_partial_sequence": drop_last}
    return Provenance(settings, stamp, fingerprint)


def shape_complaint(arrays: Arrays) -> str | None:
    """What is wrong with the dtypes and shapes of the indices, None when nothing is."""
    document_index, sample_index, shuffle_index = (arrays[name] for name in INDEX_NAMES)
    if document_index.dtype != np.int32 or document_index.ndim != 1:
        return f"document_index is {document_index.dtype} {document_index.shape}, not int32 [documents]"
    if sample_index.dtype not in (np.int32, np.int64) or sample_index.ndim != 2 or sample_index.shape[1] != 2:
        return f"sample_index is {sample_index.dtype} {sample_index.shape}, not int32 or int64 [samples + 1, 2]"
    if shuffle_index.dtype not in (np.uint32, np.int64) or shuffle_index.ndim != 1:
        return f"shuffle_index is {shuffle_index.dtype} {shuffle_index.shape}, not uint32 or int64 [samples]"
    if not all(array.flags.c_contiguous for array in arrays.values()):
        return "its arrays are not in C order"
    if len(sample_index) != len(shuffle_index) + 1:
        return f"sample_index has {len(sample_index)} rows for {len(shuffle_index)} samples"
    return None


def content_complaint(
    arrays: Arrays,
    lengths: npt.NDArray[np.int32],
    indices: npt.NDArray[np.int32],
    *,
    sequence_length: int,
    num_samples: int | None,
    extra_token: int,
    drop_last: bool,
) -> str | None:
    """What is wrong with the values of the indices, None when nothing is.

    Everything but the draws themselves is computed again.

    Args:
        arrays: the indices, of right shapes.
        lengths: int32 [N], tokens of every sequence of the file.
        indices: int32 [M], the sequences of the split.
        sequence_length: tokens of one sample.
        num_samples: samples wanted; None for one epoch's.
        extra_token: 1 when samples read one token more, else 0.
        drop_last: whether a last, shorter sample is left out.
    """
    document_index, sample_index, shuffle_index = (arrays[name] for name in INDEX_NAMES)
    tokens = int(lengths[indices].sum(dtype=np.int64))
    if not tokens:
        return "the split has no token"
    plan = epoch_plan(tokens, sequence_length, num_samples, extra_token=extra_token, drop_last=drop_last)
    if len(shuffle_index) != plan.num_samples:
        return f"it has {len(shuffle_index)} samples, the data gives {plan.num_samples}"
    if len(document_index) != plan.num_epochs * len(indices):
        return f"it has {len(document_index)} documents, {plan.num_epochs} epochs of {len(indices)} are needed"
    first, last, end = int(document_index.min()), int(document_index.max()), int(indices.max())
    if first < 0 or last > end:
        return f"its documents are {first}..{last}, the split ends at {end}"
    if (np.bincount(document_index, minlength=end + 1)[indices] != plan.num_epochs).any():
        return "its documents are not those of the split"
    wide = sample_index.dtype == np.int64
    expected = _C.build_sample_index(
        lengths, np.asarray(document_index), sequence_length, extra_token, plan.num_samples, wide
    )
    if not np.array_equal(expected, sample_index):
        row = int((expected != sample_index).any(axis=1).argmax())
        return f"sample {row} begins at {sample_index[row].tolist()}, the data says {expected[row].tolist()}"
    present = np.zeros(plan.num_samples, dtype=np.bool_)
    if plan.num_samples and 0 <= int(shuffle_index.min()) <= int(shuffle_index.max()) < plan.num_samples:
        present[shuffle_index] = True
    return None if present.all() else "its shuffle index is not a permutation"
