"""``GPTSample``: fixed-length samples over document boundaries, in Megatron's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tdp_megatron.arguments import checked_int
from tdp_megatron.datasets.gpt_indices import GPTIndices, build_gpt_indices
from tdp_megatron.datasets.instant import InstantChunks, InstantReader
from tdp_megatron.datasets.readers import GPTReader
from tdp_megatron.nodes.base import SampleSource
from tdp_megatron.nodes.indexed_read import IndexedRead
from tdp_megatron.types import UNKNOWN_LOSS_TOKENS, SampleBlock

__all__ = ["GPTSample"]

#: Orders of fixed-length samples.
Order: TypeAlias = Literal["megatron", "instant"]


class GPTSample(SampleSource):
    """Samples of ``sequence_length`` tokens, the same ones in the same order as Megatron-LM's ``GPTDataset``.

    Args:
        source: the file and split.
        sequence_length: tokens of a sample.
        num_samples: samples wanted, over as many epochs as that takes; None for one epoch. As in Megatron there are
            those of whole epochs, which can be more; with ``order="instant"`` there are as many as wanted.
        random_seed: Megatron's ``random_seed``.
        add_extra_token_to_sequence: whether a sample reads one token more, so that its last label is known.
        drop_last_partial_sequence: whether a last, shorter sample is left out.
        eod_token: end-of-document id, for ``eod_mask_loss``.
        eod_mask_loss: no loss at positions whose token is ``eod_token``.
        reset_position_ids: position ids start again from 0 after every ``eod_token``.
        order: ``"megatron"``, or ``"instant"`` for an order of our own that needs no index: nothing is built, any
            position is there at once. Whole samples only; every epoch has its own order.

    Raises:
        ValueError, TypeError: a bad argument.
        ValueError: at reset, a split too small for one sample.
    """

    def __init__(
        self,
        source: IndexedRead,
        *,
        sequence_length: int,
        num_samples: int | None = None,
        random_seed: int = 1234,
        add_extra_token_to_sequence: bool = True,
        drop_last_partial_sequence: bool = True,
        eod_token: int | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        order: Order = "megatron",
    ) -> None:
        super().__init__()
        if not isinstance(source, IndexedRead):
            raise TypeError(f"source must be an IndexedRead: samples need random access; got {type(source).__name__}")
        if num_samples is not None:
            num_samples = checked_int("num_samples", num_samples, least=1)
        random_seed = checked_int("random_seed", random_seed)
        if not 0 <= random_seed < 2**32:
            raise ValueError(f"random_seed must be in [0, 2**32), got {random_seed}")
        if (eod_mask_loss or reset_position_ids) and eod_token is None:
            raise ValueError(f"{'eod_mask_loss' if eod_mask_loss else 'reset_position_ids'} needs eod_token")
        if order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
        if order == "instant" and not drop_last_partial_sequence:
            raise ValueError("order='instant' has whole samples only; leave drop_last_partial_sequence on")
        self.source = source
        self.sequence_length = checked_int("sequence_length", sequence_length, least=1)
        self.num_samples = num_samples
        self.random_seed = random_seed
        self.add_extra_token_to_sequence = add_extra_token_to_sequence
        self.drop_last_partial_sequence = drop_last_partial_sequence
        self.eod_token = eod_token
        self.eod_mask_loss = eod_mask_loss
        self.reset_position_ids = reset_position_ids
        self.order: Order = order
        self._reader: GPTReader | None = None
        self._indices: GPTIndices
        self._instant: InstantReader | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "num_samples": self.num_samples,
            "random_seed": self.random_seed,
            "add_extra_token_to_sequence": self.add_extra_token_to_sequence,
            "drop_last_partial_sequence": self.drop_last_partial_sequence,
            "source": self.source.fingerprint(),
            **({} if self.order == "megatron" else {"order": self.order}),
        }

    def __len__(self) -> int:
        """Samples of the whole run; builds the indices."""
        self._build()
        if self._instant is not None:
            return self.num_samples or self._instant.chunks.samples_per_epoch
        return len(self._indices)

    @property
    def samples_per_epoch(self) -> int:
        """Samples a pass over the data gives, in a run of many passes."""
        self._build()
        if self._instant is not None:
            return self._instant.chunks.samples_per_epoch
        return self._indices.tokens_per_epoch // self.sequence_length

    def _open(self) -> None:
        self._build()

    def _build(self) -> None:
        if self._reader is not None or self._instant is not None:
            return
        dataset = self.source.dataset
        begin, end = self.source.bounds
        eod_rules = (
            self.eod_token if self.eod_mask_loss else None,
            self.eod_token if self.reset_position_ids else None,
        )
        if self.order == "instant":
            extra = int(self.add_extra_token_to_sequence)
            chunks = InstantChunks(dataset, begin, end, self.sequence_length, extra, self.random_seed)
            if not chunks.samples_per_epoch:
                raise self._too_small(chunks.num_tokens)
            self._instant = InstantReader(chunks, *eod_rules)
            return
        indices = build_gpt_indices(
            dataset.sequence_lengths,
            range(begin, end),
            sequence_length=self.sequence_length,
            num_samples=self.num_samples,
            random_seed=self.random_seed,
            add_extra_token_to_sequence=self.add_extra_token_to_sequence,
            drop_last_partial_sequence=self.drop_last_partial_sequence,
            name=self.source.label,
        )
        extra = int(self.add_extra_token_to_sequence)
        if not len(indices):
            raise self._too_small(indices.tokens_per_epoch)
        # Every sample is full but the one that ends the data, when it is kept.
        self._last_seqlen = self.sequence_length
        total = indices.num_epochs * indices.tokens_per_epoch
        if not self.drop_last_partial_sequence:
            self._last_seqlen = min(self.sequence_length, total - extra - (len(indices) - 1) * self.sequence_length)
        self._indices = indices
        self._reader = GPTReader(dataset, indices, extra, *eod_rules)

    def _too_small(self, num_tokens: int) -> ValueError:
        return ValueError(
            f"{self.source.label}: the split holds {num_tokens} tokens, one sample needs "
            f"{self.sequence_length + int(self.add_extra_token_to_sequence)}; give num_samples (epochs repeat), more "
            "data or a smaller sequence_length"
        )

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        if position > len(self):
            raise ValueError(f"{self.source.label}: position {position} is past the {len(self)} samples")

    def num_remaining(self) -> int | None:
        return len(self) - self._position

    def _skip(self, n: int) -> None:
        """The position is all there is."""

    def _take(self, n: int) -> SampleBlock:
        ids = np.arange(self._position, min(self._position + n, len(self)), dtype=np.int64)
        seqlens = np.full_like(ids, self.sequence_length)
        reader = self._instant or self._reader
        assert reader is not None
        if self._reader is not None and self._last_seqlen < self.sequence_length:
            seqlens[self._indices.shuffle_index[ids] == len(self) - 1] = self._last_seqlen
        if self.eod_mask_loss:
            loss = np.full(len(ids), UNKNOWN_LOSS_TOKENS, dtype=np.int64)
        else:
            loss = seqlens if self.add_extra_token_to_sequence else seqlens - 1
        return SampleBlock(
            readers=(reader,),
            reader_index=np.zeros(len(ids), dtype=np.int64),
            sample_ids=ids,
            seqlens=seqlens,
            num_loss_tokens=loss,
            refs=np.stack([np.zeros_like(ids), ids], axis=1),
        )
