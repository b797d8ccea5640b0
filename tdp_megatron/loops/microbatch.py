"""What a loop's data iterator yields, as a list of samples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tdp_megatron.distributed.exchange import digest_of
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.reading import FlatSamples, PackingKeys, read_block
from tdp_megatron.samples import MappingReader, block_from_items
from tdp_megatron.types import Int64Array

__all__ = ["LocalSamples", "lengths_of", "read_microbatches", "samples_of", "split_packed"]

#: Keys that describe lengths and are not handed on.
LENGTH_KEYS = ("original_seq_len", "padded_seq_len")
_PACK_KEYS = ("cu_seqlens", "cu_seqlens_padded", "batch_idx", "max_seqlen")
#: Samples are numbered by data-parallel rank first, as Megatron does.
_RANK_STRIDE = 1 << 40
_NO_KEYS = PackingKeys()


@dataclass(frozen=True, slots=True)
class LocalSamples:
    """What this rank contributes to a step: its CP share of what its data-parallel rank has read."""

    flat: FlatSamples
    order: Int64Array
    """int64 [n], sort keys that number all samples by data-parallel rank."""
    facts: Int64Array
    """int64 [n, 1 + number of keys], lengths to pad to, tokens, and what the keys say."""
    shared: int
    """A number that its CP neighbours have, too, where they have read samples of the same lengths."""


def read_microbatches(
    items: list[Any], groups: LoopGroups, token_keys: tuple[str, ...] = (), keys: PackingKeys = _NO_KEYS
) -> LocalSamples:
    """Samples of some items of the data iterator; CP ranks, which read the same items, share them out.

    Args:
        items: what the iterator gave.
        groups: this process's place.
        token_keys: user keys that are per token.
        keys: user keys that the plan goes by.
    """
    samples = [sample for item in items for sample in samples_of(item)]
    cut, padded = lengths_of(samples)
    mine = np.arange(groups.cp_rank, len(cut), groups.layout.cp, dtype=np.int64)
    block = block_from_items([cut[i] for i in mine.tolist()], groups.dp_rank, 0)
    for reader in block.readers:
        if isinstance(reader, MappingReader):
            reader.declare_token_keys(token_keys)
    block.refs[:, 1] = mine
    facts = np.concatenate([padded[mine][:, None], keys.read(block)], axis=1)
    shared = digest_of(json.dumps([[len(sample["tokens"]) for sample in cut], padded.tolist()]))
    return LocalSamples(read_block(block), groups.dp_rank * _RANK_STRIDE + mine, facts, shared)


def samples_of(item: Any) -> list[dict[str, Any]]:
    """The samples of one item of a data iterator.

    Args:
        item: one sample (a mapping with ``tokens`` [S]), a list of them, a batch of one row each (``tokens``
            [B, S]), or a packed sample with ``cu_seqlens``.

    Raises:
        TypeError: it is something else.
        ValueError: a mapping has no tokens, or rows of different number.
    """
    if isinstance(item, Mapping):
        if "tokens" not in item:
            raise ValueError(f"a microbatch needs the key 'tokens'; it has {sorted(map(str, item))}")
        if item.get("cu_seqlens") is not None:
            return split_packed(item)
        tokens = torch.as_tensor(item["tokens"])
        if tokens.ndim == 1:
            return [dict(item)]
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have one or two dimensions, got shape {tuple(tokens.shape)}")
        rows: list[dict[str, Any]] = [{} for _ in range(len(tokens))]
        for key, value in item.items():
            if value is None:
                continue
            count = len(value) if hasattr(value, "__len__") and getattr(value, "ndim", None) != 0 else 0
            if count != len(rows):
                raise ValueError(
                    f"key {key!r} has {count} rows, tokens have {len(rows)}; give it a row per sample, or leave it out"
                )
            for row, part in zip(rows, value, strict=True):
                row[key] = part
        return rows
    if isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
        return [sample for part in item for sample in samples_of(part)]
    raise TypeError(f"a data iterator must yield mappings or lists of mappings, got {type(item).__name__}")


def split_packed(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sequences of a packed sample, empty ones left out.

    Args:
        item: ``cu_seqlens`` [n + 1], ``tokens`` [S] with S at least ``cu_seqlens[-1]``, and other per-token keys
            [S, ...]; a leading dimension of 1 is taken off. Other keys go with every sequence.

    Raises:
        ValueError: ``cu_seqlens`` do not rise from 0 to at most S.
    """
    cu = torch.as_tensor(item["cu_seqlens"]).reshape(-1).tolist()
    size = len(torch.as_tensor(item["tokens"]).reshape(-1))
    if cu[:1] != [0] or cu[-1] > size or any(b < a for a, b in itertools.pairwise(cu)):
        raise ValueError(f"cu_seqlens {cu} do not describe {size} tokens")
    parts: list[dict[str, Any]] = []
    for begin, end in itertools.pairwise(cu):
        if end == begin:
            continue
        part: dict[str, Any] = {}
        for key, value in item.items():
            if key in _PACK_KEYS:
                continue
            shape = tuple(getattr(value, "shape", ()))
            flat = value[0] if shape[:2] == (1, size) else value
            per_token = shape[:1] == (size,) or shape[:2] == (1, size)
            part[key] = flat[begin:end] if per_token else value
        parts.append(part)
    return parts


def lengths_of(samples: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Int64Array]:
    """Samples cut to their real length, and the length each one is to be padded to.

    Megatron's datasets pad every sample in advance and say so in ``original_seq_len`` and ``padded_seq_len``. The pads
    are not sent anywhere; the padded lengths decide the plan, so that packs come out as Megatron makes them.

    Returns:
        The samples without the length keys, and int64 [n] padded lengths (the real ones where none are given).

    Raises:
        ValueError: lengths that contradict the tokens.
    """
    cut: list[dict[str, Any]] = []
    padded = np.zeros(len(samples), dtype=np.int64)
    for i, sample in enumerate(samples):
        size = len(sample["tokens"])
        real = _scalar(sample.get("original_seq_len"), size)
        padded[i] = _scalar(sample.get("padded_seq_len"), size if "original_seq_len" in sample else real)
        if not 0 <= real <= min(size, int(padded[i])):
            raise ValueError(
                f"sample {i} has {size} tokens, original_seq_len {real} and padded_seq_len {int(padded[i])}"
            )
        row: dict[str, Any] = {}
        for key, value in sample.items():
            if key in LENGTH_KEYS:
                continue
            per_token = key in ("tokens", "labels", "loss_mask", "position_ids") and value is not None
            if value is not None:
                row[key] = value[:real] if per_token else value
        cut.append(row)
    return cut, padded


def _scalar(value: Any, default: int) -> int:
    return default if value is None else int(torch.as_tensor(value).reshape(-1)[0])
