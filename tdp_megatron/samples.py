"""Samples that users bring as mappings of tensors: what they must hold, and a reader over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.torch_dtypes import array_of, is_foreign, shown, tensor_of
from tdp_megatron.types import IGNORE_LABEL, Int64Array, Sample, SampleBlock, SampleReader, SampleRef

__all__ = [
    "MappingReader",
    "TokenFacts",
    "block_from_items",
    "token_facts",
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
        except (RuntimeError, TypeError):  # it has a gradient, or a dtype that NumPy lacks, or lies elsewhere
            array = array_of(value)
        return array
    return np.asarray(value)


_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What is true of all tokens of some samples; see ``csrc/wire.h``."""

    bits: int
    """Whether labels, loss mask and positions follow from the tokens."""
    largest: int
    """A number no token id needs more bits than, 2^62 where some are negative."""
    last_labels: Int64Array
    """int64 [n], label of each sample's last token."""
    num_loss_tokens: Int64Array
    """int64 [n], positions with a loss."""


def token_facts(columns: Mapping[str, _C.Column]) -> TokenFacts:
    """Read tokens, labels, loss mask and positions once.

    Args:
        columns: of the standard keys; ``position_ids`` may be missing.
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
        name_of: what error messages call the i-th of them.

    Raises:
        ValueError, TypeError: an item is not a sample; the message names it.
    """

    def __init__(self, items: list[Mapping[str, Any]], name_of: Callable[[int], str]) -> None:
        self._items = items
        self._name_of = name_of
        if "tokens" not in items[0]:
            raise ValueError(f"{name_of(0)} has no key 'tokens'; it has {sorted(map(str, items[0]))}")
        self.columns: dict[str, _C.Column] = {}
        """Per token key, where the samples lie."""
        self.specs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        """Per token key, dtype and shape of one token's entry."""
        self._add_column("tokens")
        self.seqlens: Int64Array = self.columns["tokens"].lengths
        """int64 [n], tokens of each sample."""
        for key in STANDARD_TOKEN_KEYS[1:]:
            if key in items[0]:
                self._add_column(key)
        if "labels" not in self.columns:
            self._derive("labels", self._next_tokens())
        if "loss_mask" not in self.columns:
            labels = flat_column(self.columns["labels"], self.specs["labels"], self.seqlens)
            self._derive("loss_mask", (labels != IGNORE_LABEL).astype(np.float32))
        self._facts: TokenFacts | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Columns point into this process's memory, so a copy makes its own.
        declared = [key for key in self.columns if key not in STANDARD_TOKEN_KEYS]
        return _reader_again, (self._items, self._name_of, declared)

    def _add_column(self, key: str) -> None:
        tokens = self.columns.get("tokens")
        dtype = _DTYPES.get(key)
        if dtype is not None:
            found = _C.Column.find(self._items, key, dtype.kind == "f", tokens)
            if found is not None:
                self.columns[key], self.specs[key] = found, (dtype, ())
                return
        arrays = self._arrays(key, dtype, None if tokens is None else tokens.lengths.tolist())
        self.columns[key], self.specs[key] = _C.Column(arrays), (arrays[0].dtype, arrays[0].shape[1:])

    def _derive(self, key: str, joined: npt.NDArray[Any]) -> None:
        self.columns[key], self.specs[key] = _C.Column(joined, self.seqlens), (joined.dtype, ())

    def _next_tokens(self) -> Int64Array:
        """The labels of plain text, all samples joined: the next token, none at the end."""
        tokens = flat_column(self.columns["tokens"], self.specs["tokens"], self.seqlens)
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        ends = np.cumsum(self.seqlens)[self.seqlens > 0] - 1
        labels[ends] = IGNORE_LABEL
        return labels

    def _arrays(self, key: str, dtype: np.dtype[Any] | None, wanted: list[int] | None) -> list[npt.NDArray[Any]]:
        """The values of a key as arrays that a column can be made of; slower than ``Column.find``, but of anything."""
        try:
            column = [_as_array(item[key]) for item in self._items]
        except KeyError:
            missing = next(i for i, item in enumerate(self._items) if key not in item)
            raise ValueError(f"{self._name_of(missing)} has no key {key!r}") from None
        first = column[0]
        kind, entry = (first.dtype, first.shape[1:]) if dtype is None else (dtype, ())
        if kind.hasobject:
            raise TypeError(f"{self._name_of(0)}: {key} is an array of Python objects; tokens have plain numbers")
        for i, array in enumerate(column):
            shape = array.shape
            if array.dtype == kind and shape[1:] == entry and shape and (wanted is None or shape[0] == wanted[i]):
                column[i] = np.require(array, requirements=["C", "A"])
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
        name = self._name_of(index)
        if dtype is not None and array.ndim != 1:
            raise ValueError(f"{name}: {key} must have one dimension, has shape {array.shape}")
        if array.ndim == 0 or (length is not None and array.shape[0] != length):
            raise ValueError(f"{name}: {key} has shape {array.shape}, the sample has {length} tokens")
        if dtype is None:
            raise ValueError(
                f"{name}: {key} has dtype {shown(array.dtype)} and shape {array.shape[1:]} per token, other "
                "samples differ"
            )
        if dtype.kind == "i" and array.dtype.kind not in "iu":
            raise TypeError(f"{name}: {key} must hold integers, has dtype {shown(array.dtype)}")
        if is_foreign(array.dtype):
            array = tensor_of(array).float().numpy()
        if array.dtype.kind == "u" and array.itemsize == 8 and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"{name}: {key} holds {int(array.max())}, more than int64 holds")
        return np.ascontiguousarray(array.astype(dtype))

    def declare_token_keys(self, keys: Sequence[str]) -> None:
        """Treat user keys as per token: first dimension S, cut and packed like ``tokens``."""
        for key in keys:
            if key not in self.columns:
                if key not in self._items[0]:
                    raise ValueError(f"{self._name_of(0)} has no key {key!r}, which token_keys names")
                self._add_column(key)

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
        return {key: dtype for key, (dtype, _) in self.specs.items()}

    def token_shape(self, key: str) -> tuple[int, ...]:
        """Shape of one token's entry of ``key``; () for a plain number."""
        return self.specs[key][1]

    def read_spans(
        self,
        sample_ids: Int64Array,
        starts: Int64Array,
        lengths: Int64Array,
        destinations: Int64Array,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        for key, array in out.items():
            if key in self.columns and lengths.any():
                width = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
                self.columns[key].copy_spans(sample_ids, starts, lengths, as_bytes(array), destinations * width)

    @property
    def has_values(self) -> bool:
        """Whether the samples, which all have the same keys, have some that are not per token."""
        return not self._items[0].keys() <= self.columns.keys()

    def sample_values(self, sample_id: int) -> Mapping[str, Any]:
        item = self._items[sample_id]
        if item.keys() <= self.columns.keys():
            return _NO_VALUES
        return {k: v for k, v in item.items() if k not in self.columns}


def _reader_again(
    items: list[Mapping[str, Any]], name_of: Callable[[int], str], declared: Sequence[str]
) -> MappingReader:
    reader = MappingReader(items, name_of)
    reader.declare_token_keys(declared)
    return reader


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
    reader = MappingReader([{**kept, **values}], partial(_name_of_ref, sample.ref))
    return Sample(reader, 0, int(reader.seqlens[0]), sample.ref, int(reader.num_loss_tokens[0]))


def _name_of_ref(ref: SampleRef, index: int) -> str:
    return f"sample {ref}"


class _NameOf:
    """What messages call the samples of a user's node; text is made when it is needed."""

    def __init__(self, places: list[int], dataset_id: int, first_number: int, stride: int) -> None:
        self._places, self._dataset_id = places, dataset_id
        self._first_number, self._stride = first_number, stride

    def __call__(self, index: int) -> str:
        return f"sample {self._first_number + self._stride * self._places[index]} of source {self._dataset_id}"


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
    keys, places = None, []
    for i, item in enumerate(items):
        if type(item) is dict or (isinstance(item, Mapping) and not isinstance(item, Sample)):
            if item.keys() != keys:  # mostly they are those of the item before
                keys = item.keys()
                places = plain.setdefault(frozenset(keys), [])
            places.append(i)
        elif isinstance(item, Sample):
            if id(item.reader) not in index:
                index[id(item.reader)] = len(readers)
                readers.append(item.reader)
            reader_index[i] = index[id(item.reader)]
            sample_ids[i], seqlens[i], loss[i] = item.sample_id, item.seqlen, item.num_loss_tokens
            refs[i] = dataset_id + item.ref[0], item.ref[1]
        else:
            raise TypeError(
                f"a source must yield mappings with a key 'tokens', source {dataset_id} gave {type(item).__name__}"
            )
    for places in plain.values():
        reader = MappingReader([items[i] for i in places], _NameOf(places, dataset_id, first_number, stride))
        reader_index[places] = len(readers)
        readers.append(reader)
        sample_ids[places] = np.arange(len(places))
        seqlens[places] = reader.seqlens
        loss[places] = reader.num_loss_tokens
    return SampleBlock(tuple(readers), reader_index, sample_ids, seqlens, loss, refs)


def flat_column(
    column: _C.Column, spec: tuple[np.dtype[Any], tuple[int, ...]], seqlens: Int64Array
) -> npt.NDArray[Any]:
    """The samples of a column one after the other, [sum of seqlens, ...], a copy."""
    dtype, shape = spec
    joined = np.empty((int(seqlens.sum()), *shape), dtype=dtype)
    ids = np.arange(len(seqlens), dtype=np.int64)
    width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    column.copy_spans(ids, np.zeros_like(ids), seqlens, as_bytes(joined), (np.cumsum(seqlens) - seqlens) * width)
    return joined


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
