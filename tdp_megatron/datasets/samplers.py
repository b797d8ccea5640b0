"""Batch samplers under Megatron's names: which samples each data-parallel rank reads, batch by batch.

Give one to ``torch.utils.data.DataLoader(batch_sampler=...)``. Their only state is ``consumed_samples``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "HybridCPMegatronPretrainingSampler",
    "MegatronFullValidationSampler",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
]


def _check(
    total_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> None:
    if total_samples < 1:
        raise ValueError(f"total_samples must be at least 1, got {total_samples}: there is nothing to read")
    if consumed_samples < 0:
        raise ValueError(f"consumed_samples must be 0 or more, got {consumed_samples}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
    if data_parallel_size < 1:
        raise ValueError(f"data_parallel_size must be at least 1, got {data_parallel_size}")
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data_parallel_rank must be in [0, {data_parallel_size}), got {data_parallel_rank}")


class _RankSampler:
    """What the samplers of one rank have in common."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        _check(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    @property
    def _block(self) -> int:
        """Samples of one batch of all ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        """Samples of the dataset, as in Megatron; not batches."""
        return self.total_samples


class MegatronPretrainingSampler(_RankSampler):
    """Samples in order; each rank takes its slice of every block of ``micro_batch_size * data_parallel_size``.

    Args:
        total_samples: samples of the dataset.
        consumed_samples: samples all ranks have read before.
        micro_batch_size: samples of a batch.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
        drop_last: whether a last, smaller block is left out; if not, some ranks get fewer samples or an empty batch.

    Raises:
        ValueError: a bad number, or no sample is left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if consumed_samples >= total_samples:
            raise ValueError(
                f"{consumed_samples} of {total_samples} samples are consumed, none is left; ask the dataset for more"
            )
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        block = self._block
        offset = self.data_parallel_rank * self.micro_batch_size
        for begin in range(self.consumed_samples, self.total_samples, block):
            end = min(begin + block, self.total_samples)
            if end - begin < block and self.drop_last:
                return
            yield list(range(min(begin + offset, end), min(begin + offset + self.micro_batch_size, end)))


class HybridCPMegatronPretrainingSampler(MegatronPretrainingSampler):
    """Samples in order, a rank's share of a whole global batch at a time: its microbatches one after the other.

    Args:
        total_samples: samples of the dataset.
        consumed_samples: samples all ranks have read before.
        micro_batch_size: samples of a microbatch.
        global_batch_size: samples of all ranks in a step.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
        drop_last: whether a last, smaller global batch is left out.

    Raises:
        ValueError: a bad number, or no sample is left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size, drop_last
        )
        block = self._block
        if global_batch_size < 1 or global_batch_size % block:
            near = max(global_batch_size // block, 1) * block
            raise ValueError(
                f"global_batch_size {global_batch_size} is no multiple of micro_batch_size {micro_batch_size} * "
                f"data_parallel_size {data_parallel_size}; the nearest are {near} and {near + block}"
            )
        self.global_batch_size = global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        block = self._block
        offset = self.data_parallel_rank * self.micro_batch_size
        for begin in range(self.consumed_samples, self.total_samples, self.global_batch_size):
            end = min(begin + self.global_batch_size, self.total_samples)
            if end - begin < self.global_batch_size and self.drop_last:
                return
            yield [
                sample
                for first in range(begin + offset, end, block)
                for sample in range(first, min(first + self.micro_batch_size, end))
            ]


class MegatronPretrainingRandomSampler(_RankSampler):
    """Samples in an order drawn for each epoch ("cyclic"); an epoch per iteration, the seed is the epoch alone.

    Without ``data_sharding`` ranks may get unequal numbers of batches, as in Megatron.

    Args:
        dataset: told the epoch by ``set_epoch`` where it has that.
        total_samples: samples of the dataset.
        consumed_samples: samples all ranks have read before; goes on counting while this is iterated over.
        micro_batch_size: samples of a batch.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
        data_sharding: whether every rank reads a fixed range of the samples, or strides through one order of all.

    Raises:
        ValueError: a bad number, or fewer samples than one batch of all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> None:
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        block = self._block
        if total_samples < block:
            raise ValueError(f"{total_samples} samples are fewer than one batch of all ranks, {block}")
        self.active_total_samples = total_samples - total_samples % block
        if consumed_samples % self.active_total_samples % block:
            raise ValueError(
                f"consumed_samples {consumed_samples} ends inside a batch: in an epoch of {self.active_total_samples} "
                f"samples it must be a multiple of micro_batch_size * data_parallel_size = {block}"
            )
        self.dataset = dataset
        self.data_sharding = data_sharding

    def __iter__(self) -> Iterator[list[int]]:
        epoch, consumed = divmod(self.consumed_samples, self.active_total_samples)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        draw = torch.Generator()
        draw.manual_seed(epoch)
        if self.data_sharding:
            bucket = self.active_total_samples // self.data_parallel_size
            order = torch.randperm(bucket, generator=draw)[consumed // self.data_parallel_size :]
            samples = order + self.data_parallel_rank * bucket
        else:
            whole = self.total_samples - self.total_samples % self.micro_batch_size
            samples = torch.randperm(whole, generator=draw)[consumed:][
                self.data_parallel_rank :: self.data_parallel_size
            ]
        for begin in range(0, len(samples) - self.micro_batch_size + 1, self.micro_batch_size):
            self.consumed_samples += self._block
            yield samples[begin : begin + self.micro_batch_size].tolist()


class MegatronFullValidationSampler:
    """Every sample once, one at a time, dealt to the ranks in turn.

    Args:
        total_samples: samples of the dataset.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.

    Raises:
        ValueError: a bad number.
    """

    def __init__(self, total_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        _check(total_samples, 0, 1, data_parallel_rank, data_parallel_size)
        self._samples = range(data_parallel_rank, total_samples, data_parallel_size)

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._samples)

    def __iter__(self) -> Iterator[list[int]]:
        return ([sample] for sample in self._samples)
