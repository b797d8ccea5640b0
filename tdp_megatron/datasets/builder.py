"""``BlendedMegatronDatasetBuilder``: train, valid and test datasets from a config, on all ranks of a job."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch.distributed as dist

from tdp_megatron.datasets.blend import normalise_once, sizes_per_dataset
from tdp_megatron.datasets.blended import BlendedDataset
from tdp_megatron.datasets.cache_writer import grouped_writes
from tdp_megatron.datasets.config import BlendedMegatronDatasetConfig
from tdp_megatron.datasets.giving_up import GivenUpError, Stop, stop_with
from tdp_megatron.datasets.megatron_dataset import MegatronDataset
from tdp_megatron.datasets.splits import Split, bounds_of
from tdp_megatron.distributed.rank_order import run_in_rank_order

__all__ = ["BlendedMegatronDatasetBuilder"]

logger = logging.getLogger(__name__)

#: One dataset, several validation sets, or None where there is no such split or it is built on other ranks.
Built = Any

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

_Matrix = Sequence["tuple[float, float] | None"]


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of the three splits.

    Args:
        cls: the dataset class, such as ``GPTDataset``.
        sizes: samples wanted for train, valid and test; None for what the data gives.
        is_built_on_rank: whether the calling rank gets datasets.
        config: the data.
        timeout_s: how long ranks wait for ranks that do not come, seconds.
        progress: called with (prefixes that are ready, prefixes) on ranks that build, at the start and after each.

    Raises:
        ValueError: a weighted blend without a size.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        timeout_s: float = 600.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(f"sizes must have {len(Split)} entries (train, valid, test), got {list(sizes)}")
        for size in sizes:
            if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
                raise TypeError(f"sizes must be numbers of samples, or None, got {list(sizes)}")
            if size is not None and size < 0:
                raise ValueError(f"sizes must be 0 or more, or None, got {list(sizes)}")
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self.timeout_s = timeout_s
        self.progress = progress
        self._num_built = 0
        self._reporting = threading.Lock()
        for split in Split:
            blend = self._blend_of(split)
            if blend is not None and blend[1] is not None and self.sizes[split.value] is None:
                hint = "; several validation sets take no weights" if config.multiple_validation_sets else ""
                raise ValueError(
                    f"the blend of the {split.name} split has weights, so its size must be a number of samples{hint}"
                )

    def _blend_of(self, split: Split) -> tuple[list[str], list[float] | None] | None:
        if self.config.mock:
            return None
        per_split = self.config.blend_per_split
        return self.config.blend if per_split is None else per_split[split.value]

    def build(self) -> list[Built]:
        """The datasets of train, valid and test.

        All ranks of a job must call it. Rank 0 builds first; ranks that do not see its caches, because their file
        system is another one, build once per file system. An error of any rank is an error on all.

        Returns:
            Three datasets; None for a split without data, and everywhere on ranks that get none. With
            ``multiple_validation_sets``, the second is a list.

        Raises:
            ValueError: a split without tokens, or a blend that draws more than a dataset has.
            CacheError: caches that cannot be written.
            ExchangeError: another rank failed or never came.
        """
        if not dist.is_available() or not dist.is_initialized():
            return self._build()
        here = bool(self.is_built_on_rank())
        # A fast start opens nothing, so nobody needs to wait for anybody.
        if self.config.fast_cache_load:
            built: list[Built] | None = self._build() if here else None
        else:
            built = run_in_rank_order(
                self._build, takes_part=here, what="building the datasets", timeout_s=self.timeout_s
            )
        return [None] * len(Split) if built is None else built

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any], is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build any dataset, on rank 0 first when ranks are synchronised.

        Args:
            cls: class or function that builds it.
            is_built_on_rank: whether the calling rank gets it.
            synchronize_ranks: whether all ranks make this call and wait for rank 0.
            *args: handed to ``cls``.

        Returns:
            The dataset, None on ranks that do not get it.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(*args)
        here = bool(is_built_on_rank())
        if synchronize_ranks:
            return run_in_rank_order(lambda: cls(*args), takes_part=here, what="building a dataset")
        return cls(*args) if here else None

    # -- one process -------------------------------------------------------------------------------------------

    def _build(self) -> list[Built]:
        self._num_built = 0
        if self.progress is not None:
            self.progress(0, self._num_prefixes)
        with collector_paused(), grouped_writes():
            return self._build_all()

    def _build_all(self) -> list[Built]:
        config = self.config
        if config.blend_per_split is not None and not config.mock:
            return [self._build_own_split(split) for split in Split]
        matrix = config.split_matrix
        if matrix is None:
            raise ValueError("the config has no split_matrix; it is made from split when the config is made")
        if config.blend is None:
            return self._build_splits(None, matrix, self.sizes)
        return self._build_blend(config.blend, matrix, self.sizes)

    def _build_own_split(self, split: Split) -> Built:
        """A split with files of its own."""
        blend = self._blend_of(split)
        if blend is None:
            logger.info("no blend for the %s split", split.name)
            return None
        # Megatron asks nothing of the other splits, and they enter no cache key.
        matrix: list[tuple[float, float] | None] = [None] * len(Split)
        matrix[split.value] = (0.0, 1.0)
        sizes: list[int | None] = [0] * len(Split)
        sizes[split.value] = self.sizes[split.value]
        prefixes, weights = blend
        if len(prefixes) == 1:
            weights = None
        elif self.config.multiple_validation_sets and split is Split.valid:
            if self.config.full_validation and sizes[split.value] is not None:
                raise ValueError(
                    f"full_validation runs over one epoch of each validation set, so the size of the valid split must "
                    f"be None, got {sizes[split.value]}"
                )
            return [self._build_splits(prefix, matrix, sizes)[split.value] for prefix in prefixes]
        return self._build_blend((prefixes, weights), matrix, sizes)[split.value]

    def _build_blend(
        self, blend: tuple[list[str], list[float] | None], matrix: _Matrix, sizes: Sequence[int | None]
    ) -> list[Built]:
        prefixes, weights = blend
        if len(prefixes) == 1 and weights is None:
            return self._build_splits(prefixes[0], matrix, sizes)
        target: list[list[int]] | None = None
        to_build: Sequence[Sequence[int | None]] = [[None] * len(Split)] * len(prefixes)
        if weights is not None:
            prefixes, weights = _without_unused(prefixes, weights)
            weights = normalise_once(weights).tolist()
            # Splits that are not there have sizes, too; theirs are never used.
            wanted = [size if entry is not None else 0 for size, entry in zip(sizes, matrix, strict=True)]
            target = sizes_per_dataset(weights, wanted)
            to_build = sizes_per_dataset(weights, wanted, surplus=self.config.mid_level_dataset_surplus)
        per_prefix = self._in_threads(
            lambda job: self._build_splits(job[0], matrix, job[1]), list(zip(prefixes, to_build, strict=True))
        )
        blended: list[Built] = [None] * len(Split)
        for split in Split:
            if matrix[split.value] is None:
                continue
            datasets = [dataset for built in per_prefix if (dataset := built[split.value]) is not None]
            if target is not None and weights is not None:
                size: int | None = sum(row[split.value] for row in target)
                blended[split.value] = BlendedDataset(datasets, weights, size, self.config)
            else:
                lengths = [len(dataset) for dataset in datasets]
                _require_samples(datasets, lengths, split, self.config)
                size = sizes[split.value]
                if size is not None:
                    size = min(size, sum(lengths))
                blended[split.value] = BlendedDataset(datasets, lengths, size, self.config)
        return blended

    def _in_threads(self, build: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """``build`` of all jobs, in order; the first error ends those under way."""
        if self.config.num_dataset_builder_threads == 1:
            return [build(job) for job in jobs]
        stop = Stop()

        def run(job: _Job) -> _Result:
            stop_with(stop)
            stop()
            return build(job)

        with ThreadPoolExecutor(max_workers=self.config.num_dataset_builder_threads) as threads:
            try:
                # Each in a copy of the caller's context, which has the writer of the caches.
                futures = [threads.submit(contextvars.copy_context().run, run, job) for job in jobs]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                threads.shutdown(cancel_futures=True)
        failed = [future.exception() for future in futures if not future.cancelled()]
        for error in failed:
            if error is not None and not isinstance(error, GivenUpError):
                raise error
        return [future.result() for future in futures]

    def _build_splits(
        self, prefix: str | None, matrix: _Matrix, sizes: Sequence[int | None]
    ) -> list[MegatronDataset | None]:
        """The splits of one prefix."""
        low_level = self.cls.build_low_level_dataset(prefix, self.config)
        built: list[MegatronDataset | None] = []
        for split, entry, size in zip(Split, matrix, sizes, strict=True):
            if entry is None:
                built.append(None)
                continue
            indices = None
            if not self.config.fast_cache_load:
                indices = range(*bounds_of(entry, self.cls.numel_low_level_dataset(low_level)))
            built.append(self.cls(low_level, prefix, indices, size, split, self.config))
        self._report_one()
        return built

    def _report_one(self) -> None:
        if self.progress is None:
            return
        with self._reporting:
            self._num_built += 1
            self.progress(self._num_built, self._num_prefixes)

    @property
    def _num_prefixes(self) -> int:
        blends = [self._blend_of(split) for split in Split]
        if self.config.blend_per_split is None:
            blends = blends[:1]
        # Prefixes of weight 0 are left out, unless there is one alone.
        return sum(
            len(prefixes) if weights is None or len(prefixes) == 1 else sum(weight > 0 for weight in weights)
            for prefixes, weights in (blend for blend in blends if blend is not None)
        )


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside, and what is left at the end counts as old.

    Thousands of new objects make Python look through all that it holds, torch's modules included, for garbage that is
    not there; with a fast start that takes longer than the rest.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody has frozen objects that are to stay so
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _without_unused(prefixes: list[str], weights: list[float]) -> tuple[list[str], list[float]]:
    used = [(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight > 0]
    if len(used) < len(prefixes):
        unused = [prefix for prefix, weight in zip(prefixes, weights, strict=True) if not weight > 0]
        logger.warning("blend: %s have weight 0 and are left out", ", ".join(unused))
    return [prefix for prefix, _ in used], [weight for _, weight in used]


def _require_samples(
    datasets: Sequence[MegatronDataset], lengths: Sequence[int], split: Split, config: BlendedMegatronDatasetConfig
) -> None:
    if not sum(lengths):
        raise ValueError(
            f"no dataset of the {split.name} split has {config.sequence_length} tokens, one sample's: "
            f"{', '.join(dataset.label for dataset in datasets)}; give the split a larger share or more data"
        )
