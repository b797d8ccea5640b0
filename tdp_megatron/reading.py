"""Reading many samples at once, whoever reads them: spans of a block, or the whole block as flat columns."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.samples import MappingReader, TokenFacts, flat_column, token_facts
from tdp_megatron.types import Int64Array, SampleBlock, SampleReader

__all__ = [
    "READERS_AT_ONCE",
    "FlatSamples",
    "PackingKeys",
    "native_readers",
    "read_block",
    "read_spans_by_reader",
    "token_key_specs",
]

#: Files that one native call reads from. They are all mapped at that time, so not many more than are kept open.
READERS_AT_ONCE = 32

#: Per-token keys with dtype and shape of one token's entry.
TokenKeySpecs: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


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
    """Samples that have been read, in order.

    Args:
        block: the samples.
        specs: per-token keys.
        columns: per token key, where the samples lie.
        values: per sample, the keys that are not per token; empty when no sample has any.
        reader: the reader that holds exactly these samples, if one does.
    """

    def __init__(
        self,
        block: SampleBlock,
        specs: TokenKeySpecs,
        columns: Mapping[str, _C.Column],
        values: tuple[Mapping[str, Any], ...],
        reader: MappingReader | None = None,
    ) -> None:
        self.block = block
        self.specs = specs
        self.columns = columns
        self.values = values
        self._reader = reader

    def joined(self, key: str) -> npt.NDArray[Any]:
        """The samples one after the other, [sum of seqlens, ...], a copy."""
        return flat_column(self.columns[key], self.specs[key], self.block.seqlens)

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
    places = indices[real]
    reader_of, sample_ids = block.reader_index[places], block.sample_ids[places]
    spans = (starts[real], lengths[real], destinations[real])
    numbers = np.unique(reader_of)
    for first in range(0, len(numbers), READERS_AT_ONCE):
        some = numbers[first : first + READERS_AT_ONCE]
        natives = native_readers([block.readers[number] for number in some.tolist()])
        if natives:
            rows = np.flatnonzero((reader_of >= some[0]) & (reader_of <= some[-1]))
            reader_index: Int64Array = np.searchsorted(some, reader_of[rows])
            own = [part[rows] for part in (sample_ids, *spans)]
            keys = out["tokens"], out["labels"], out["loss_mask"], out.get("position_ids")
            _C.read_spans(natives, reader_index, own[0], own[1], own[2], own[3], *keys)
            continue
        for number in some.tolist():
            rows = np.flatnonzero(reader_of == number)
            block.readers[number].read_spans(sample_ids[rows], *(part[rows] for part in spans), out)


def native_readers(readers: Sequence[SampleReader]) -> list[_C.SpanReader]:
    """The native readers of samples that all lie in mapped files, for one call to read them all; none if one does not.

    Each keeps its files mapped, so no more than ``READERS_AT_ONCE`` of them should be held.
    """
    natives: list[_C.SpanReader] = []
    for reader in readers:
        make = getattr(reader, "native", None)
        native = None if make is None else make()
        if native is None or not native.is_mapped:
            return []
        natives.append(native)
    return natives


def read_block(block: SampleBlock) -> FlatSamples:
    """Read all samples of a block."""
    values: tuple[Mapping[str, Any], ...] = ()
    if any(not isinstance(reader, MappingReader) or reader.has_values for reader in block.readers):
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
    columns = {key: _C.Column(array, block.seqlens) for key, array in arrays.items()}
    return FlatSamples(block, specs, columns, values)


@dataclass(frozen=True, slots=True)
class PackingKeys:
    """User keys, one int64 per sample, that say which samples share a microbatch and which do not."""

    together_key: str | None = None
    """Samples of a global batch with the same value from 0 up share a microbatch; -1 is no value."""
    apart_key: str | None = None
    """Samples with the same value from 0 up are in different microbatches."""

    def __post_init__(self) -> None:
        for name in ("together_key", "apart_key"):
            key = getattr(self, name)
            if key is not None and (not isinstance(key, str) or not key):
                raise TypeError(f"{name} must be the name of a key of the samples, or None, got {key!r}")

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """``schedule``'s argument and the samples' key, of each that is set."""
        pairs = (("together", self.together_key), ("apart", self.apart_key))
        return tuple((argument, key) for argument, key in pairs if key is not None)

    def read(self, block: SampleBlock) -> Int64Array:
        """The values of a block's samples, int64 [n, number of keys].

        Raises:
            ValueError: a sample has no such key, or a value below -1 or above int64.
            TypeError: a value is no integer.
        """
        names = self.names
        columns = np.zeros((len(block), len(names)), dtype=np.int64)
        if names:
            for row, (reader, sample_id) in enumerate(
                zip(block.reader_index.tolist(), block.sample_ids.tolist(), strict=True)
            ):
                values = block.readers[reader].sample_values(sample_id)
                for column, (argument, key) in enumerate(names):
                    try:
                        columns[row, column] = _key_value(values, key)
                    except (TypeError, ValueError) as error:
                        source, number = block.refs[row].tolist()
                        raise type(error)(
                            f"sample {number} of source {source} {error}; {argument}_key names {key!r}"
                        ) from None
        return columns

    def arguments(self, columns: Int64Array) -> dict[str, Any]:
        """``schedule``'s arguments from the values of all samples, int64 [n, number of keys]."""
        return {argument: columns[:, i] for i, (argument, _) in enumerate(self.names)}


def _key_value(values: Mapping[str, Any], key: str) -> int:
    if key not in values:
        raise ValueError(
            f"has no key {key!r} with one value per sample (token files have none; a Mapper with with_values adds it)"
        )
    value = values[key]
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:
        value = value.item()
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f"has the key {key!r} with the value {value!r}, which is no integer")
    if not -1 <= number < 1 << 63:
        raise ValueError(f"has the key {key!r} with the value {number}; keys go from 0 to 2^63 - 1, -1 is none")
    return number
