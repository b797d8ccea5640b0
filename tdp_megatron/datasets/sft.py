"""Samples of their own length from JSON lines: conversations for fine-tuning, or plain texts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from tdp_megatron.datasets.chat_records import ChatFormat, JsonLines, parse_record
from tdp_megatron.datasets.chat_template import ChatTemplate, TextEncoder
from tdp_megatron.datasets.config import GPTDatasetConfig
from tdp_megatron.datasets.megatron_dataset import MegatronDataset
from tdp_megatron.datasets.splits import Split
from tdp_megatron.errors import FormatError
from tdp_megatron.types import IGNORE_LABEL, Int64Array

__all__ = ["SFTDataset", "SFTDatasetConfig"]

LossOn = Literal["assistant", "all"]
LongSamples = Literal["truncate", "error"]


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):
    """Configuration of samples from JSON lines; prefixes of blends are paths of ``.jsonl`` files.

    Without ``chat_template``, ``tokenizer`` must have Megatron's ``tokenize_conversation``.
    """

    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    eod_mask_loss: bool | None = False
    create_attention_mask: bool = False

    chat_format: ChatFormat = "auto"
    """Layout of the records."""

    chat_template: ChatTemplate | None = None
    """How conversations become tokens, with ``text_tokenizer``."""

    text_tokenizer: TextEncoder | None = None
    """Encodes text."""

    loss_on: LossOn = "assistant"
    """What of a conversation is learned; of a plain text it is everything."""

    long_samples: LongSamples = "truncate"
    """What happens to samples longer than ``sequence_length``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("chat_format", ChatFormat), ("loss_on", LossOn), ("long_samples", LongSamples)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.mock:
            raise ValueError("blend or blend_per_split must name .jsonl files: there is no mock data of this kind")
        if self.reset_position_ids or self.reset_attention_mask or self.create_attention_mask:
            raise ValueError(
                "reset_position_ids, reset_attention_mask and create_attention_mask are for samples of several "
                "documents; here a sample is one, and packing keeps them apart by cu_seqlens"
            )
        if self.chat_template is not None and self.text_tokenizer is None:
            raise ValueError("chat_template needs text_tokenizer, such as load_tokenizer(path)")

    @property
    def padding_divisor(self) -> int:
        """Samples are padded to a multiple of this, so that context- and sequence-parallel ranks get equal parts."""
        context = self.context_parallel_size or 1
        if self.hybrid_context_parallel:
            divisor = self.data_parallel_size * context * 2
        else:
            divisor = context * 2 if context > 1 else 1
        return divisor * max(self.sequence_parallel_size, 1)


class SFTDataset(MegatronDataset):
    """One record of a JSON-lines file is one sample of its own length, in the order of the file.

    Args:
        dataset: the records.
        dataset_path: path of the file.
        indices: int32 [m], the records of this split.
        num_samples: samples wanted, the records in turn; None for each once.
        index_split: the split.
        config: everything else.

    Raises:
        ValueError: the split has no record.
    """

    config: SFTDatasetConfig

    def __init__(
        self,
        dataset: JsonLines,
        dataset_path: str | None,
        indices: npt.NDArray[np.int32] | range | None,
        num_samples: int | None,
        index_split: Split,
        config: SFTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        if not len(self.elements):
            raise ValueError(f"{self.label}: the split has no record; give it a larger share or more data")
        self.num_truncated = 0
        """Samples read so far that were longer than ``sequence_length``."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        if dataset_path is None or not os.path.isfile(dataset_path):
            raise FileNotFoundError(f"{dataset_path} does not exist; give the path of a .jsonl file, with its ending")
        return JsonLines(dataset_path)

    def __len__(self) -> int:
        return len(self.elements) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample; None gives sample 0 without loss, to fill batches up.

        Returns:
            ``tokens``, ``labels``, ``position_ids`` int64 [S], ``loss_mask`` float32 [S], and int32 []
            ``original_seq_len`` and ``padded_seq_len`` = S. Labels without loss are -100.

        Raises:
            IndexError: there is no such sample.
            FormatError: the record is none; file, line and byte are named.
        """
        number = 0 if idx is None else idx
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.label}: no sample {number}; there are {len(self)}")
        record = int(self.elements[number % len(self) % len(self.elements)])
        ids, learned = self._tokens(record)
        limit = self.config.sequence_length
        if len(ids) > limit:
            if self.config.long_samples == "error":
                raise FormatError(
                    f"{self.dataset.where(record)}: {len(ids)} tokens, sequence_length is {limit}; raise it, or choose "
                    "long_samples='truncate'"
                )
            self.num_truncated += 1
            ids, learned = ids[:limit], learned[:limit]
        return self._sample(ids, learned & (idx is not None))

    def _tokens(self, record: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        config = self.config
        where = self.dataset.where(record)
        content = parse_record(self.dataset[record], config.chat_format, where)
        if isinstance(content, str):
            if config.text_tokenizer is not None:
                ids, _ = config.text_tokenizer.encode_batch([content])
            else:
                ids = np.array(config.tokenizer.tokenize(content), dtype=np.int64)
            ids = np.append(ids, np.int64(config.tokenizer.eod))
            return ids, np.ones(len(ids), dtype=np.bool_)
        if config.chat_template is not None and config.text_tokenizer is not None:
            try:
                ids, learned = config.chat_template.encode(content, config.text_tokenizer)
            except ValueError as error:
                raise FormatError(f"{where}: {error}") from error
        else:
            messages = [{"role": turn.role, "content": turn.content} for turn in content]
            tokens, target = config.tokenizer.tokenize_conversation(messages, True, False)
            ids = np.array(tokens, dtype=np.int64)
            learned = np.array(target, dtype=np.int64) != IGNORE_LABEL
        if not len(ids):
            raise FormatError(f"{where}: the conversation gives no token")
        return ids, np.ones(len(ids), dtype=np.bool_) if config.loss_on == "all" else learned

    def _sample(self, ids: Int64Array, learned: npt.NDArray[np.bool_]) -> dict[str, torch.Tensor]:
        size = len(ids)
        divisor = self.config.padding_divisor
        padded = -(-size // divisor) * divisor
        pad = getattr(self.config.tokenizer, "pad", None)
        tokens = np.full(padded, 0 if pad is None or pad < 0 else pad, dtype=np.int64)
        tokens[:size] = ids
        labels = np.full(padded, IGNORE_LABEL, dtype=np.int64)
        labels[: size - 1] = np.where(learned[1:], ids[1:], IGNORE_LABEL)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy((labels != IGNORE_LABEL).astype(np.float32)),
            "position_ids": torch.arange(padded, dtype=torch.int64),
            "original_seq_len": torch.tensor(size, dtype=torch.int32),
            "padded_seq_len": torch.tensor(padded, dtype=torch.int32),
        }
