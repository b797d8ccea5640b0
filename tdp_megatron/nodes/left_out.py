"""Ranges that a run leaves out, such as a stretch of data that made the loss spike."""

from __future__ import annotations

from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from tdp_megatron.nodes.base import BeyondEndError, draw_block, skip_samples
from tdp_megatron.ranges import NumberRanges
from tdp_megatron.types import Int64Array, SampleBlock

__all__ = ["LeftOut", "draw_numbers"]

# Samples that are drawn and dropped rather than passed over, which costs about as much for one as for many.
_SMALL_GAP = 1024


class LeftOut(NumberRanges):
    """Ranges [begin, end) of sample numbers that are passed over while samples are drawn."""

    def draw(self, source: BaseNode[Any], n: int, number: int) -> tuple[SampleBlock, Int64Array]:
        """The next samples of a source that are not left out; nothing is read of the others.

        Args:
            source: any node of samples.
            n: samples wanted.
            number: of the source's next sample.

        Returns:
            The samples, fewer at the end of the data, and their numbers, int64.
        """
        blocks: list[SampleBlock] = []
        numbers: list[Int64Array] = [np.zeros(0, dtype=np.int64)]
        while n > 0:
            first, run = self.next_run(number)
            if not run:  # left out up to the last number there is
                break
            try:
                skip_samples(source, first - number)
            except BeyondEndError:  # the data ends inside the range
                break
            wanted = min(n, run)
            block = draw_block(source, wanted, 0, first)
            blocks.append(block)
            numbers.append(np.arange(first, first + len(block), dtype=np.int64))
            number = first + len(block)
            n -= len(block)
            if len(block) < wanted:
                break
        return SampleBlock.concatenate(blocks), np.concatenate(numbers)


def draw_numbers(source: BaseNode[Any], numbers: Int64Array, begin: int, end: int) -> SampleBlock | None:
    """Some of a source's next samples, and pass over the others; None where the data ends before.

    Args:
        source: any node of samples.
        numbers: int64 [n], rising, in [begin, end): the samples wanted.
        begin: number of the source's next sample.
        end: where the source is to stand afterwards.
    """
    blocks: list[SampleBlock] = []
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > _SMALL_GAP) + 1) if len(numbers) else []:
        first, last = int(run[0]), int(run[-1])
        if not _passed_over(source, first - begin):
            return None
        block = draw_block(source, last + 1 - first, 0, first)
        if len(block) < last + 1 - first:
            return None
        blocks.append(block.select(run - first))
        begin = last + 1
    return SampleBlock.concatenate(blocks) if _passed_over(source, end - begin) else None


def _passed_over(source: BaseNode[Any], n: int) -> bool:
    try:
        skip_samples(source, n)
    except BeyondEndError:
        return False
    return True
