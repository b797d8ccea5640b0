"""Tokens of a ``.bin`` object: scattered ones by blocks that are kept, long runs straight into their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.indexed.object_storage import ObjectIdentity, ObjectStorageConfig, fetch, store_of
from tdp_megatron.indexed.readers import BinReader
from tdp_megatron.indexed.transfers import BLOCKS, Block, run_in_threads

__all__ = ["ObjectBinReader"]

# A request costs as long as some hundred KiB: smaller blocks would save little.
_BLOCK = 128 * 1024

# Parts of a long run, requested side by side; runs of this size are not worth keeping.
_PART = 8 * 1024 * 1024

# Blocks held by one step of a call over many runs, whatever the cache lets go of.
_BLOCKS_AT_A_TIME = 256


class ObjectBinReader(BinReader):
    """Reads a ``.bin`` object; a changed one is an error, never other data.

    Args:
        identity: the object as it was when the index was checked against it.
        dtype: element type.
        config: how much is kept in memory.
    """

    identity: ObjectIdentity

    def __init__(self, identity: ObjectIdentity, dtype: np.dtype[Any], config: ObjectStorageConfig) -> None:
        super().__init__(identity, dtype)
        self._limit = config.bin_chunk_nbytes
        self._block = min(_BLOCK, self._limit)
        self._direct = min(_PART, max(self._limit // 2, 1))
        self._next_block = -1
        self._ahead = 0

    def read(self, byte_offset: int, count: int) -> npt.NDArray[Any]:
        result = np.empty(count, dtype=self.dtype)
        self._read_runs([byte_offset], [result])
        return result

    def _read_runs(self, offsets: list[int], out: list[npt.NDArray[Any]]) -> None:
        parts: list[tuple[int, Block]] = []
        small: list[tuple[int, Block]] = []
        for offset, tokens in zip(offsets, out, strict=True):
            target = tokens.view(np.uint8)
            if target.nbytes > self._direct:
                for start in range(0, target.nbytes, _PART):
                    parts.append((offset + start, target[start : start + _PART]))
            elif target.nbytes:
                small.append((offset, target))
        if parts:
            run_in_threads(self._fetch, parts)
        while small:
            step, blocks = 0, 0
            while step < len(small) and (step == 0 or blocks < _BLOCKS_AT_A_TIME):
                offset, target = small[step]
                blocks += target.nbytes // self._block + 2
                step += 1
            self._read_blocks(small[:step])
            small = small[step:]

    def _fetch(self, part: tuple[int, Block]) -> None:
        offset, target = part
        fetch(store_of(self.identity.path), self.identity, offset, target.data)

    def _read_blocks(self, runs: list[tuple[int, Block]]) -> None:
        size = self._block
        blocks: dict[int, Block] = {}
        missing: set[int] = set()
        for offset, target in runs:
            for number in range(offset // size, (offset + target.nbytes - 1) // size + 1):
                if number in blocks or number in missing:
                    continue
                block = BLOCKS.get((self.identity, size, number))
                if block is None:
                    missing.add(number)
                else:
                    blocks[number] = block
        if missing:
            run_in_threads(lambda span: self._fetch_span(span, blocks), self._spans(sorted(missing)))
        for offset, target in runs:
            done = 0
            while done < target.nbytes:
                number, start = divmod(offset + done, size)
                piece = blocks[number][start : start + target.nbytes - done]
                target[done : done + len(piece)] = piece
                done += len(piece)

    def _spans(self, missing: list[int]) -> list[tuple[int, int]]:
        """Neighbouring blocks as (first, end), one request each; a reader that goes on gets the next ones as well."""
        most = max(_PART // self._block, 1)
        spans: list[tuple[int, int]] = []
        for number in missing:
            if spans and spans[-1][1] == number and number - spans[-1][0] < most:
                spans[-1] = (spans[-1][0], number + 1)
            else:
                spans.append((number, number + 1))
        going_on = len(spans) == 1 and spans[0][0] == self._next_block
        self._ahead = min(max(2 * self._ahead, 1), self._limit // 2 // self._block) if going_on else 0
        if self._ahead:
            first, end = spans[0]
            last = -(-self.identity.size // self._block)
            stop = min(end + self._ahead, last)
            spans = [(start, min(start + most, stop)) for start in range(first, stop, most)]
        self._next_block = spans[-1][1]
        return spans

    def _fetch_span(self, span: tuple[int, int], blocks: dict[int, Block]) -> None:
        first, end = span
        start = first * self._block
        buffer = np.empty(min(end * self._block, self.identity.size) - start, dtype=np.uint8)
        self._fetch((start, buffer))
        for number in range(first, end):
            at = (number - first) * self._block
            # A copy of its own: a view would keep the whole span in memory.
            block = buffer[at : at + self._block].copy()
            blocks[number] = block
            BLOCKS.put((self.identity, self._block, number), block, self._limit)
