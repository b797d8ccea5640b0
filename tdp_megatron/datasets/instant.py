"""An order that needs no index: any sample of any epoch is computed from its number, and so is a blend.

Memory and start-up do not grow with the data. The permutations are Feistel networks with cycle walking (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); the blend keeps every dataset within one sample of its share
at every prefix (Tijdeman, "The chairman assignment problem", 1980).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tdp_megatron import _C
from tdp_megatron.datasets.readers import TokenFileReader
from tdp_megatron.indexed import IndexedDataset
from tdp_megatron.types import Int64Array

__all__ = ["InstantBlend", "InstantChunks", "InstantReader", "derive_key", "permute"]

#: Sequences whose order is permuted among each other, so that neighbours in the file are none in the samples.
WINDOW = 64

# Weights are rounded to this many parts; a period of the blend has about as many samples. Divisible by all numbers up
# to 16, so that simple ratios are exact and their periods short.
_PARTS = 720_720


def derive_key(*parts: int | str) -> int:
    """A 64-bit key, the same on every machine, that differs in every bit when a part differs."""
    text = "tdp_megatron:instant:" + ":".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def permute(places: Int64Array, size: int, key: int) -> Int64Array:
    """Where these places of a permuted order of [0, size) come from; every key is another permutation.

    Args:
        places: int64 [n], each in [0, size).
        size: at least 1.
        key: 64 bits, see ``derive_key``.
    """
    return _C.permute(np.ascontiguousarray(places, dtype=np.int64), size, key)


class InstantBlend:
    """Which dataset, and which of its samples, each sample of a blend is; for any sample number.

    Args:
        weights: one per dataset, not negative; rounded to parts of 1/720,720 of their sum, at least one.

    Raises:
        ValueError: a negative or infinite weight, or none that is positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        values = np.array(weights, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or not values.sum() > 0:
            raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)[:8]}")
        shares = np.round(values / values.sum() * _PARTS).astype(np.int64)
        shares[(values > 0) & (shares == 0)] = 1
        #: int64 [k], samples of each dataset in one period.
        self.shares: Int64Array = shares // math.gcd(*shares.tolist())
        self._dataset, self._sample = _C.blend_period(self.shares)

    @property
    def period(self) -> int:
        """Samples after which the order of the datasets repeats."""
        return len(self._dataset)

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Dataset and the dataset's own sample number of each position, both int64 [n]."""
        periods: Int64Array = positions // self.period
        places = positions - periods * self.period
        datasets: Int64Array = self._dataset[places].astype(np.int64)
        numbers: Int64Array = self._sample[places] + periods * self.shares[datasets]
        return datasets, numbers

    def counts(self, position: int) -> Int64Array:
        """int64 [k], samples of each dataset among the first ``position``."""
        periods, place = divmod(position, self.period)
        begun = np.bincount(self._dataset[:place], minlength=len(self.shares))
        result: Int64Array = periods * self.shares + begun
        return result


@dataclass(frozen=True)
class InstantChunks:
    """Fixed-length chunks of a range of sequences, in an order of their own in every epoch.

    The sequences are permuted within windows, laid end to end, cut into chunks, and the chunks are permuted.
    """

    dataset: IndexedDataset
    begin: int
    """First sequence."""
    end: int
    """One past the last sequence."""
    sequence_length: int
    extra_token: int
    seed: int
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.window < 1:
            raise ValueError(
                f"sequence_length and window must be at least 1, got {self.sequence_length} and {self.window}"
            )
        if not 0 <= self.begin <= self.end <= len(self.dataset):
            raise ValueError(f"sequences [{self.begin}, {self.end}) are not inside the {len(self.dataset)} there are")

    @property
    def byte_range(self) -> tuple[int, int]:
        """Where the sequences lie in the ``.bin``; the file is not opened for the whole of it."""
        if (self.begin, self.end) == (0, len(self.dataset)):
            return 0, self.dataset.num_tokens * self.dataset.dtype.itemsize
        pointers = self.dataset.sequence_pointers
        size = self.dataset.num_tokens * self.dataset.dtype.itemsize
        first, last = (int(pointers[i]) if i < len(pointers) else size for i in (self.begin, self.end))
        return first, last

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        first, last = self.byte_range
        return (last - first) // self.dataset.dtype.itemsize

    @property
    def samples_per_epoch(self) -> int:
        """Whole chunks."""
        return max(self.num_tokens - self.extra_token, 0) // self.sequence_length

    def keys(self, epoch: int) -> tuple[int, int]:
        """The keys of an epoch's two permutations: of the chunks, and of the sequences in windows."""
        return derive_key("chunks", self.seed, epoch), derive_key("windows", self.seed, epoch)

    def chunks(self, sample_ids: Int64Array, epoch: int) -> Int64Array:
        """Numbers of the chunks that these samples of one epoch, int64 [n] in [0, samples_per_epoch), are."""
        return permute(sample_ids, self.samples_per_epoch, self.keys(epoch)[0])

    def pieces(
        self, sample_ids: Int64Array, starts: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Byte offsets and token counts of parts of samples of any epoch, and where each part begins ([n + 1])."""
        index, (first, last) = self.dataset.index, self.byte_range
        epochs, places = np.divmod(sample_ids, self.samples_per_epoch)
        found: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        order: list[Int64Array] = []
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            begin = self.chunks(places[rows], epoch) * self.sequence_length + starts[rows]
            # A chunk ends where the next one begins, but for the extra token.
            room = self.sequence_length + self.extra_token - starts[rows]
            found.append(
                _C.instant_pieces(
                    index.sequence_lengths,
                    index.sequence_pointers,
                    self.begin,
                    self.end,
                    first,
                    last,
                    self.dataset.dtype.itemsize,
                    self.window,
                    self.keys(epoch)[1],
                    begin,
                    np.minimum(lengths[rows], room),
                )
            )
            order.append(rows)
        if len(found) == 1:
            return found[0]
        return _in_order(found, np.concatenate(order))


def _in_order(
    parts: Sequence[tuple[Int64Array, Int64Array, Int64Array]], rows: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pieces of several calls, their spans back in the order of ``rows``."""
    offsets, counts = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    sizes = np.concatenate([np.diff(part[2]) for part in parts])
    firsts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    spans = np.argsort(rows)
    take = np.repeat(firsts[spans], sizes[spans])
    begins = np.concatenate([[0], np.cumsum(sizes[spans])])
    take += np.arange(len(take)) - np.repeat(begins[:-1], sizes[spans])
    return offsets[take], counts[take], begins


class InstantReader(TokenFileReader):
    """Samples of ``InstantChunks``; sample numbers run on over the epochs."""

    def __init__(
        self, chunks: InstantChunks, eod_mask_loss: int | None = None, reset_position_ids: int | None = None
    ) -> None:
        super().__init__(chunks.dataset, eod_mask_loss, reset_position_ids)
        self.chunks = chunks

    def _make_native(self, source: npt.NDArray[np.uint8] | None) -> _C.SpanReader:
        chunks, index = self.chunks, self.chunks.dataset.index
        return _C.instant_reader(
            source,
            self._dtype_code,
            index.sequence_lengths,
            index.sequence_pointers,
            chunks.begin,
            chunks.end,
            *chunks.byte_range,
            chunks.window,
            chunks.sequence_length,
            chunks.extra_token,
            chunks.keys,
            *self._rules,
        )
