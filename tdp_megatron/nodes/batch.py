"""``Batch``: fixed-length microbatches of one data-parallel rank, for training without packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from tdp_megatron.datasets.readers import TokenFileReader
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes.arguments import checked_int, checked_names
from tdp_megatron.nodes.base import Node, SampleSource, draw_block, skip_samples
from tdp_megatron.ops import BatchBuffers
from tdp_megatron.samples import STANDARD_TOKEN_KEYS, MappingReader, read_spans_by_reader, token_key_specs
from tdp_megatron.types import IGNORE_LABEL, Int64Array, SampleBlock, SampleReader

__all__ = ["Batch"]

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

# Drawing samples costs about as much for many blocks as for one.
_BLOCKS_AHEAD = 16

_STANDARD: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
    key: (np.dtype(np.float32 if key == "loss_mask" else np.int64), ()) for key in STANDARD_TOKEN_KEYS
}


class Batch(Node[dict[str, Any]]):
    """Microbatches ``{"tokens", "labels", "loss_mask", "position_ids"}`` of shape [micro_batch_size, S].

    The order is that of Megatron's sequential sampler: the samples are cut into blocks of
    ``micro_batch_size * dp_size``, and rank r trains on rows [r * micro_batch_size, (r + 1) * micro_batch_size) of
    every block. Shorter samples are padded: tokens with ``pad_id``, labels with -100, no loss. User keys follow:
    those per token as tensors [micro_batch_size, S, ...] when ``token_keys`` names them, the others as lists.

    The state counts samples, so that a run goes on with any other number of ranks. The tensors' memory is used
    again when the batch, and every view of it, is gone.

    Args:
        source: the same samples in the same order on every rank.
        micro_batch_size: samples per microbatch and rank.
        dp_rank: this data-parallel rank.
        dp_size: data-parallel ranks.
        global_batch_size: when given, checked to be whole microbatches of every rank; see ``num_microbatches``.
        sequence_length: S, tokens; None for that of the source.
        pad_id: token id behind shorter samples.
        drop_last: whether a last block that is not full is left out; otherwise the last batch of a rank has fewer
            rows, or none.
        token_keys: user keys that have one entry per token.

    Raises:
        ValueError: a bad argument; at a batch, a sample longer than S.
    """

    AHEAD_KEY = "ahead"

    def __init__(
        self,
        source: BaseNode[Any],
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        global_batch_size: int | None = None,
        sequence_length: int | None = None,
        pad_id: int = 0,
        drop_last: bool = True,
        token_keys: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        for name, value in (("micro_batch_size", micro_batch_size), ("dp_size", dp_size)):
            checked_int(name, value, least=1)
        micro_batch_size, dp_size, dp_rank = int(micro_batch_size), int(dp_size), checked_int("dp_rank", dp_rank)
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is outside the {dp_size} data-parallel ranks")
        share = micro_batch_size * dp_size
        if global_batch_size is not None:
            global_batch_size = checked_int("global_batch_size", global_batch_size)
        if global_batch_size is not None and (global_batch_size < 1 or global_batch_size % share):
            lower = global_batch_size // share * share
            nearest = " and ".join(str(size) for size in (lower, lower + share) if size > 0)
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x "
                f"dp_size {dp_size} = {share}; nearest valid: {nearest}"
            )
        found = _sequence_length(source) if sequence_length is None else sequence_length
        if found is None:
            raise ValueError(f"{type(source).__name__} does not say how long its samples are; give sequence_length")
        found = checked_int("sequence_length", found, least=1)
        self.source = source
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.global_batch_size = global_batch_size
        self.sequence_length = found
        self.pad_id = checked_int("pad_id", pad_id)
        self.drop_last = drop_last
        self.token_keys = checked_names("token_keys", token_keys)
        self._buffers: BatchBuffers | None = None
        self._buffers_for: tuple[tuple[SampleReader, ...], int] | None = None
        places = np.arange(micro_batch_size, dtype=np.int64)
        self._drawn_state: dict[str, Any] | None = None
        #: Starts, lengths and destinations of full rows.
        self._whole_rows = (np.zeros_like(places), np.full_like(places, found), places * found)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a rank per global batch; 1 when no global batch size is given."""
        if self.global_batch_size is None:
            return 1
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def fingerprint(self) -> dict[str, Any]:
        return {"sequence_length": self.sequence_length}

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        self._forget_draw()
        self.source.reset(None if state is None else state[self.SOURCE_KEY])
        if state is not None:
            ahead = state.get(self.AHEAD_KEY)
            if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= position:
                raise StateMismatchError(f"Batch: {self.AHEAD_KEY} must be a number of samples, found {ahead!r}")
            skip_samples(self.source, ahead)
            self._drawn_state, self._drawn_at = state[self.SOURCE_KEY], position - ahead

    def _forget_draw(self) -> None:
        self._block: SampleBlock | None = None
        self._offset = 0
        self._drawn_state = None
        self._drawn_at = 0

    _source_state_keys = ("source",)

    def _source_state(self) -> dict[str, Any]:
        # The source is ahead of what has been handed out: its state from before, and how many samples to pass over.
        if self._drawn_state is None:
            return {self.SOURCE_KEY: self.source.state_dict(), self.AHEAD_KEY: 0}
        return {self.SOURCE_KEY: self._drawn_state, self.AHEAD_KEY: self._position - self._drawn_at}

    def _draw(self) -> SampleBlock:
        """Samples of the next blocks: of one where a user's node brings the tokens along, of many otherwise."""
        blocks = _BLOCKS_AHEAD if isinstance(self.source, SampleSource) else 1
        with self.stats.waiting():
            state, position = self.source.state_dict(), self._position
            block = draw_block(self.source, blocks * self.micro_batch_size * self.dp_size, 0, position)
        self._block, self._offset, self._drawn_state, self._drawn_at = block, 0, state, position
        self._is_plain = (
            len(block.readers) == 1
            and isinstance(block.readers[0], TokenFileReader)
            and bool((block.seqlens == self.sequence_length).all())
        )
        return block

    def _next(self) -> dict[str, Any]:
        whole = self.micro_batch_size * self.dp_size
        block = self._block
        if block is None or self._offset >= len(block):
            block = self._draw()
        left = len(block) - self._offset
        if not left or (left < whole and self.drop_last):
            raise StopIteration
        with self.stats.working():
            first = self._offset + self.dp_rank * self.micro_batch_size
            last = min(first + self.micro_batch_size, self._offset + whole)
            if self._is_plain and last <= len(block) and not self.token_keys:
                batch = self._read_plain(block.readers[0], block.sample_ids[first:last])
            else:
                batch = self._read(block.select(slice(first, last)))
        self._offset += min(whole, left)
        self._position += min(whole, left)
        self.stats.items += 1
        return batch

    def skip_to(self, step: int) -> None:
        """Go on with microbatch ``step``, counted with the present sizes; nothing is read.

        Raises:
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        if not self._is_open:
            self.reset(None)
        samples = checked_int("step", step) * self.micro_batch_size * self.dp_size
        distance = samples - self._position
        if distance < 0:
            raise ValueError(f"Batch: cannot go back from sample {self._position} to microbatch {step}; reset first")
        drawn = 0 if self._block is None else len(self._block) - self._offset
        if distance < drawn:
            self._offset += distance
        else:
            skip_samples(self.source, distance - drawn)
            self._forget_draw()
        self._position = samples

    def _read_plain(self, reader: SampleReader, sample_ids: Int64Array) -> dict[str, Any]:
        """The common case, without a look at every sample: all of one file and as long as a row."""
        arrays, batch = self._take_buffers((reader,), self.micro_batch_size)
        reader.read_spans(sample_ids, *self._whole_rows, arrays)
        self.stats.tokens += self.micro_batch_size * self.sequence_length
        return batch

    def _read(self, block: SampleBlock) -> dict[str, Any]:
        rows, width = len(block), self.sequence_length
        seqlens = block.seqlens.tolist()
        if rows and max(seqlens) > width:
            i = int(block.seqlens.argmax())
            raise ValueError(
                f"sample {int(block.refs[i, 1])} of dataset {int(block.refs[i, 0])} has {seqlens[i]} tokens, a row "
                f"{width}; raise sequence_length, or cut the samples (DocumentSample: max_seqlen and overflow)"
            )
        users = [reader for reader in block.readers if isinstance(reader, MappingReader)]
        for reader in users:
            reader.declare_token_keys(self.token_keys)
        if self.token_keys and len(users) < len(block.readers):
            raise ValueError(f"token_keys {self.token_keys} need samples that carry them; token files do not")
        arrays, batch = self._take_buffers(block.readers, rows)
        if users or seqlens != [width] * rows:
            _fill_pads(arrays, seqlens, width, self.pad_id, positions=bool(users))
        places = np.arange(rows, dtype=np.int64)
        read_spans_by_reader(block, places, np.zeros_like(places), block.seqlens, places * width, arrays)
        self.stats.tokens += sum(seqlens)
        if users:
            batch.update(_values(block))
        return batch

    def _take_buffers(self, readers: tuple[SampleReader, ...], rows: int) -> tuple[Arrays, dict[str, Any]]:
        key = (readers, rows)
        if self._buffers is None or self._buffers_for != key:
            specs = {**_STANDARD, **token_key_specs(readers)}
            wanted = {name: (dtype, (rows, self.sequence_length, *shape)) for name, (dtype, shape) in specs.items()}
            if self._buffers is None or self._buffers.specs != wanted:
                self._buffers = BatchBuffers(wanted)
            # Readers of users' samples are new for every batch, and must not be kept.
            self._buffers_for = key if not any(isinstance(r, MappingReader) for r in readers) else None
        arrays, tensors = self._buffers.take()
        return arrays, dict(tensors)


def _sequence_length(source: BaseNode[Any]) -> int | None:
    own = getattr(source, "sequence_length", None)
    if own is not None:
        return int(own)
    lengths = {_sequence_length(inner) for inner in getattr(source, "sources", ())}
    return lengths.pop() if len(lengths) == 1 else None


def _fill_pads(
    arrays: Mapping[str, npt.NDArray[Any]], seqlens: Sequence[int], width: int, pad_id: int, *, positions: bool
) -> None:
    """Fill what no reader writes: behind every sample, and ``position_ids`` where samples need not bring them."""
    fills = {"tokens": pad_id, "labels": IGNORE_LABEL}
    count = np.arange(width, dtype=np.int64)
    for row, seqlen in enumerate(seqlens):
        begin, end = row * width, (row + 1) * width
        for key, array in arrays.items():
            if key == "position_ids":
                first = 0 if positions else seqlen
                array[begin + first : end] = count[first:]
            else:
                array[begin + seqlen : end] = fills.get(key, 0)


def _values(block: SampleBlock) -> dict[str, list[Any]]:
    """User keys that are not per token: one list per key."""
    pairs = zip(block.reader_index.tolist(), block.sample_ids.tolist(), strict=True)
    values = [block.readers[reader].sample_values(sample) for reader, sample in pairs]
    names = sorted({name for sample in values for name in sample})
    for i, sample in enumerate(values):
        missing = [name for name in names if name not in sample]
        if missing:
            raise ValueError(
                f"sample {int(block.refs[i, 1])} of dataset {int(block.refs[i, 0])} has no key {missing[0]!r}, which "
                "others of its batch have; give every sample the same keys"
            )
    return {name: [sample[name] for sample in values] for name in names}
