"""``DocumentSample``: one document = one sample of its own length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from tdp_megatron.arguments import checked_int
from tdp_megatron.datasets.documents import DocumentTable, Overflow, build_document_table, epoch_order
from tdp_megatron.datasets.readers import RunReader
from tdp_megatron.nodes.base import ENDLESS, SampleSource
from tdp_megatron.nodes.indexed_read import IndexedRead
from tdp_megatron.types import UNKNOWN_LOSS_TOKENS, Int64Array, SampleBlock

__all__ = ["DocumentSample"]


class DocumentSample(SampleSource):
    """Documents as variable-length samples, shuffled anew in every epoch.

    Args:
        source: the file and split; a document belongs to the split its first sequence is in.
        max_seqlen: most tokens of one sample.
        overflow: what happens to longer documents: ``split`` into runs of max_seqlen, ``truncate``, ``drop``, or
            ``error``.
        num_epochs: passes over the data; None for no end.
        shuffle: whether the order is random.
        seed: of the order.
        eod_token: end-of-document id, for ``eod_mask_loss``.
        eod_mask_loss: no loss at positions whose token is ``eod_token``.

    Raises:
        ValueError, TypeError: a bad argument.
        ValueError: at reset, a split without a token, or an overlong document under ``error``.
    """

    def __init__(
        self,
        source: IndexedRead,
        *,
        max_seqlen: int,
        overflow: Overflow = "split",
        num_epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 1234,
        eod_token: int | None = None,
        eod_mask_loss: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(source, IndexedRead):
            raise TypeError(f"source must be an IndexedRead: documents need random access; got {type(source).__name__}")
        if num_epochs is not None:
            num_epochs = checked_int("num_epochs", num_epochs, least=1)
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow must be one of {', '.join(get_args(Overflow))}, got {overflow!r}")
        if eod_mask_loss and eod_token is None:
            raise ValueError("eod_mask_loss needs eod_token")
        self.source = source
        self.max_seqlen = checked_int("max_seqlen", max_seqlen, least=1)
        self.overflow: Overflow = overflow
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self.seed = checked_int("seed", seed)
        self.eod_token = eod_token
        self.eod_mask_loss = eod_mask_loss
        self._table: DocumentTable | None = None
        self._reader: RunReader | None = None
        self._order: tuple[int, Int64Array] | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {
            "max_seqlen": self.max_seqlen,
            "overflow": self.overflow,
            "num_epochs": self.num_epochs,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "source": self.source.fingerprint(),
        }

    @property
    def table(self) -> DocumentTable:
        """The samples of one epoch in file order, and counts of empty, overlong and dropped documents."""
        if self._table is None:
            begin, end = self.source.bounds
            table = build_document_table(
                self.source.dataset, begin, end, max_seqlen=self.max_seqlen, overflow=self.overflow
            )
            if not len(table):
                raise ValueError(
                    f"{self.source.label}: {table.num_documents} documents give no sample "
                    f"({table.num_empty} empty, {table.num_overlong} longer than {self.max_seqlen}); give the split a "
                    "larger share or raise max_seqlen"
                )
            self._table = table
        return self._table

    @property
    def samples_per_epoch(self) -> int:
        """Samples one pass over the data gives."""
        return len(self.table)

    def _open(self) -> None:
        table = self.table
        eod = self.eod_token if self.eod_mask_loss else None
        self._reader = RunReader(self.source.dataset, table.byte_offsets, table.available, eod)
        self._num_loss_tokens = table.num_loss_tokens

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        if self.num_epochs is not None and position > self.num_epochs * len(self.table):
            raise ValueError(
                f"{self.source.label}: position {position} is past the {self.num_epochs} epochs of {len(self.table)}"
            )

    def _epoch(self, epoch: int) -> Int64Array:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self.table), self.seed, epoch, shuffle=self.shuffle))
        return self._order[1]

    def num_remaining(self) -> int | None:
        if self.num_epochs is None:
            return ENDLESS
        return self.num_epochs * len(self.table) - self._position

    def _skip(self, n: int) -> None:
        """The position is all there is."""

    def _take(self, n: int) -> SampleBlock:
        assert self._reader is not None
        table = self.table
        size = len(table)
        end = self._position + n
        if self.num_epochs is not None:
            end = min(end, self.num_epochs * size)
        parts: list[Int64Array] = []
        at = self._position
        while at < end:
            epoch, offset = divmod(at, size)
            count = min(end - at, size - offset)
            parts.append(self._epoch(epoch)[offset : offset + count])
            at += count
        ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if self.eod_mask_loss:
            loss = np.full(len(ids), UNKNOWN_LOSS_TOKENS, dtype=np.int64)
        else:
            loss = self._num_loss_tokens[ids]
        return SampleBlock(
            readers=(self._reader,),
            reader_index=np.zeros(len(ids), dtype=np.int64),
            sample_ids=ids,
            seqlens=table.seqlens[ids],
            num_loss_tokens=loss,
            refs=np.stack([np.zeros_like(ids), ids], axis=1),
        )
