"""Megatron's tokenizer arguments, as far as cache names depend on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from tdp_megatron.datasets.tokenizer_spec import TokenizerSpec
from tdp_megatron.errors import FormatError

__all__ = ["add_tokenizer_arguments", "tokenizer_spec_of"]

# Building an order of samples never asks for it.
_NO_EOD = -1


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tokenizer arguments."""
    group = parser.add_argument_group("tokenizer", "its identifiers are part of the names of caches; no text is read")
    group.add_argument("--tokenizer-type", metavar="TYPE", help="NullTokenizer or HuggingFaceTokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH", help="as the training run is given it")
    group.add_argument("--vocab-size", type=int, metavar="N", help="of NullTokenizer")
    group.add_argument("--null-tokenizer-eod-id", type=int, metavar="ID")
    group.add_argument("--null-tokenizer-pad-id", type=int, metavar="ID")
    group.add_argument("--vocab-file", metavar="PATH")
    group.add_argument("--merge-file", metavar="PATH")
    group.add_argument("--special-tokens", nargs="*", metavar="TOKEN")
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")
    group.add_argument(
        "--tokenizer-identifiers",
        metavar="FILE",
        help="JSON file of the training tokenizer's unique_identifiers, for any other type",
    )


def tokenizer_spec_of(args: argparse.Namespace) -> TokenizerSpec:
    """What names caches as the tokenizer of the training run would.

    Raises:
        FormatError: the file of identifiers is none.
        ValueError: an unknown type, or a missing argument.
    """
    if args.tokenizer_identifiers is not None:
        if args.tokenizer_type is not None:
            raise ValueError("--tokenizer-identifiers and --tokenizer-type exclude each other; give one")
        return _from_file(args.tokenizer_identifiers)
    if args.tokenizer_type == "NullTokenizer":
        if args.vocab_size is None:
            raise ValueError("NullTokenizer needs --vocab-size")
        return TokenizerSpec.null(args.vocab_size, eod_id=args.null_tokenizer_eod_id, pad_id=args.null_tokenizer_pad_id)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        if args.tokenizer_model is None:
            raise ValueError("HuggingFaceTokenizer needs --tokenizer-model")
        # In the order of Megatron's own call, with what that adds (Aug 2026).
        arguments: dict[str, Any] = {
            "chat_template": None,
            "vocab_file": args.vocab_file,
            "merges_file": args.merge_file,
            "additional_special_tokens": args.special_tokens or [],
            "use_fast": not args.tokenizer_hf_no_use_fast,
            "trust_remote_code": args.trust_remote_code,
            "include_special_tokens": not args.tokenizer_hf_no_include_special_tokens,
            "use_gigatoken": False,
        }
        return TokenizerSpec(eod=_NO_EOD, tokenizer_path=args.tokenizer_model, arguments=arguments)
    known = "NullTokenizer, HuggingFaceTokenizer, or --tokenizer-identifiers for any other"
    if args.tokenizer_type is None:
        raise ValueError(f"the names of caches depend on the tokenizer: give --tokenizer-type, one of {known}")
    raise ValueError(f"--tokenizer-type {args.tokenizer_type} is not known here; there are {known}")


def _from_file(path: str) -> TokenizerSpec:
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, Mapping) or list(content)[:2] != ["class", "tokenizer_path"]:
        raise FormatError(
            f"{path}: must be the JSON object of a tokenizer's unique_identifiers, which begins with class and "
            "tokenizer_path"
        )
    return TokenizerSpec(
        eod=_NO_EOD,
        class_name=str(content["class"]),
        tokenizer_path=content["tokenizer_path"],
        arguments={key: value for key, value in content.items() if key not in ("class", "tokenizer_path")},
    )
