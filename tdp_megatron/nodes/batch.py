"""``Batch``: fixed-length microbatches of one data-parallel rank, for training without packing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from tdp_megatron import _C
from tdp_megatron.arguments import checked_int, checked_names
from tdp_megatron.datasets.readers import TokenFileReader
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes.base import BeyondEndError, Node, SampleSource, draw_block, require_node, skip_samples
from tdp_megatron.nodes.left_out import LeftOut
from tdp_megatron.ops import BatchBuffers, RowBuffers, row_specs
from tdp_megatron.reading import READERS_AT_ONCE, native_readers, read_spans_by_reader, token_key_specs
from tdp_megatron.samples import MappingReader
from tdp_megatron.types import IGNORE_LABEL, Int64Array, SampleBlock

__all__ = ["Batch"]

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

# Drawing samples costs about as much for many blocks as for one. A user's node may bring their tokens along, so only
# what is known to lie in files is drawn this far ahead.
_BLOCKS_AHEAD = 16
_SAMPLES_AHEAD = 4096


class Batch(Node[dict[str, Any]]):
    """Microbatches of shape [micro_batch_size, S]: tokens, labels, position_ids int64, and loss_mask float32.

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
        inter_document_masking: whether attention is to stay inside documents. Batches then have ``cu_seqlens`` int32
            [micro_batch_size, S + 1], the ends of each row's documents, closed by S and filled up with it, and
            ``max_seqlen`` int32 [micro_batch_size], and positions restart at documents: Megatron's option of the same
            name. For samples of token files.
        consumed_samples: where to begin when there is no saved state, such as Megatron's ``consumed_samples``.
        skip_samples: ranges (begin, end) of global sample numbers to leave out, such as a stretch that made the loss
            spike; nothing of them is read, and the samples behind them follow at once. ``Pack``, which keeps whole
            global batches together, counts those in its ``skip``.

    Raises:
        ValueError, TypeError: a bad argument.
        ValueError: at a batch, a sample longer than S, samples of one batch with different keys, or samples that do not
            carry what ``token_keys`` or ``inter_document_masking`` asks for.
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
        inter_document_masking: bool = False,
        consumed_samples: int = 0,
        skip_samples: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        require_node(source)
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
        self.inter_document_masking = inter_document_masking
        self.consumed_samples = checked_int("consumed_samples", consumed_samples, least=0)
        self._begins_at = self.consumed_samples
        self.left_out = LeftOut("skip_samples", skip_samples)
        self._whole = share
        self._buffers: BatchBuffers | None = None
        self._rows: RowBuffers | None = None
        self._natives: list[_C.SpanReader] = []
        self._drawn_state: dict[str, Any] | None = None

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
        if state is None:
            skip_samples(self.source, position)
        else:
            ahead = state.get(self.AHEAD_KEY)
            if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= position:
                raise StateMismatchError(f"Batch: {self.AHEAD_KEY} must be a number of samples, found {ahead!r}")
            skip_samples(self.source, ahead)
            self._drawn_state, self._drawn_at = state[self.SOURCE_KEY], position - ahead

    def _forget_draw(self) -> None:
        self._block: SampleBlock | None = None
        self._numbers: Int64Array | None = None
        self._offset = 0
        self._is_plain = False
        self._is_spent = False
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
        whole = self._whole
        blocks = _BLOCKS_AHEAD if isinstance(self.source, SampleSource) else 1
        if self._is_plain:
            blocks = max(blocks, _SAMPLES_AHEAD // whole)
        with self.stats.waiting():
            state, position = self.source.state_dict(), self._position
            if self.left_out:
                block, self._numbers = self.left_out.draw(self.source, blocks * whole, position)
                # The data may have ended inside a range: the source is then further than what has been handed out.
                self._is_spent = len(block) < blocks * whole
            else:
                block = draw_block(self.source, blocks * whole, 0, position)
        self._block, self._offset, self._drawn_state, self._drawn_at = block, 0, state, position
        self._natives = []
        self._is_plain = (
            not self.token_keys
            and all(isinstance(reader, TokenFileReader) for reader in block.readers)
            and bool((block.seqlens == self.sequence_length).all())
        )
        return block

    def _next(self) -> dict[str, Any]:
        whole = self._whole
        block = self._block
        if block is None or self._offset >= len(block):
            if self._is_spent:
                raise StopIteration
            block = self._draw()
        left = len(block) - self._offset
        if left < whole and (not left or self.drop_last):
            raise StopIteration
        begin = time.perf_counter()
        first = self._offset + self.dp_rank * self.micro_batch_size
        last = min(first + self.micro_batch_size, self._offset + whole)
        batch = self._read_plain(block, first, last) if self._is_plain and last <= len(block) else None
        if batch is None:
            batch = self._read(block.select(slice(first, last)))
        used = min(whole, left)
        self._offset += used
        numbers = self._numbers
        self._position = self._position + used if numbers is None else int(numbers[self._offset - 1]) + 1
        stats = self.stats
        stats.work_seconds += time.perf_counter() - begin
        stats.items += 1
        return batch

    def skip_to(self, step: int) -> None:
        """Go on with microbatch ``step``, counted with the present sizes and samples left out; nothing is read.

        Raises:
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        if not self._is_open:
            self.reset(None)
        samples = checked_int("step", step) * self._whole
        if samples < self._position:
            raise ValueError(f"Batch: cannot go back from sample {self._position} to microbatch {step}; reset first")
        self._move_to(samples)

    def skip_items(self, n: int) -> None:
        """Pass over the next ``n`` microbatches; nothing is read.

        Raises:
            BeyondEndError: there are fewer.
        """
        if not self._is_open:
            self.reset(None)
        end = self.left_out.end_of(self._position, n * self._whole)
        if end is None:
            raise BeyondEndError(f"Batch: fewer than {n} microbatches are left, skip_samples being left out")
        self._move_to(end)

    def _move_to(self, samples: int) -> None:
        """Go on with sample ``samples``."""
        distance = samples - self._position
        drawn, numbers = 0 if self._block is None else len(self._block) - self._offset, self._numbers
        if drawn and numbers is not None:  # how far the source is, and how many of those drawn lie before
            drawn = int(numbers[-1]) + 1 - self._position
        if distance < drawn:
            self._offset += distance if numbers is None else int(np.searchsorted(numbers[self._offset :], samples))
        else:
            skip_samples(self.source, distance - drawn)
            self._forget_draw()
        self._position = samples

    def _read_plain(self, block: SampleBlock, first: int, last: int) -> dict[str, Any] | None:
        """The common case, without a look at every sample: mapped files, samples as long as a row.

        None where they are not mapped.
        """
        reader_index = None
        if len(block.readers) == 1:
            # Kept for the block: to ask the pool of open files takes a microsecond.
            natives = self._natives = self._natives or native_readers(block.readers)
        else:
            numbers, reader_index = np.unique(block.reader_index[first:last], return_inverse=True)
            if len(numbers) > READERS_AT_ONCE:
                return None
            natives = native_readers([block.readers[number] for number in numbers.tolist()])
        if not natives:
            return None
        if self._rows is None:
            self._rows = RowBuffers(self.micro_batch_size, self.sequence_length, documents=self.inter_document_masking)
        batch: dict[str, Any] = self._rows.read(natives, reader_index, block.sample_ids, first, first + self._whole)
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
        if self.inter_document_masking and not all(isinstance(r, TokenFileReader) for r in block.readers):
            raise ValueError("inter_document_masking needs samples of token files, which know their documents")
        wanted = row_specs(rows, width, documents=self.inter_document_masking)
        own = token_key_specs(block.readers)
        wanted.update({name: (dtype, (rows, width, *shape)) for name, (dtype, shape) in own.items()})
        if self._buffers is None or self._buffers.specs != wanted:
            self._buffers = BatchBuffers(wanted)
        taken, tensors = self._buffers.take()
        taken = dict(taken)
        batch: dict[str, Any] = dict(tensors)
        cu_seqlens, max_seqlen = taken.pop("cu_seqlens", None), taken.pop("max_seqlen", None)
        arrays = {key: array.reshape(-1, *array.shape[2:]) for key, array in taken.items()}
        if users or seqlens != [width] * rows:
            _fill_pads(arrays, seqlens, width, self.pad_id, positions=bool(users))
        places = np.arange(rows, dtype=np.int64)
        read_spans_by_reader(block, places, np.zeros_like(places), block.seqlens, places * width, arrays)
        self.stats.tokens += sum(seqlens)
        if cu_seqlens is not None and max_seqlen is not None:
            max_seqlen[:] = _documents(block, taken["position_ids"], cu_seqlens)
        if users:
            batch.update(_values(block))
        return batch


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


def _documents(block: SampleBlock, position_ids: npt.NDArray[np.int64], cu_seqlens: npt.NDArray[np.int32]) -> list[int]:
    """Tell each row's documents apart, and give the longest one's length."""
    longest = []
    for row, (number, sample_id) in enumerate(zip(block.reader_index.tolist(), block.sample_ids.tolist(), strict=True)):
        reader = block.readers[number]
        assert isinstance(reader, TokenFileReader)
        longest.append(_C.read_documents(reader.native(), sample_id, position_ids[row], cu_seqlens[row]))
    return longest


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
