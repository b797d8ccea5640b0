"""Fill-in-the-middle: parts of a sample's documents are rearranged, so that the model learns to infill.

Source: Bavarian et al. 2022, "Efficient training of language models to fill in the middle" (character-level spans,
PSM and SPM order).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tdp_megatron.datasets.config import GPTDatasetConfig
from tdp_megatron.datasets.gpt import GPTDataset
from tdp_megatron.types import Int64Array

__all__ = ["GPTFIMDataset", "GPTFIMDatasetConfig"]

_TOKENS = ("prefix", "middle", "suffix")


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Configuration of fill-in-the-middle samples; ``tokenizer`` must have ``tokenize`` and ``detokenize``."""

    fim_rate: float = 0.5
    """Share of the documents in a sample that are rearranged."""

    fim_spm_rate: float = 0.5
    """Share of those whose suffix comes before their prefix."""

    fim_extra_tokens: Mapping[str, int | str] | None = None
    """Ids, or spellings known to the tokenizer's ``token_id`` or ``token_to_id``, of ``prefix``, ``middle``,
    ``suffix``."""

    fim_split_sample: int | str | None = None
    """Token at which documents fall into fragments that are rearranged each on its own; None for whole documents."""

    fim_fragment_rate: float | None = None
    """Share of the fragments of a chosen document that are rearranged; with ``fim_split_sample`` only."""

    fim_no_prefix: str | None = None
    """Documents or fragments that begin with this text are left alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        missing = [name for name in _TOKENS if name not in (self.fim_extra_tokens or {})]
        if missing:
            raise ValueError(f"fim_extra_tokens has no {', '.join(missing)}; give ids or spellings")
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            raise ValueError("fim_split_sample and fim_fragment_rate go together; give both or none")
        if self.inter_document_masking:
            raise ValueError("inter_document_masking needs the documents' places, which fill-in-the-middle moves")
        for name in ("tokenize", "detokenize"):
            if not callable(getattr(self.tokenizer, name, None)):
                raise TypeError(f"{type(self.tokenizer).__name__} has no {name}, which fill-in-the-middle needs")


class GPTFIMDataset(GPTDataset):
    """``GPTDataset`` whose documents are rearranged at random; a sample depends on the seed and its number alone.

    Samples keep their length: what becomes longer is cut, what becomes shorter is padded.

    Raises:
        ValueError: the tokenizer does not know one of the extra tokens.
    """

    config: GPTFIMDatasetConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extra = self.config.fim_extra_tokens or {}
        self._prefix, self._middle, self._suffix = (self._id(extra[name]) for name in _TOKENS)
        split = self.config.fim_split_sample
        self._split = None if split is None else self._id(split)

    def _id(self, token: int | str) -> int:
        if not isinstance(token, str):
            return int(token)
        for name in ("token_id", "token_to_id"):
            look_up = getattr(self.config.tokenizer, name, None)
            if callable(look_up) and (found := look_up(token)) is not None:
                return int(found)
        raise ValueError(f"the tokenizer has no token {token!r}; give its id, or add it to the tokenizer")

    def _query(self, idx: int) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int32]]:
        tokens, counts, documents = super()._query(idx)
        draws = np.random.Generator(np.random.Philox(key=self.config.random_seed, counter=idx % len(self)))
        parts: list[Int64Array] = []
        for document, end in _split_at(tokens, getattr(self.config.tokenizer, "eod", None)):
            chosen = draws.random() < self.config.fim_rate
            parts += [self._document(document, draws) if chosen else document, end]
        return np.concatenate(parts)[: len(tokens)], counts, documents

    def _document(self, tokens: Int64Array, draws: np.random.Generator) -> Int64Array:
        if self._split is None or self.config.fim_fragment_rate is None:
            return self._rearranged(tokens, draws)
        parts: list[Int64Array] = []
        for fragment, end in _split_at(tokens, self._split):
            chosen = draws.random() < self.config.fim_fragment_rate
            parts += [self._rearranged(fragment, draws) if chosen else fragment, end]
        return np.concatenate(parts)

    def _rearranged(self, tokens: Int64Array, draws: np.random.Generator) -> Int64Array:
        if not len(tokens):
            return tokens
        tokenizer = self.config.tokenizer
        text: str = tokenizer.detokenize(tokens.tolist())
        if self.config.fim_no_prefix and text.startswith(self.config.fim_no_prefix):
            return tokens
        begin, end = sorted(draws.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            np.array(tokenizer.tokenize(part) if part else [], dtype=np.int64)
            for part in (text[:begin], text[begin:end], text[end:])
        )
        ids = [np.array([token], dtype=np.int64) for token in (self._prefix, self._suffix, self._middle)]
        if draws.random() < self.config.fim_spm_rate:
            return np.concatenate([ids[0], ids[1], suffix, ids[2], prefix, middle])
        return np.concatenate([ids[0], prefix, ids[1], suffix, ids[2], middle])


def _split_at(tokens: Int64Array, token: int | None) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Runs without the token, each with the token that ended it or nothing."""
    begin = 0
    for place in [] if token is None else np.flatnonzero(tokens == token).tolist():
        yield tokens[begin:place], tokens[place : place + 1]
        begin = place + 1
    yield tokens[begin:], tokens[:0]
