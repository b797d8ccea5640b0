"""Megatron's arguments that say which data a run reads, in all their forms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tdp_megatron.datasets.blend import Blend, blend_from_list, check_weights
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset

__all__ = ["add_data_arguments", "blends_of", "read_sequences_per_dataset", "unique_prefixes"]

_SPLITS = ("train", "valid", "test")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data arguments, each of the four forms."""
    group = parser.add_argument_group(
        "data", "one of four forms; a list holds prefixes, or weights and prefixes in turn"
    )
    group.add_argument("--data-path", nargs="*", metavar="ITEM", help="list for all splits, divided by --split")
    for split in _SPLITS:
        group.add_argument(f"--{split}-data-path", nargs="*", metavar="ITEM", help=f"list of the {split} split alone")
    group.add_argument("--data-args-path", metavar="FILE", help="file with the list of --data-path")
    group.add_argument(
        "--per-split-data-args-path",
        metavar="FILE",
        help="JSON file with the keys train, valid and test, each a list or a string",
    )


def blends_of(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """The blend for all splits, or the blends of the three splits.

    Returns:
        (blend, blend_per_split), one of them None.

    Raises:
        FormatError: a file is not what it should be.
        ValueError: no form or several, a list that mixes weights and prefixes, or weights that are none.
    """
    own = [getattr(args, f"{split}_data_path") for split in _SPLITS]
    forms = {
        "--data-path": args.data_path is not None,
        "--data-args-path": args.data_args_path is not None,
        "--(train|valid|test)-data-path": any(items is not None for items in own),
        "--per-split-data-args-path": args.per_split_data_args_path is not None,
    }
    given = [name for name, there in forms.items() if there]
    if len(given) != 1:
        found = f"{' and '.join(given)} exclude each other" if given else "no data is given"
        raise ValueError(f"{found}; give one of {', '.join(forms)}")
    if args.data_path is not None:
        return _blend(args.data_path), None
    if args.data_args_path is not None:
        return _from_file(args.data_args_path), None
    if args.per_split_data_args_path is not None:
        own = _per_split_file(args.per_split_data_args_path)
    return None, [_blend(items) for items in own]


def _blend(items: Sequence[str] | None) -> Blend | None:
    """A list's prefixes and weights, the latter looked at before a file is opened."""
    blend = blend_from_list(items)
    if blend is None:
        return None
    prefixes, weights = blend
    if weights is not None:
        check_weights(weights, prefixes)
    elif items is not None and any(_is_number(prefix) and not IndexedDataset.exists(prefix) for prefix in prefixes):
        number = next(prefix for prefix in prefixes if _is_number(prefix))
        raise ValueError(
            f"the list {' '.join(items)!r} has {len(items)} items, of which {number!r} is a weight: give a weight "
            "before every prefix, or none at all"
        )
    return blend


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _from_file(path: str) -> Blend | None:
    with open(path, encoding="utf-8") as file:
        items = file.read().split()
    if not items:
        raise FormatError(f"{path}: is empty; it should hold prefixes, or weights and prefixes in turn")
    return _blend(items)


def _per_split_file(path: str) -> list[list[str] | None]:
    content = _json_object(path)
    if unknown := sorted(set(content) - set(_SPLITS)):
        raise FormatError(f"{path}: unknown key {unknown[0]!r}; the keys are {', '.join(_SPLITS)}")
    lists = [_items(path, split, content.get(split)) for split in _SPLITS]
    if not any(lists):
        raise FormatError(f"{path}: none of {', '.join(_SPLITS)} has data")
    return lists


def _items(path: str, split: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list) or not all(isinstance(item, (str, int, float)) for item in value):
        raise FormatError(f"{path}: {split} must be a string or a list of prefixes and weights, found {value!r}")
    # Weights may be numbers there.
    return [str(item) for item in value] or None


def _json_object(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: must be a JSON object, found {type(content).__name__}")
    return content


def unique_prefixes(blend: Blend | None, blend_per_split: Sequence[Blend | None] | None) -> list[str]:
    """Every prefix once, in order."""
    blends = [blend, *(blend_per_split or [])]
    return list(dict.fromkeys(prefix for part in blends if part is not None for prefix in part[0]))


def read_sequences_per_dataset(path: str) -> dict[str, list[int]]:
    """What ``tdp sequences`` or Megatron's tool wrote.

    Raises:
        FormatError: the file is something else.
    """
    content = _json_object(path)
    for prefix, entry in content.items():
        if not isinstance(entry, list) or not all(isinstance(value, int) for value in entry):
            raise FormatError(f"{path}: the entry of {prefix} must be a list of integers, found {entry!r}")
    return content
