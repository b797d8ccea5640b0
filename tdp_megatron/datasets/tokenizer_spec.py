"""The few facts that samples and cache keys need of a tokenizer, without the tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TokenizerSpec"]

#: Class that Megatron's text tokenizers name in their identifiers.
_MEGATRON_TEXT = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Special ids of a tokenizer, and the identifiers that Megatron's tokenizer would put into cache keys.

    ``arguments`` are the keyword arguments of Megatron's ``MegatronTokenizer.from_pretrained`` in the order of that
    call; with the same ones, the caches are the same files.
    """

    eod: int
    """End of document."""
    vocab_size: int | None = None
    """Number of ids."""
    pad: int | None = None
    """Padding; None for none."""
    eos: int | None = None
    """End of sequence, where it differs from ``eod``."""
    special_tokens_dict: Mapping[str, int] = field(default_factory=dict)
    """Other special ids by name, for the test whether ``pad`` is one of them."""
    tokenizer_path: str | None = None
    """File or folder, as Megatron was given it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments, in call order."""
    class_name: str = _MEGATRON_TEXT
    """Full name of the class that the identifiers name."""

    @classmethod
    def null(cls, vocab_size: int, *, eod_id: int | None = None, pad_id: int | None = None) -> TokenizerSpec:
        """Megatron's ``null-text`` tokenizer: ids 0 to vocab_size - 1, the last one being the end of document."""
        arguments: dict[str, Any] = {"vocab_size": vocab_size}
        if eod_id is not None:
            arguments["eod_id"] = eod_id
        if pad_id is not None:
            arguments["pad_id"] = pad_id
        return cls(
            eod=vocab_size - 1 if eod_id is None else eod_id, vocab_size=vocab_size, pad=pad_id, arguments=arguments
        )

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What enters the cache key, in order."""
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = self.class_name
        identifiers["tokenizer_path"] = self.tokenizer_path
        identifiers.update((key, str(value)) for key, value in self.arguments.items())
        return identifiers
