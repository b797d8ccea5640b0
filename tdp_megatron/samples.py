"""Samples that users bring as mappings of tensors: what they must hold, and a reader over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.types import IGNORE_LABEL, Int64Array, Sample, SampleBlock, SampleReader

__all__ = [
    "FlatSamples",
    "MappingReader",
    "TokenFacts",
    "block_from_items",
    "read_block",
    "token_facts",
    "token_key_specs",
    "with_values",
]

#: Keys that are always per token.
STANDARD_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int64),
    "labels": np.dtype(np.int64),
    "loss_mask": np.dtype(np.float32),
    "position_ids": np.dtype(np.int64),
}


def _as_array(value: Any) -> npt.NDArray[Any]:
    if type(value) is np.ndarray:
        return value
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        try:
            array: npt.NDArray[Any] = value.numpy()
        except (RuntimeError, TypeError):  # it has a gradient, or lies on another device
            array = value.detach().cpu().numpy()
        return array
    return np.asarray(value)


_NO_VALUES: Mapping[str, Any] = MappingProxyType({})

#: Per-token keys with dtype and shape of one token's entry.
TokenKeySpecs: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What is true of all tokens of some samples; see ``csrc/wire.h``."""

    bits: int
    """Whether labels, loss mask and positions follow from the tokens."""
    largest: int
    """Largest token id, 2^62 where some are negative."""
    last_labels: Int64Array
    """int64 [n], label of each sample's last token."""
    num_loss_tokens: Int64Array
    """int64 [n], positions with a loss."""


def token_facts(columns: Mapping[str, list[npt.NDArray[Any]]]) -> TokenFacts:
    """Read tokens, labels, loss mask and positions once.

    Args:
        columns: per standard key, one array per sample; ``position_ids`` may be missing.
    """
    return TokenFacts(
        *_C.scan_samples(
            columns["tokens"], columns["labels"], columns["loss_mask"], columns.get("position_ids"), IGNORE_LABEL
        )
    )


class MappingReader:
    """User samples with the same keys. ``labels`` and ``loss_mask`` may be missing: every token predicts the next.

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
        self.columns: dict[str, list[npt.NDArray[Any]]] = {}
        """Per token key, one contiguous array [S, ...] per sample."""
        tokens = self.columns["tokens"] = self._column("tokens", None)
        self.seqlens: Int64Array = np.array([len(t) for t in tokens], dtype=np.int64)
        """int64 [n], tokens of each sample."""
        for key in STANDARD_TOKEN_KEYS[1:]:
            if key in items[0]:
                self.columns[key] = self._column(key, self.seqlens)
        if "labels" not in self.columns:
            self.columns["labels"] = [np.append(t[1:], IGNORE_LABEL)[: len(t)].astype(np.int64) for t in tokens]
        if "loss_mask" not in self.columns:
            self.columns["loss_mask"] = [(v != IGNORE_LABEL).astype(np.float32) for v in self.columns["labels"]]
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(self.seqlens)])
        """int64 [n + 1], where each sample begins in the joined arrays."""
        self._joined: dict[str, npt.NDArray[Any]] = {}
        self._facts: TokenFacts | None = None

    def _column(self, key: str, seqlens: Int64Array | None) -> list[npt.NDArray[Any]]:
        dtype = _DTYPES.get(key)
        try:
            column = [_as_array(item[key]) for item in self._items]
        except KeyError:
            missing = next(name for item, name in zip(self._items, self._names, strict=True) if key not in item)
            raise ValueError(f"{missing} has no key {key!r}") from None
        wanted = None if seqlens is None else seqlens.tolist()
        first = column[0]
        kind, entry = (first.dtype, first.shape[1:]) if dtype is None else (dtype, ())
        for i, array in enumerate(column):
            shape = array.shape
            if array.dtype == kind and shape[1:] == entry and shape and (wanted is None or shape[0] == wanted[i]):
                if not array.flags.c_contiguous:
                    column[i] = np.ascontiguousarray(array)
                continue
            column[i] = self._converted(key, i, array, dtype, None if wanted is None else wanted[i])
        return column

    def _converted(
        self,
        key: str,
        index: int,
        array: npt.NDArray[Any],
        dtype: np.dtype[Any] | None,
        length: int | None,
    ) -> npt.NDArray[Any]:
        """An array in the dtype of its key, or an error that says what is wrong with it."""
        name = self._names[index]
        if dtype is not None and array.ndim != 1:
            raise ValueError(f"{name}: {key} must have one dimension, has shape {array.shape}")
        if array.ndim == 0 or (length is not None and array.shape[0] != length):
            raise ValueError(f"{name}: {key} has shape {array.shape}, the sample has {length} tokens")
        if dtype is None:
            raise ValueError(
                f"{name}: {key} has dtype {array.dtype} and shape {array.shape[1:]} per token, other samples differ"
            )
        if dtype.kind == "i" and array.dtype.kind not in "iu":
            raise TypeError(f"{name}: {key} must hold integers, has dtype {array.dtype}")
        if array.dtype.kind == "u" and array.itemsize == 8 and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"{name}: {key} holds {int(array.max())}, more than int64 holds")
        return np.ascontiguousarray(array.astype(dtype))

    def declare_token_keys(self, keys: Sequence[str]) -> None:
        """Treat user keys as per token: first dimension S, cut and packed like ``tokens``."""
        for key in keys:
            if key not in self.columns:
                if key not in self._items[0]:
                    raise ValueError(f"{self._names[0]} has no key {key!r}, which token_keys names")
                self.columns[key] = self._column(key, self.seqlens)

    def joined(self, key: str) -> npt.NDArray[Any]:
        """The samples one after the other, [sum of seqlens, ...]."""
        if key not in self._joined:
            self._joined[key] = np.concatenate(self.columns[key])
        return self._joined[key]

    @property
    def facts(self) -> TokenFacts:
        """What is true of the tokens; they are read once."""
        if self._facts is None:
            self._facts = token_facts(self.columns)
        return self._facts

    @property
    def num_loss_tokens(self) -> Int64Array:
        """int64 [n], positions with a loss."""
        return self.facts.num_loss_tokens

    @property
    def token_keys(self) -> Mapping[str, np.dtype[Any]]:
        return {key: column[0].dtype for key, column in self.columns.items()}

    def token_shape(self, key: str) -> tuple[int, ...]:
        """Shape of one token's entry of ``key``; () for a plain number."""
        return self.columns[key][0].shape[1:]

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
            if key not in self.columns or not lengths.any():
                continue
            source = self.joined(key)
            width = source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
            _C.copy_spans(
                source.reshape(-1).view(np.uint8),
                begins * width,
                array.reshape(-1).view(np.uint8),
                destinations * width,
                lengths * width,
            )

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        item = self._items[sample_id]
        if item.keys() <= self.columns.keys():
            return _NO_VALUES
        return {k: v for k, v in item.items() if k not in self.columns}


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


def block_from_items(items: Sequence[Any], dataset_id: int, first_number: int, stride: int = 1) -> SampleBlock:
    """A block from what a user's node yields: ``Sample``s or plain mappings.

    Args:
        items: samples in order.
        dataset_id: provenance of plain mappings, and what is added to the dataset ids of ``Sample``s.
        first_number: sample number of the first item.
        stride: how far the number of the next one is, where ranks take turns.

    Raises:
        TypeError: an item is not a mapping.
        ValueError: a mapping is not a sample; the message names it.
    """
    n = len(items)
    reader_index, sample_ids, seqlens, loss = (np.zeros(n, dtype=np.int64) for _ in range(4))
    refs = np.stack([np.full(n, dataset_id, dtype=np.int64), first_number + stride * np.arange(n)], axis=1)
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
        elif type(item) is dict or isinstance(item, Mapping):
            plain.setdefault(frozenset(item), []).append(i)
        else:
            raise TypeError(
                f"a source must yield mappings with a key 'tokens', source {dataset_id} gave {type(item).__name__}"
            )
    for places in plain.values():
        reader = MappingReader(
            [items[i] for i in places],
            [f"sample {first_number + stride * i} of source {dataset_id}" for i in places],
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


class FlatSamples:
    """Samples that have been read, in order; their arrays are joined when they are asked for.

    Args:
        block: the samples.
        specs: per-token keys.
        columns: per token key, one array per sample.
        values: per sample, the keys that are not per token.
        reader: the reader that holds exactly these samples, if one does.
    """

    def __init__(
        self,
        block: SampleBlock,
        specs: TokenKeySpecs,
        columns: Mapping[str, list[npt.NDArray[Any]]],
        values: tuple[Mapping[str, Any], ...],
        reader: MappingReader | None = None,
        joined: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.block = block
        self.specs = specs
        self.columns = columns
        self.values = values
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(block.seqlens)])
        """int64 [n + 1], where each sample begins in a joined array."""
        self._reader = reader
        self._joined = dict(joined or {})

    def joined(self, key: str) -> npt.NDArray[Any]:
        """The samples one after the other, [sum of seqlens, ...]."""
        if key not in self._joined:
            self._joined[key] = np.concatenate(self.columns[key])
        return self._joined[key]

    @property
    def facts(self) -> TokenFacts:
        """What is true of the tokens."""
        return self._reader.facts if self._reader is not None else token_facts(self.columns)


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
    specs = token_key_specs(block.readers)
    only = block.readers[0] if len(block.readers) == 1 else None
    if isinstance(only, MappingReader) and np.array_equal(block.sample_ids, np.arange(len(only.seqlens))):
        return FlatSamples(block, specs, only.columns, values, only)  # it lies ready
    offsets = np.concatenate([[0], np.cumsum(block.seqlens)])
    arrays = {key: np.zeros((int(offsets[-1]), *shape), dtype=dtype) for key, (dtype, shape) in specs.items()}
    if "position_ids" in arrays:  # some samples bring their own, the others count from 0
        arrays["position_ids"][:] = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], block.seqlens)
    everything = np.arange(len(block), dtype=np.int64)
    read_spans_by_reader(block, everything, np.zeros_like(everything), block.seqlens, offsets[:-1], arrays)
    edges = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    columns = {key: [array[begin:end] for begin, end in edges] for key, array in arrays.items()}
    return FlatSamples(block, specs, columns, values, joined=arrays)
