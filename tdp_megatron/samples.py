"""Samples that users bring as mappings of tensors: what they must hold, and a reader over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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


def _token_array(values: Mapping[str, Any], key: str, seqlen: int | None, name: str) -> npt.NDArray[Any]:
    array = _as_array(values[key])
    dtype = _DTYPES.get(key)
    if dtype is not None:
        if array.ndim != 1:
            raise ValueError(f"{name}: {key} must have one dimension, has shape {array.shape}")
        if dtype.kind == "i" and array.dtype.kind not in "iu":
            raise TypeError(f"{name}: {key} must hold integers, has dtype {array.dtype}")
        array = array.astype(dtype, copy=False)
    if seqlen is not None and (array.ndim == 0 or array.shape[0] != seqlen):
        raise ValueError(f"{name}: {key} has shape {array.shape}, the sample has {seqlen} tokens")
    return np.ascontiguousarray(array)


#: Per-token keys with dtype and shape of one token's entry.
TokenKeySpecs: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class MappingReader:
    """One user sample. ``labels`` and ``loss_mask`` may be missing: then every token predicts the next.

    Args:
        values: ``tokens`` [S] and what else the sample has.
        name: what error messages call it.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        if "tokens" not in values:
            raise ValueError(f"{name} has no key 'tokens'; it has {sorted(map(str, values))}")
        self._name = name
        tokens = _token_array(values, "tokens", None, name)
        self.seqlen = len(tokens)
        self._tokens: dict[str, npt.NDArray[Any]] = {"tokens": tokens}
        for key in STANDARD_TOKEN_KEYS[1:]:
            if key in values:
                self._tokens[key] = _token_array(values, key, self.seqlen, name)
        if "labels" not in self._tokens:
            self._tokens["labels"] = np.append(tokens[1:], IGNORE_LABEL)[: self.seqlen].astype(np.int64)
        if "loss_mask" not in self._tokens:
            self._tokens["loss_mask"] = (self._tokens["labels"] != IGNORE_LABEL).astype(np.float32)
        self._values = {k: v for k, v in values.items() if k not in STANDARD_TOKEN_KEYS}

    def declare_token_keys(self, keys: Sequence[str]) -> None:
        """Treat user keys as per token: first dimension S, cut and packed like ``tokens``."""
        for key in keys:
            if key in self._tokens:
                continue
            if key not in self._values:
                raise ValueError(f"{self._name} has no key {key!r}, which token_keys names")
            self._tokens[key] = _token_array(self._values, key, self.seqlen, self._name)
            del self._values[key]

    @property
    def num_loss_tokens(self) -> int:
        """Positions with a loss."""
        return int(np.count_nonzero(self._tokens["loss_mask"]))

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        return {key: array.dtype for key, array in self._tokens.items()}

    def token_shape(self, key: str) -> tuple[int, ...]:
        """Shape of one token's entry of ``key``; () for a plain number."""
        return self._tokens[key].shape[1:]

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        for start, length, at in zip(starts.tolist(), lengths.tolist(), destinations.tolist(), strict=True):
            for key, array in out.items():
                if key in self._tokens:
                    array[at : at + length] = self._tokens[key][start : start + length]

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        return self._values


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
    reader = MappingReader({**kept, **values}, f"sample {sample.ref}")
    return Sample(reader, 0, reader.seqlen, sample.ref, reader.num_loss_tokens)


def block_from_items(items: Sequence[Any], dataset_id: int, first_number: int) -> SampleBlock:
    """A block from what a user's node yields: ``Sample``s or plain mappings.

    Args:
        items: samples in order.
        dataset_id: provenance of plain mappings, and what is added to the dataset ids of ``Sample``s.
        first_number: sample number of the first such item.

    Raises:
        TypeError: an item is not a mapping.
        ValueError: a mapping is not a sample; the message names it.
    """
    readers: list[SampleReader] = []
    index: dict[int, int] = {}
    rows: list[tuple[int, int, int, int, int, int]] = []
    for i, item in enumerate(items):
        if isinstance(item, Sample):
            reader, sample_id = item.reader, item.sample_id
            ref = (dataset_id + item.ref[0], item.ref[1])
            seqlen, loss = item.seqlen, item.num_loss_tokens
        elif isinstance(item, Mapping):
            reader = MappingReader(item, f"sample {first_number + i} of source {dataset_id}")
            sample_id, ref, seqlen, loss = 0, (dataset_id, first_number + i), reader.seqlen, reader.num_loss_tokens
        else:
            raise TypeError(
                f"a source must yield mappings with a key 'tokens', source {dataset_id} gave {type(item).__name__}"
            )
        if id(reader) not in index:
            index[id(reader)] = len(readers)
            readers.append(reader)
        rows.append((index[id(reader)], sample_id, seqlen, loss, *ref))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 6)
    columns = [np.ascontiguousarray(table[:, c]) for c in range(4)]
    return SampleBlock(tuple(readers), columns[0], columns[1], columns[2], columns[3], table[:, 4:].copy())


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
    real = np.flatnonzero(lengths > 0)  # pads at the end of a pack belong to no sample
    reader_of = block.reader_index[indices[real]]
    for number, reader in enumerate(block.readers):
        rows = real[reader_of == number]
        if len(rows):
            reader.read_spans(block.sample_ids[indices[rows]], starts[rows], lengths[rows], destinations[rows], out)


def read_block(block: SampleBlock) -> FlatSamples:
    """Read all samples of a block."""
    offsets = np.zeros(len(block) + 1, dtype=np.int64)
    np.cumsum(block.seqlens, out=offsets[1:])
    specs = token_key_specs(block.readers)
    size = int(offsets[-1])
    arrays = {key: np.zeros((size, *shape), dtype=dtype) for key, (dtype, shape) in specs.items()}
    if "position_ids" in arrays:  # some samples bring their own, the others count from 0
        arrays["position_ids"][:] = np.arange(size) - np.repeat(offsets[:-1], block.seqlens)
    everything = np.arange(len(block), dtype=np.int64)
    read_spans_by_reader(block, everything, np.zeros_like(everything), block.seqlens, offsets[:-1], arrays)
    values = tuple(
        block.readers[r].sample_values(i)
        for r, i in zip(block.reader_index.tolist(), block.sample_ids.tolist(), strict=True)
    )
    return FlatSamples(block, specs, offsets, arrays, values)
