"""Samples that users bring as mappings of tensors: what they must hold, and a reader over them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.types import IGNORE_LABEL, Int64Array, Sample, SampleBlock, SampleReader

__all__ = ["FlatSamples", "MappingReader", "block_from_items", "read_block", "token_key_specs", "with_values"]

#: Keys that are always per token.
STANDARD_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "loss_mask": np.dtype(np.float32),
    "position_ids": np.dtype(np.int64),
}


def _as_array(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)


def _joined(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Values one after the other; torch joins its own tensors far faster than NumPy joins views of them."""
    torch = sys.modules.get("torch")
    if torch is not None and all(type(v) is torch.Tensor for v in values):
        joined: npt.NDArray[Any] = torch.cat(list(values)).cpu().numpy()
        return joined
    return np.concatenate([_as_array(v) for v in values])


def _lengths(values: Sequence[Any]) -> list[int]:
    """First dimension of each value; ``len`` of a torch tensor takes microseconds, its ``size`` does not."""
    return [v.size(0) if hasattr(v, "detach") else len(v) for v in values]


#: Per-token keys with dtype and shape of one token's entry.
TokenKeySpecs: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class MappingReader:
    """User samples with the same keys, joined into one array per key.

    ``labels`` and ``loss_mask`` may be missing: then every token predicts the next.

    Args:
        items: mappings with ``tokens`` [S] and what else the samples have; at least one.
        names: what error messages call each of them.

    Raises:
        ValueError, TypeError: an item is not a sample; the message names it.
    """

    def __init__(self, items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        self._items = items
        self._names = names
        if "tokens" not in items[0]:
            raise ValueError(f"{names[0]} has no key 'tokens'; it has {sorted(map(str, items[0]))}")
        try:
            lengths = _lengths([item["tokens"] for item in items])
        except (TypeError, IndexError):  # a plain number: what is wrong with it is said below
            lengths = [0] * len(items)
        self.seqlens: Int64Array = np.array(lengths, dtype=np.int64)
        """int64 [n], tokens of each sample."""
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(self.seqlens)])
        """int64 [n + 1], where each sample begins in the arrays."""
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        """Per token key [sum of seqlens, ...]."""
        for key in STANDARD_TOKEN_KEYS:
            if key in items[0]:
                self.arrays[key] = self._join(key)
        tokens = self.arrays["tokens"]
        ends = self.offsets[1:][self.seqlens > 0] - 1
        if "labels" not in self.arrays:
            labels = np.append(tokens[1:], IGNORE_LABEL)[: len(tokens)].astype(np.int64)
            labels[ends] = IGNORE_LABEL
            self.arrays["labels"] = labels
        if "loss_mask" not in self.arrays:
            self.arrays["loss_mask"] = (self.arrays["labels"] != IGNORE_LABEL).astype(np.float32)

    def _join(self, key: str) -> npt.NDArray[Any]:
        try:
            values = [item[key] for item in self._items]
            joined = _joined(values)
            fits = _lengths(values) == self.seqlens.tolist()
        except (TypeError, ValueError, IndexError, RuntimeError, KeyError):
            self._complain(key)
            raise
        dtype = _DTYPES.get(key)
        if dtype is not None:
            fits = fits and joined.ndim == 1 and (dtype.kind != "i" or joined.dtype.kind in "iu")
        if not fits:
            self._complain(key)
        return np.ascontiguousarray(joined if dtype is None else joined.astype(dtype, copy=False))

    def _complain(self, key: str) -> None:
        """Raise for the first item whose ``key`` cannot be joined with the others, and say why."""
        shapes = {np.shape(item[key])[1:] for item in self._items if key in item}
        for item, name, n in zip(self._items, self._names, self.seqlens.tolist(), strict=True):
            if key not in item:
                raise ValueError(f"{name} has no key {key!r}")
            array = _as_array(item[key])
            dtype = _DTYPES.get(key)
            if dtype is not None and array.ndim != 1:
                raise ValueError(f"{name}: {key} must have one dimension, has shape {array.shape}")
            if dtype is not None and dtype.kind == "i" and array.dtype.kind not in "iu":
                raise TypeError(f"{name}: {key} must hold integers, has dtype {array.dtype}")
            if array.ndim == 0 or array.shape[0] != n:
                raise ValueError(f"{name}: {key} has shape {array.shape}, the sample has {n} tokens")
        if len(shapes) > 1:
            raise ValueError(f"key {key!r} has entries of different shapes per token: {sorted(shapes)}")

    def declare_token_keys(self, keys: Sequence[str]) -> None:
        """Treat user keys as per token: first dimension S, cut and packed like ``tokens``."""
        for key in keys:
            if key in self.arrays:
                continue
            if key not in self._items[0]:
                raise ValueError(f"{self._names[0]} has no key {key!r}, which token_keys names")
            self.arrays[key] = self._join(key)

    @property
    def num_loss_tokens(self) -> Int64Array:
        """int64 [n], positions with a loss."""
        running = np.concatenate([[0], np.cumsum(self.arrays["loss_mask"] != 0, dtype=np.int64)])
        counts: Int64Array = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return counts

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        return {key: array.dtype for key, array in self.arrays.items()}

    def token_shape(self, key: str) -> tuple[int, ...]:
        """Shape of one token's entry of ``key``; () for a plain number."""
        return self.arrays[key].shape[1:]

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        begins = self.offsets[sample_ids] + starts
        for key, array in out.items():
            source = self.arrays.get(key)
            if source is None or not len(sample_ids) or not source.size:
                continue
            width = source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
            _C.copy_spans(
                source.reshape(-1).view(np.uint8),
                begins * width,
                array.reshape(-1).view(np.uint8),
                destinations * width,
                lengths * width,
            )

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        return {k: v for k, v in self._items[sample_id].items() if k not in self.arrays}


def with_values(sample: Sample, **values: Any) -> Sample:
    """A sample with some keys replaced or added, and the same provenance; for a ``Mapper``'s function.

    New ``tokens`` drop the old labels, loss mask and position ids: give them, or they are derived.

    Args:
        sample: it is read.
        **values: tensors or arrays; per token where they are standard keys or declared to ``Pack``.

    Raises:
        ValueError: shapes do not fit together.
    """
    kept = dict(sample)
    if "tokens" in values:
        for key in STANDARD_TOKEN_KEYS:
            kept.pop(key, None)
    reader = MappingReader([{**kept, **values}], [f"sample {sample.ref}"])
    return Sample(reader, 0, int(reader.seqlens[0]), sample.ref, int(reader.num_loss_tokens[0]))


def block_from_items(items: Sequence[Any], dataset_id: int, first_number: int) -> SampleBlock:
    """A block from what a user's node yields: ``Sample``s or plain mappings.

    Args:
        items: samples in order.
        dataset_id: provenance of plain mappings, and what is added to the dataset ids of ``Sample``s.
        first_number: sample number of the first item.

    Raises:
        TypeError: an item is not a mapping.
        ValueError: a mapping is not a sample; the message names it.
    """
    n = len(items)
    reader_index, sample_ids, seqlens, loss = (np.zeros(n, dtype=np.int64) for _ in range(4))
    refs = np.stack([np.full(n, dataset_id, dtype=np.int64), np.arange(first_number, first_number + n)], axis=1)
    readers: list[SampleReader] = []
    index: dict[int, int] = {}
    plain: dict[frozenset[str], list[int]] = {}
    for i, item in enumerate(items):
        if isinstance(item, Sample):
            if id(item.reader) not in index:
                index[id(item.reader)] = len(readers)
                readers.append(item.reader)
            reader_index[i] = index[id(item.reader)]
            sample_ids[i], seqlens[i], loss[i] = item.sample_id, item.seqlen, item.num_loss_tokens
            refs[i] = dataset_id + item.ref[0], item.ref[1]
        elif isinstance(item, Mapping):
            plain.setdefault(frozenset(item), []).append(i)
        else:
            raise TypeError(
                f"a source must yield mappings with a key 'tokens', source {dataset_id} gave {type(item).__name__}"
            )
    for places in plain.values():
        reader = MappingReader(
            [items[i] for i in places], [f"sample {first_number + i} of source {dataset_id}" for i in places]
        )
        reader_index[places] = len(readers)
        readers.append(reader)
        sample_ids[places] = np.arange(len(places))
        seqlens[places] = reader.seqlens
        loss[places] = reader.num_loss_tokens
    return SampleBlock(tuple(readers), reader_index, sample_ids, seqlens, loss, refs)


def token_key_specs(readers: Sequence[SampleReader]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Per-token keys of all readers together.

    Raises:
        ValueError: two readers disagree about a key's dtype or shape.
    """
    specs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for reader in readers:
        for key, dtype in reader.token_keys.items():
            shape = reader.token_shape(key) if isinstance(reader, MappingReader) else ()
            if specs.setdefault(key, (dtype, shape)) != (dtype, shape):
                known = specs[key]
                raise ValueError(
                    f"key {key!r} is {known[0]} {known[1]} per token in one sample and {dtype} {shape} in another"
                )
    return specs


@dataclass(frozen=True, slots=True)
class FlatSamples:
    """Samples that have been read, one after the other in one array per key."""

    block: SampleBlock
    specs: TokenKeySpecs
    offsets: Int64Array
    """int64 [n + 1], where each sample begins."""
    arrays: Mapping[str, npt.NDArray[Any]]
    """Per key [sum of seqlens, ...]."""
    values: tuple[Mapping[str, Any], ...]
    """Per sample, the keys that are not per token."""


def read_spans_by_reader(
    block: SampleBlock,
    indices: Int64Array,
    starts: Int64Array,
    lengths: Int64Array,
    destinations: Int64Array,
    out: Mapping[str, npt.NDArray[Any]],
) -> None:
    """Read spans of a block's samples, one call per reader.

    Args:
        block: the samples.
        indices: int64 [m], places in the block.
        starts: int64 [m], tokens from the start of each sample.
        lengths: int64 [m], tokens; spans of no token are passed over.
        destinations: int64 [m], elements.
        out: a flat array per key.
    """
    if len(block.readers) == 1 and lengths.all():
        block.readers[0].read_spans(block.sample_ids[indices], starts, lengths, destinations, out)
        return
    real = np.flatnonzero(lengths > 0)  # pads at the end of a pack belong to no sample
    reader_of = block.reader_index[indices[real]]
    for number, reader in enumerate(block.readers):
        rows = real[reader_of == number]
        if len(rows):
            reader.read_spans(block.sample_ids[indices[rows]], starts[rows], lengths[rows], destinations[rows], out)


def read_block(block: SampleBlock) -> FlatSamples:
    """Read all samples of a block."""
    values = tuple(
        block.readers[r].sample_values(i)
        for r, i in zip(block.reader_index.tolist(), block.sample_ids.tolist(), strict=True)
    )
    only = block.readers[0] if len(block.readers) == 1 else None
    if isinstance(only, MappingReader) and np.array_equal(block.sample_ids, np.arange(len(only.seqlens))):
        return FlatSamples(block, token_key_specs(block.readers), only.offsets, only.arrays, values)  # it lies ready
    offsets = np.zeros(len(block) + 1, dtype=np.int64)
    np.cumsum(block.seqlens, out=offsets[1:])
    specs = token_key_specs(block.readers)
    size = int(offsets[-1])
    arrays = {key: np.zeros((size, *shape), dtype=dtype) for key, (dtype, shape) in specs.items()}
    if "position_ids" in arrays:  # some samples bring their own, the others count from 0
        arrays["position_ids"][:] = np.arange(size) - np.repeat(offsets[:-1], block.seqlens)
    everything = np.arange(len(block), dtype=np.int64)
    read_spans_by_reader(block, everything, np.zeros_like(everything), block.seqlens, offsets[:-1], arrays)
    return FlatSamples(block, specs, offsets, arrays, values)
