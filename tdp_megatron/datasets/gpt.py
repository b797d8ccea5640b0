"""``GPTDataset``: fixed-length samples over document boundaries, Megatron's names, order, values and caches."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron import _C
from tdp_megatron.datasets.cache import Arrays, CacheKey, Provenance, load_existing, load_or_build, prepare
from tdp_megatron.datasets.config import GPTDatasetConfig
from tdp_megatron.datasets.giving_up import current_stop
from tdp_megatron.datasets.gpt_cache import INDEX_NAMES, content_complaint, provenance_of, shape_complaint
from tdp_megatron.datasets.gpt_indices import build_gpt_indices
from tdp_megatron.datasets.gpt_sample import HARMLESS_ID, SampleRules, assemble, causal_mask
from tdp_megatron.datasets.megatron_dataset import MegatronDataset, find_pad_token_id
from tdp_megatron.datasets.readers import GPTReader
from tdp_megatron.datasets.splits import Split
from tdp_megatron.errors import CacheError, FormatError
from tdp_megatron.indexed import IndexedDataset, ObjectStorageConfig, is_object_storage_path
from tdp_megatron.types import Int64Array

__all__ = ["GPTDataset"]

logger = logging.getLogger(__name__)

PREPARE_COMMAND = (
    "Write the caches once with `tdp prepare-cache` and the same data arguments, or unset fast_cache_load and "
    "defer_npy_index_mmap"
)


class GPTDataset(MegatronDataset):
    """Samples of ``sequence_length`` tokens, drawn from the sequences of one split in Megatron's order.

    Args:
        indexed_dataset: the sequences.
        dataset_path: prefix, part of the cache key.
        indexed_indices: int32 [m], the sequences of this split; a range saves the array; None for all.
        num_samples: samples wanted, over as many epochs as that takes; None for one epoch.
        index_split: the split.
        config: everything else.

    Raises:
        ValueError: the split has no token.
        CacheError: the index cache cannot be written.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.int32] | range | None,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        by_id = config.pad_masking == "megatron"
        allowed = bool(config.allow_ambiguous_pad_tokens)
        self._pad_token_id, ambiguous = find_pad_token_id(config.tokenizer, allowed)
        if ambiguous and by_id:
            logger.warning(
                "%s: the tokenizer's pad id is also another special token; %s",
                self.label,
                "tokens with that id have no loss" if allowed else "no token of the data counts as padding",
            )
        # Megatron computes a mask once where it can, and by mistake keeps in it the padding of the first sample it
        # reads: all later ones have no loss there either. Only who asks for its values gets that.
        self._keeps_first_loss_mask = by_id and not (
            config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
        )
        self._first_loss_mask: npt.NDArray[np.float32] | None = None
        self._indices: Arrays | None = None
        self._num_known: int | None = None
        if not (config.fast_cache_load or config.defer_npy_index_mmap):
            self._prepare()

    # -- the low-level dataset ---------------------------------------------------------------------------------

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Sequences: GPT splits cut between sequences, not documents."""
        # The header says it: the lengths are not read before they are needed.
        known = isinstance(low_level_dataset, IndexedDataset)
        return len(low_level_dataset) if known else len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        """Open the ``.bin/.idx`` pair of a prefix."""
        if dataset_path is None:
            raise ValueError("without blend and blend_per_split there are no files; give one, or use MockGPTDataset")
        storage = None
        if is_object_storage_path(dataset_path):
            if not config.object_storage_cache_path:
                raise ValueError(f"{dataset_path}: object storage needs object_storage_cache_path, for its .idx files")
            if config.path_to_cache is None:
                raise ValueError(f"{dataset_path}: object storage needs path_to_cache, for the index caches")
            storage = ObjectStorageConfig(config.object_storage_cache_path)
        return IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            object_storage_config=storage,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=config.sequences_per_dataset,
            header_only=True,
        )

    # -- indices -----------------------------------------------------------------------------------------------

    @property
    def _drop_last(self) -> bool:
        return self.index_split is not Split.valid or self.config.drop_last_partial_validation_sequence

    @property
    def _extra_token(self) -> int:
        return int(self.config.add_extra_token_to_sequence)

    def _build(self) -> Arrays:
        config = self.config
        built = build_gpt_indices(
            self.dataset.sequence_lengths,
            self.elements,
            sequence_length=config.sequence_length,
            num_samples=self.num_samples,
            random_seed=config.random_seed,
            add_extra_token_to_sequence=config.add_extra_token_to_sequence,
            drop_last_partial_sequence=self._drop_last,
            name=f"{self.label}, split {config.split!r}",
            stop=current_stop(),
        )
        logger.info("%s: %d samples from %d epochs", self.label, len(built), built.num_epochs)
        return {name: getattr(built, name) for name in INDEX_NAMES}

    def _cache_key(self) -> CacheKey | None:
        folder = self.config.path_to_cache
        if folder is None and not self.config.mock:
            folder = os.path.join(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        if not folder:
            return None
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        return CacheKey(folder, base, self.unique_description, INDEX_NAMES)

    def _provenance(self) -> Provenance:
        return provenance_of(self.dataset, extra_token=self._extra_token, drop_last=self._drop_last)

    def _prepare(self) -> None:
        """Build the indices where there are none; those in a cache are opened when they are used."""
        key = self._cache_key()
        if key is None:
            self._indices = self._build()
        else:
            known = prepare(key, self._provenance(), self._build, shape_complaint, self._content_complaint)
            self._num_known = known.shapes["shuffle_index"][0]

    def _load_or_build(self) -> Arrays:
        key = self._cache_key()
        if key is None:
            return self._build()
        if self.config.fast_cache_load or self.config.defer_npy_index_mmap:
            return load_existing(key, self._provenance(), shape_complaint, PREPARE_COMMAND)
        arrays = load_or_build(key, self._provenance(), self._build, shape_complaint, self._content_complaint)
        found = len(arrays["shuffle_index"])
        if self._num_known not in (None, found):
            raise CacheError(
                f"{self.label}: had {self._num_known} samples at the start and has {found} now: the data was replaced "
                "meanwhile; start again"
            )
        return arrays

    def _content_complaint(self, arrays: Arrays) -> str | None:
        return content_complaint(
            arrays,
            self.dataset.sequence_lengths,
            self.indices,
            sequence_length=self.config.sequence_length,
            num_samples=self.num_samples,
            extra_token=self._extra_token,
            drop_last=self._drop_last,
        )

    @property
    def _arrays(self) -> Arrays:
        if self._indices is None:
            self._indices = self._load_or_build()
        return self._indices

    @property
    def document_index(self) -> npt.NDArray[np.int32]:
        """int32 [epochs * sequences], the shuffled sequence numbers."""
        return self._arrays["document_index"]

    @property
    def sample_index(self) -> npt.NDArray[Any]:
        """int32 or int64 [n + 1, 2], where each sample begins: (place in document_index, token offset)."""
        return self._arrays["sample_index"]

    @property
    def shuffle_index(self) -> npt.NDArray[Any]:
        """uint32 or int64 [n], the row of ``sample_index`` that each sample is."""
        return self._arrays["shuffle_index"]

    def __getstate__(self) -> dict[str, Any]:
        # Maps would pickle as whole arrays; a worker process opens them again from the cache.
        state = self.__dict__.copy()
        if self._cache_key() is not None:
            state["_indices"] = None
        state.pop("_shared_mask", None)
        state.pop("_reader", None)
        return state

    # -- samples -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.shuffle_index) if self._num_known is None else self._num_known

    @cached_property
    def _rules(self) -> SampleRules:
        config = self.config
        return SampleRules(
            sequence_length=config.sequence_length,
            eod=getattr(config.tokenizer, "eod", None),
            pad=self._pad_token_id,
            pad_by_id=config.pad_masking == "megatron",
            extra_token=self._extra_token,
            reset_position_ids=bool(config.reset_position_ids),
            reset_attention_mask=bool(config.reset_attention_mask),
            eod_mask_loss=bool(config.eod_mask_loss),
            create_attention_mask=config.create_attention_mask,
            inter_document_masking=config.inter_document_masking,
        )

    @cached_property
    def _shared_mask(self) -> npt.NDArray[np.bool_] | None:
        # One [S, S] mask for all samples, as in Megatron: at 8192 tokens each of its own would be 64 MiB.
        if self.config.create_attention_mask and not self.config.reset_attention_mask:
            return causal_mask(self.config.sequence_length)
        return None

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample as tensors; None gives sample 0 without loss, to fill batches up.

        Raises:
            IndexError: there is no such sample.
        """
        number = 0 if idx is None else idx
        sample = self._read_plain(number)
        if sample is None:
            tokens, counts, _ = self._query(number)
            sample = assemble(tokens, counts, self._rules, self._shared_mask)
        if self._keeps_first_loss_mask:
            if self._first_loss_mask is None:
                self._first_loss_mask = sample["loss_mask"].copy()
            sample["loss_mask"] *= self._first_loss_mask
        if idx is None:
            sample["loss_mask"][:] = 0.0
        return {name: torch.from_numpy(array) for name, array in sample.items()}

    @cached_property
    def _is_plain(self) -> bool:
        rules = self._rules
        special = rules.pad_by_id or (rules.create_attention_mask and rules.reset_attention_mask)
        if type(self)._query is not GPTDataset._query:  # a subclass has its own idea of the tokens
            return False
        return isinstance(self.dataset, IndexedDataset) and not (special or rules.inter_document_masking)

    @cached_property
    def _reader(self) -> GPTReader:
        rules = self._rules
        eod_rules = (
            rules.eod if rules.eod_mask_loss else None,
            rules.eod if rules.reset_position_ids else None,
        )
        return GPTReader(self.dataset, SimpleNamespace(**self._arrays), rules.extra_token, *eod_rules, HARMLESS_ID)

    def _read_plain(self, idx: int) -> dict[str, npt.NDArray[Any]] | None:
        """A whole sample in one native pass over a mapped file; None where that is not possible."""
        count = len(self)
        if not self._is_plain or not -count <= idx < count:
            return None
        if int(self.shuffle_index[idx]) == count - 1:  # it may be shorter
            return None
        size = self._rules.sequence_length
        tokens, labels, position_ids = np.empty((3, size), dtype=np.int64)
        loss_mask = np.empty(size, dtype=np.float32)
        try:
            native = self._reader.native()
            if not native.is_mapped:
                return None
            numbers = np.array([idx % count], dtype=np.int64)
            _C.read_rows([native], None, numbers, 0, tokens[None], labels[None], loss_mask[None], position_ids[None])
        except (IndexError, ValueError):  # what is wrong is said better on the slow way
            return None
        sample: dict[str, npt.NDArray[Any]] = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        sample["position_ids"] = position_ids
        if self._shared_mask is not None:
            sample["attention_mask"] = self._shared_mask
        return sample

    def _query(self, idx: int) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int32]]:
        """Tokens of a sample, how many come from each document, and the documents."""
        count = len(self)
        if not -count <= idx < count:
            raise IndexError(f"{self.label}: no sample {idx}; there are {count}")
        row = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[row].tolist(), self.sample_index[row + 1].tolist()
        if not 0 <= first <= last < len(self.document_index):
            raise CacheError(f"{self.label}: row {row} of the sample index points to documents {first}..{last}")
        documents = np.asarray(self.document_index[first : last + 1])
        return (*self._read(documents, begin, end + self._extra_token, row), documents)

    def _read(self, documents: npt.NDArray[np.int32], begin: int, end: int, row: int) -> tuple[Int64Array, Int64Array]:
        dataset = self.dataset
        lengths = np.asarray(dataset.sequence_lengths[documents], dtype=np.int64)
        stops = lengths.copy()
        stops[-1] = end
        starts = np.zeros_like(stops)
        starts[0] = begin
        counts = stops - starts
        if begin < 0 or (counts < 0).any() or end > lengths[-1]:
            raise CacheError(
                f"{self.label}: row {row} of the sample index leaves its documents (tokens {begin} to {end}, "
                f"lengths {lengths[[0, -1]].tolist()}); the index cache is not this data's: remove it"
            )
        offsets = np.asarray(dataset.sequence_pointers[documents]) + starts * dataset.dtype.itemsize
        tokens = dataset.read_pieces(offsets, counts)
        if tokens.dtype.kind not in "iu":
            raise FormatError(f"{self.label}: dtype {tokens.dtype.name} holds no token ids, need an integer")
        return tokens.astype(np.int64), counts
