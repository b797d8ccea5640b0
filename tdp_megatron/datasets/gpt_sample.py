"""From the tokens of one sample to what the model is given: labels, loss mask, positions, attention mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.types import Int64Array

__all__ = ["HARMLESS_ID", "SampleRules", "assemble", "causal_mask"]

#: What padding is replaced by, so that an embedding can look it up.
HARMLESS_ID = 0


@dataclass(frozen=True, slots=True)
class SampleRules:
    """How samples are made; the fields are those of ``GPTDatasetConfig``."""

    sequence_length: int
    eod: int | None
    pad: int
    pad_by_id: bool
    """Whether every token with the pad id counts as padding."""
    extra_token: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask: bool
    inter_document_masking: bool


def causal_mask(sequence_length: int) -> npt.NDArray[np.bool_]:
    """bool [1, S, S], True where attention is not allowed: at later positions."""
    return np.triu(np.ones((1, sequence_length, sequence_length), dtype=np.bool_), k=1)


def _ends_before(ends: npt.NDArray[np.bool_]) -> Int64Array:
    """int64 [S], ends of documents before each position: the number of its document in the sample."""
    counts: Int64Array = np.cumsum(ends) - ends
    return counts


def _restarted_positions(ends: npt.NDArray[np.bool_]) -> Int64Array:
    positions = np.arange(len(ends), dtype=np.int64)
    starts = np.zeros_like(positions)
    starts[1:] = np.where(ends[:-1], positions[1:], 0)
    restarted: Int64Array = positions - np.maximum.accumulate(starts)
    return restarted


def _document_bounds(counts: Int64Array, sequence_length: int) -> Int64Array:
    """Cumulative lengths of a sample's documents; what is missing or too much is the last document's."""
    bounds = np.concatenate([[0], np.cumsum(counts)])
    bounds[-1] = sequence_length
    bounds = np.minimum(bounds, sequence_length)
    if len(bounds) > sequence_length + 1:
        bounds = np.unique(bounds)  # only empty documents can be too many
    return bounds


def assemble(
    tokens: Int64Array, counts: Int64Array, rules: SampleRules, shared_mask: npt.NDArray[np.bool_] | None
) -> dict[str, npt.NDArray[Any]]:
    """One sample.

    Args:
        tokens: int64 [n], n <= S + extra_token; fewer are padded.
        counts: int64 [d], tokens from each document.
        rules: how.
        shared_mask: the plain causal mask, for rules that need no other.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` int64 [S], ``loss_mask`` float32 [S]; ``attention_mask`` bool
        [1, S, S], True where masked, if asked for; with inter-document masking instead ``cu_seqlens``
        int32 [S + 1] and ``max_seqlen`` int32 [].
    """
    size = rules.sequence_length
    text = np.full(size + rules.extra_token, rules.pad, dtype=np.int64)
    text[: len(tokens)] = tokens
    ids = text[:size].copy()
    labels = np.full(size, rules.pad, dtype=np.int64)
    labels[: len(text) - 1] = text[1:]
    if rules.pad_by_id:
        padding = text == rules.pad
    else:
        padding = np.arange(len(text)) >= len(tokens)
    no_label = np.ones(size, dtype=np.bool_)
    no_label[: len(text) - 1] = padding[1:]
    ends = ids == rules.eod if rules.eod is not None else np.zeros(size, dtype=np.bool_)
    if not rules.pad_by_id:
        ends &= ~padding[:size]

    loss_mask = np.ones(size, dtype=np.float32)
    if rules.eod_mask_loss:
        loss_mask[ends] = 0.0
    loss_mask[no_label] = 0.0
    positions = _restarted_positions(ends) if rules.reset_position_ids else np.arange(size, dtype=np.int64)
    sample: dict[str, npt.NDArray[Any]] = {"labels": labels, "loss_mask": loss_mask}
    if rules.create_attention_mask and not rules.inter_document_masking:
        if rules.reset_attention_mask:
            document = _ends_before(ends)
            sample["attention_mask"] = causal_mask(size) | (document[None, :, None] != document[None, None, :])
        else:
            sample["attention_mask"] = causal_mask(size) if shared_mask is None else shared_mask
    if rules.inter_document_masking:
        bounds = _document_bounds(counts, size)
        cu_seqlens = np.full(size + 1, size, dtype=np.int32)
        cu_seqlens[: len(bounds)] = bounds
        lengths = np.diff(bounds)
        positions = np.arange(size, dtype=np.int64) - np.repeat(bounds[:-1], lengths)
        sample["cu_seqlens"] = cu_seqlens
        sample["max_seqlen"] = np.array(lengths.max(), dtype=np.int32)
    ids[padding[:size]] = HARMLESS_ID
    labels[no_label] = HARMLESS_ID
    sample["tokens"] = ids
    sample["position_ids"] = positions
    return sample
