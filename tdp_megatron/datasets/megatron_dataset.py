"""What all sample datasets share: their identity, which names their cache, and the pad id."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron.datasets.config import BlendedMegatronDatasetConfig
from tdp_megatron.datasets.splits import Split

__all__ = ["MegatronDataset", "describe", "find_pad_token_id"]

logger = logging.getLogger(__name__)

#: Stands for padding when the tokenizer has no id for it.
NO_PAD_TOKEN = -1


def describe(identifiers: OrderedDict[str, Any]) -> tuple[str, str]:
    """The description of a dataset, and its md5 in hexadecimal, which names the cache.

    Raises:
        TypeError: an entry is neither JSON nor has ``unique_identifiers``.
    """

    def expand(entry: Any) -> Any:
        try:
            return entry.unique_identifiers
        except AttributeError:
            raise TypeError(
                f"{type(entry).__name__} has no unique_identifiers, which the cache key needs; as a tokenizer give "
                "Megatron's, or a tdp_megatron.datasets.TokenizerSpec"
            ) from None

    text = _indented(identifiers, expand)
    return text, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _indented(entry: Any, expand: Callable[[Any], Any], margin: str = "\n") -> str:
    """``json.dumps(entry, indent=4, default=expand)``, which is slow because its fast encoder does not indent."""
    kind = type(entry)
    if kind is str:
        return encode_basestring_ascii(entry)
    if kind is int or (kind is float and math.isfinite(entry)):
        return repr(entry)
    if entry is None:
        return "null"
    inner = margin + "    "
    if kind in (dict, OrderedDict) and entry and all(type(key) is str for key in entry):
        items = [f"{encode_basestring_ascii(key)}: {_indented(value, expand, inner)}" for key, value in entry.items()]
        return "{" + inner + f",{inner}".join(items) + margin + "}"
    if kind in (list, tuple) and entry:
        return "[" + inner + f",{inner}".join([_indented(value, expand, inner) for value in entry]) + margin + "]"
    if hasattr(entry, "unique_identifiers") and not isinstance(entry, (str, int, float, list, tuple, dict)):
        return _indented(entry.unique_identifiers, expand, margin)
    return json.dumps(entry, indent=4, default=expand).replace("\n", margin)


def _special_ids(tokenizer: Any) -> list[int]:
    try:
        special = [value for name, value in tokenizer.special_tokens_dict.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        special = []
    if not special:
        for name in ("eos", "eod"):
            try:
                special.append(getattr(tokenizer, name))
            except (AttributeError, NotImplementedError):
                continue
    return [value for value in special if value is not None]


def find_pad_token_id(tokenizer: Any, allow_ambiguous: bool) -> tuple[int, bool]:
    """The id that stands for padding, and whether the tokenizer's own is ambiguous.

    Args:
        tokenizer: may have ``pad``, ``special_tokens_dict``, ``eos`` and ``eod``.
        allow_ambiguous: keep a pad id that is another special token, too.

    Returns:
        (id, ambiguous); -1 where the tokenizer has no pad id, or an ambiguous one that is not allowed.
    """
    try:
        pad = tokenizer.pad
    except Exception:  # whatever a tokenizer raises for "none": NotImplementedError, KeyError, its own
        pad = None
    if pad is None:
        return NO_PAD_TOKEN, False
    ambiguous = pad in _special_ids(tokenizer)
    return (NO_PAD_TOKEN if ambiguous and not allow_ambiguous else int(pad)), ambiguous


class MegatronDataset(ABC, torch.utils.data.Dataset[Any]):
    """Samples over a part of a low-level dataset.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, None for mock data; part of the cache key.
        indices: int32 [m], the elements of it that belong to this split; a range saves the array; None for all.
        num_samples: samples wanted; None for one epoch's.
        index_split: the split.
        config: everything else.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32] | range | None,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self._elements = indices
        self.num_samples = None if num_samples is None else int(num_samples)
        self.index_split = Split[index_split.name]
        self.config = config
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["dataset_path"] = dataset_path
        identifiers["num_samples"] = self.num_samples
        identifiers["index_split"] = self.index_split.name
        for name in self._key_config_attributes():
            identifiers[name] = getattr(config, name)
        self.unique_identifiers = identifiers

    @cached_property
    def _described(self) -> tuple[str, str]:
        return describe(self.unique_identifiers)

    @property
    def unique_description(self) -> str:
        """JSON of ``unique_identifiers``, the text of ``description.txt``."""
        return self._described[0]

    @property
    def unique_description_hash(self) -> str:
        """md5 of ``unique_description`` in hexadecimal."""
        return self._described[1]

    @property
    def elements(self) -> npt.NDArray[np.int32] | range:
        """The elements of the low-level dataset in this split."""
        if self._elements is None:
            self._elements = range(self.numel_low_level_dataset(self.dataset))
        return self._elements

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """int32 [m], the elements of the low-level dataset in this split."""
        elements = self.elements
        if isinstance(elements, range):
            return np.arange(elements.start, elements.stop, elements.step, dtype=np.int32)
        return elements

    @property
    def label(self) -> str:
        """Prefix and split, for messages."""
        return f"{self.dataset_path or type(self).__name__} ({self.index_split.name} split)"

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Elements that splits divide."""
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the low-level dataset of a prefix."""
        raise NotImplementedError

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Fields of the config that enter the cache key, in order."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """One sample."""
