"""``BlendedDataset``: samples of several datasets in the order their weights give."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron import _C
from tdp_megatron.datasets.blend import check_weights, normalise_once
from tdp_megatron.datasets.cache import Arrays, CacheKey, Provenance, load_existing, load_or_build, prepare
from tdp_megatron.datasets.config import BlendedMegatronDatasetConfig
from tdp_megatron.datasets.gpt import PREPARE_COMMAND
from tdp_megatron.datasets.megatron_dataset import MegatronDataset, describe
from tdp_megatron.datasets.memory import require_memory

__all__ = ["BlendedDataset", "exhaustive_blend", "sized_blend"]

logger = logging.getLogger(__name__)

_INDEX_NAMES = ("dataset_index", "dataset_sample_index")

#: Dataset numbers are int16 in the cache.
_MOST_DATASETS = np.iinfo(np.int16).max

_CHUNK = 1 << 20


def sized_blend(weights: Sequence[float], size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Which dataset, and which of its samples, each of ``size`` samples is.

    Args:
        weights: normalised; datasets of weight 0 are never drawn from.
        size: samples.

    Returns:
        dataset numbers int16 [size], sample numbers int64 [size].
    """
    active = np.flatnonzero(np.asarray(weights) > 0)
    positive = np.ascontiguousarray(np.asarray(weights, dtype=np.float64)[active])
    chosen, samples = _C.blend_continue(positive, np.zeros(len(positive), dtype=np.int64), 0, size)
    all_drawn = len(active) == len(weights)
    return (chosen if all_drawn else active[chosen]).astype(np.int16), samples


def exhaustive_blend(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Every sample of every dataset once, in proportion to what the datasets hold; spent ones drop out.

    Args:
        sizes: samples of each dataset.

    Returns:
        dataset numbers int16 [sum of sizes], sample numbers int64 [sum of sizes].
    """
    chosen, samples = _C.blend_exhaustive(np.array(sizes, dtype=np.int64))
    return chosen.astype(np.int16), samples


class BlendedDataset(torch.utils.data.Dataset[Any]):
    """Samples of several datasets, drawn by weight or, without a size, each sample once.

    Args:
        datasets: of one class and one split.
        weights: one per dataset; without ``size`` the number of samples to draw from each. Those of weight 0 are
            never drawn from.
        size: samples in all; None for the sum of the weights.
        config: where the cache is.

    Raises:
        ValueError: bad weights, or a dataset with fewer samples than the blend draws.
        TypeError: datasets that do not go together.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check_datasets(datasets)
        names = [dataset.label for dataset in datasets]
        checked = check_weights(weights, names)
        unused = [name for name, weight in zip(names, checked, strict=True) if not weight]
        if unused:
            logger.warning("blend: no samples from %s, whose weight is 0", ", ".join(unused))
        if size is None and any(weight != int(weight) for weight in checked):
            raise ValueError(f"without size the weights are numbers of samples; {list(weights)} are not whole")
        if size is not None and size < 0:
            raise ValueError(f"size must be 0 or more, got {size}")
        self.datasets = list(datasets)
        self.split = datasets[0].index_split
        self.weights: list[float] = list(weights) if size is None else normalise_once(checked).tolist()
        self.size = None if size is None else int(size)
        self.config = config
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["datasets"] = [dataset.unique_identifiers for dataset in self.datasets]
        identifiers["split"] = self.split.name
        identifiers["weights"] = self.weights
        identifiers["size"] = self.size
        self.unique_identifiers = identifiers
        self.unique_description, self.unique_description_hash = describe(identifiers)
        self._indices: Arrays | None = None
        if not (config.fast_cache_load or config.defer_npy_index_mmap):
            self._prepare()

    def _cache_key(self) -> CacheKey | None:
        if not self.config.path_to_cache:
            return None
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        return CacheKey(self.config.path_to_cache, base, self.unique_description, _INDEX_NAMES)

    @property
    def _provenance(self) -> Provenance:
        return Provenance({}, facts=lambda arrays: {"draws": self._draws(arrays["dataset_index"])})

    def _prepare(self) -> None:
        """Build the indices where there are none; those in a cache are opened when they are used."""
        key = self._cache_key()
        if key is None:
            self._indices = self._build()
            draws = self._draws(self._indices["dataset_index"])
        else:
            known = prepare(key, self._provenance, self._build, self._shape_complaint, self._content_complaint)
            found = known.facts.get("draws")
            draws = found if _are_draws(found, len(self.datasets)) else self._draws(self.dataset_index)
        self._check_draws(draws)

    def _load_or_build(self) -> Arrays:
        key = self._cache_key()
        if key is None:
            return self._build()
        if self.config.fast_cache_load or self.config.defer_npy_index_mmap:
            return load_existing(key, self._provenance, self._shape_complaint, PREPARE_COMMAND)
        return load_or_build(key, self._provenance, self._build, self._shape_complaint, self._content_complaint)

    def _build(self) -> Arrays:
        if self.size is None:
            datasets, samples = exhaustive_blend([int(weight) for weight in self.weights])
        else:
            require_memory(
                10 * self.size,
                f"the blend of {len(self.datasets)} datasets for {self.size} samples",
                "ask for fewer samples (--train-samples or --train-iters)",
            )
            datasets, samples = sized_blend(self.weights, self.size)
        self._check_draws(self._draws(datasets))
        return {"dataset_index": datasets, "dataset_sample_index": samples}

    def _draws(self, dataset_index: npt.NDArray[np.int16]) -> list[int]:
        """Samples taken from each dataset."""
        draws = np.zeros(len(self.datasets), dtype=np.int64)
        for first in range(0, len(dataset_index), _CHUNK):  # bincount makes 64-bit numbers of all it is given
            draws += np.bincount(dataset_index[first : first + _CHUNK], minlength=len(draws))
        return [int(n) for n in draws]

    def _check_draws(self, draws: Sequence[int]) -> None:
        for dataset, drawn in zip(self.datasets, draws, strict=True):
            if drawn and drawn > len(dataset):
                raise ValueError(
                    f"the blend draws {drawn} samples from {dataset.label}, which has {len(dataset)}; raise "
                    f"mid_level_dataset_surplus ({self.config.mid_level_dataset_surplus}), or ask for less"
                )

    def _shape_complaint(self, arrays: Arrays) -> str | None:
        expected = self.size if self.size is not None else int(sum(self.weights))
        for name, dtype in zip(_INDEX_NAMES, (np.int16, np.int64), strict=True):
            array = arrays[name]
            if array.dtype != dtype or array.shape != (expected,):
                return f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype).name} ({expected},)"
        return None

    def _content_complaint(self, arrays: Arrays) -> str | None:
        datasets, samples = (arrays[name] for name in _INDEX_NAMES)
        if not len(datasets):
            return None
        if datasets.min() < 0 or datasets.max() >= len(self.datasets):
            return f"it names datasets {datasets.min()}..{datasets.max()} of {len(self.datasets)}"
        order = np.argsort(datasets, kind="stable")
        counts = np.bincount(datasets, minlength=len(self.datasets))
        expected = np.arange(len(datasets)) - np.repeat(np.cumsum(counts) - counts, counts)
        return None if np.array_equal(samples[order], expected) else "it repeats or leaves out samples"

    @property
    def _arrays(self) -> Arrays:
        if self._indices is None:
            self._indices = self._load_or_build()
        return self._indices

    @property
    def dataset_index(self) -> npt.NDArray[np.int16]:
        """int16 [n], the dataset of each sample."""
        return self._arrays["dataset_index"]

    @property
    def dataset_sample_index(self) -> npt.NDArray[np.int64]:
        """int64 [n], the number of each sample in its dataset."""
        return self._arrays["dataset_sample_index"]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._cache_key() is not None:
            state["_indices"] = None  # a worker process opens the maps again
        return state

    def __len__(self) -> int:
        return self.size if self.size is not None else int(sum(self.weights))

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """One sample with its ``dataset_id``; None gives sample 0 without loss, to fill batches up.

        Raises:
            IndexError: there is no such sample.
        """
        place = 0 if idx is None else idx
        if not -len(self) <= place < len(self):
            raise IndexError(f"no sample {place} in the blend of the {self.split.name} split; there are {len(self)}")
        dataset_id = self.dataset_index[place]
        sample = None if idx is None else int(self.dataset_sample_index[place])
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][sample]}


def _are_draws(found: Any, count: int) -> TypeGuard[list[int]]:
    return isinstance(found, list) and len(found) == count and all(type(n) is int for n in found)


def _check_datasets(datasets: Sequence[MegatronDataset]) -> None:
    if not datasets:
        raise ValueError("a blend needs at least one dataset")
    if len(datasets) >= _MOST_DATASETS:
        raise ValueError(f"a blend may have fewer than {_MOST_DATASETS} datasets, got {len(datasets)}")
    first = datasets[0]
    for dataset in datasets[1:]:
        if type(dataset) is not type(first):
            raise TypeError(
                f"a blend has one class of datasets, got {type(first).__name__} and {type(dataset).__name__}"
            )
        if dataset.index_split is not first.index_split:
            raise ValueError(f"a blend has one split, got {first.label} and {dataset.label}")
