"""Text to token ids: Hugging Face, tiktoken and SentencePiece files, or plain bytes, behind one interface.

Text is only text: a special token that is spelled out in it is encoded like any other characters, and no tokenizer adds
a token of its own, truncates or pads. Document ends are put between documents by whoever writes them.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import FormatError, TdpError

__all__ = ["BYTES", "ByteTokenizer", "Tokenizer", "load_tokenizer"]

logger = logging.getLogger(__name__)

Int64Array: TypeAlias = npt.NDArray[np.int64]

#: The name of the built-in tokenizer.
BYTES = "bytes"

# Tried in this order when the user names none.
_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<EOD>", "<|eod|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

#: GPT-2's two files, under the names they come with.
_VOCAB_AND_MERGES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

# The expressions these rank files were made with, as the tiktoken package and the model cards define them.
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_QWEN_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"""
    r"""\s+(?!\S)|\s+"""
)
# By number of ranks: a rank file holds neither its expression nor its special tokens.
_TIKTOKEN_FAMILIES = {
    50256: (_GPT2_PATTERN, {"<|endoftext|>": 50256}),
    50280: (_GPT2_PATTERN, {"<|endoftext|>": 50256}),
    100256: (_CL100K_PATTERN, {"<|endoftext|>": 100257}),
    128000: (_CL100K_PATTERN, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
    151643: (_QWEN_PATTERN, {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
    199998: (_O200K_PATTERN, {"<|endoftext|>": 199999}),
}


class Tokenizer(ABC):
    """Turns texts into token ids; the same ids in every process that loads the same file."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Every id is below this, special tokens included."""

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token, or None if the vocabulary does not have it."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        """Encode texts.

        Args:
            texts: without lone surrogates.

        Returns:
            All ids one after the other, int64, and the number of ids of each text, int64 [len(texts)].
        """

    def eod_id(self, token: str | None = None) -> int:
        """The id that ends a document.

        Args:
            token: its spelling; None takes the first usual one that the vocabulary has.

        Raises:
            FormatError: the vocabulary does not have it; the message lists its special tokens.
        """
        for candidate in _EOD_TOKENS if token is None else (token,):
            found = self.token_id(candidate)
            if found is not None:
                return found
        specials = sorted(self.special_tokens)
        wanted = f"no token {token!r}" if token is not None else f"none of {', '.join(_EOD_TOKENS)}"
        shown = ", ".join(specials[:20]) + (f" and {len(specials) - 20} more" if len(specials) > 20 else "")
        raise FormatError(
            f"the tokenizer has {wanted}; candidates for the end of a document: "
            f"{shown or 'none, it has no special tokens'}"
        )


def _flatten(rows: Sequence[Sequence[int]]) -> tuple[Int64Array, Int64Array]:
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    flat = np.empty(int(lengths.sum()), dtype=np.int64)
    start = 0
    for row in rows:
        flat[start : start + len(row)] = row
        start += len(row)
    return flat, lengths


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and id 256 for the end of a document."""

    EOD = 256
    """Id of the end of a document."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def special_tokens(self) -> dict[str, int]:
        return {"<|endoftext|>": self.EOD}

    def token_id(self, token: str) -> int | None:
        return self.special_tokens.get(token)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter((len(text) for text in encoded), dtype=np.int64, count=len(encoded))
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.int64), lengths


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the tokenizers package, or GPT-2's pair of files: vocabulary and merges."""

    def __init__(self, path: str, merges_path: str | None = None) -> None:
        # Rust threads under our own processes would only fight for the same cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            import tokenizers
        except ImportError as error:
            raise _missing("tokenizers", path) from error
        try:
            if merges_path is None:
                self._tokenizer = tokenizers.Tokenizer.from_file(path)
            else:
                self._tokenizer = _byte_level_bpe(tokenizers, path, merges_path)
        except Exception as error:
            if merges_path is not None:
                raise FormatError(f"{path} and {merges_path}: no vocabulary and merges: {error}") from error
            raise FormatError(f"{path}: not a tokenizer.json the tokenizers package can read: {error}") from error
        # Files saved by training scripts often carry these; they would cut documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._specials = {token.content: int(number) for number, token in added.items() if token.special}

    @property
    def vocab_size(self) -> int:
        # Not the number of entries: ids may have gaps.
        return max(self._vocab.values(), default=-1) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        return self._specials

    def token_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


def _byte_level_bpe(tokenizers: Any, vocab_path: str, merges_path: str) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_path, merges_path))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The pair does not say which of its tokens are special.
    tokenizer.add_special_tokens([token for token in _EOD_TOKENS if tokenizer.token_to_id(token) is not None])
    return tokenizer


class TiktokenTokenizer(Tokenizer):
    """A tiktoken rank file: lines of a base64 token and its rank."""

    def __init__(self, path: str) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise _missing("tiktoken", path) from error
        ranks = _read_ranks(path)
        top = max(ranks.values()) + 1
        if len(ranks) not in _TIKTOKEN_FAMILIES:
            logger.warning(
                "%s: %d ranks are of no known tokenizer; texts are split as for cl100k, <|endoftext|> is %d",
                *(path, len(ranks), top),
            )
        pattern, self._specials = _TIKTOKEN_FAMILIES.get(len(ranks), (_CL100K_PATTERN, {"<|endoftext|>": top}))
        self._vocab_size = max(top, max(self._specials.values()) + 1)
        self._encoding: Any = tiktoken.Encoding(
            os.path.basename(path), pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._specials
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_tokens(self) -> dict[str, int]:
        return self._specials

    def token_id(self, token: str) -> int | None:
        return self._specials.get(token)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        return _flatten([self._encoding.encode_ordinary(text) for text in texts])


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file."""

    def __init__(self, path: str) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise _missing("sentencepiece", path) from error
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise FormatError(f"{path}: not a SentencePiece model: {error}") from error
        control = (i for i in range(self.vocab_size) if self._processor.is_control(i))
        self._specials = {str(self._processor.id_to_piece(i)): i for i in control}

    @property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def special_tokens(self) -> dict[str, int]:
        return self._specials

    def token_id(self, token: str) -> int | None:
        # Unknown pieces come back as the id of <unk>.
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    def encode_batch(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        return _flatten([self._processor.encode(text, out_type=int) for text in texts])


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer; its kind is told from the content of the file.

    Args:
        path: a ``tokenizer.json``, a tiktoken rank file, a SentencePiece model, a folder that holds one of them or
            GPT-2's two files, or ``"bytes"`` for the built-in one.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: the file is none of these.
        TdpError: the package that reads it is not installed.
    """
    if path == BYTES:
        return ByteTokenizer()
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in ("tokenizer.json", "tokenizer.model")]
        found = [name for name in inside if os.path.isfile(name)]
        if not found:
            for vocab, merges in _VOCAB_AND_MERGES:
                pair = os.path.join(path, vocab), os.path.join(path, merges)
                if all(os.path.isfile(name) for name in pair):
                    return HuggingFaceTokenizer(*pair)
            pairs = ", ".join(" with ".join(names) for names in _VOCAB_AND_MERGES)
            raise FileNotFoundError(f"{path}: the folder has neither tokenizer.json nor tokenizer.model, nor {pairs}")
        path = found[0]
    if not os.path.exists(path):
        raise FileNotFoundError(f"tokenizer {path} does not exist; give a file, or {BYTES!r} for the built-in one")
    with open(path, "rb") as file:
        head = file.read(4096)
    if head.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(path)
    if _is_rank_line(head.split(b"\n", 1)[0]):
        return TiktokenTokenizer(path)
    # The first field of the protobuf: pieces, length-delimited.
    if head[:1] == b"\x0a":
        return SentencePieceTokenizer(path)
    raise FormatError(
        f"{path}: neither a tokenizer.json, a tiktoken rank file nor a SentencePiece model (first bytes {head[:16]!r})"
    )


def _is_rank_line(line: bytes) -> bool:
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def _read_ranks(path: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not _is_rank_line(line):
                raise FormatError(f"{path}: line {number}: expected a base64 token and its rank, found {line[:40]!r}")
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    if len(set(ranks.values())) != len(ranks):
        raise FormatError(f"{path}: two tokens have the same rank")
    return ranks


def _missing(package: str, path: str) -> TdpError:
    return TdpError(f"{path} needs the package {package}: pip install 'tdp-megatron[tokenizers]'")
