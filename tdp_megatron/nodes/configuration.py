"""The configuration of a graph of nodes as flat facts, which ranks compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

from tdp_megatron.nodes.base import Node
from tdp_megatron.nodes.indexed_read import IndexedRead

__all__ = ["configuration_of", "digest_of_configuration", "state_of"]

#: How a blend writes what its sources share; they say nothing to a reader.
_JOINED = ({"keys"}, {"same"}, {"each"})


def configuration_of(root: BaseNode[Any]) -> dict[str, str]:
    """What decides the data that a graph gives, by name: the fingerprints in its state, and a sample of the tokens.

    A user's node takes part with what its state has under ``"fingerprint"``, and with the states in it.

    Args:
        root: a node that has been reset.

    Returns:
        By name, such as ``GPTSample.random_seed``, the value as text.
    """
    facts: dict[str, str] = {}
    seen: dict[str, int] = {}
    for name, value in [*_fingerprints(state_of(root)), *_samples(root)]:
        count = seen[name] = seen.get(name, 0) + 1  # a graph may have several nodes of one kind
        facts[name if count == 1 else f"{name} ({count})"] = value
    return facts


def state_of(root: BaseNode[Any]) -> Any:
    """The state of a graph; None where a user's node has none."""
    try:
        return root.state_dict()
    except NotImplementedError:
        return None


def digest_of_configuration(facts: Mapping[str, str]) -> bytes:
    """SHA-256 of the facts."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def _fingerprints(state: Any) -> Iterator[tuple[str, str]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key == Node.FINGERPRINT_KEY:
                yield from _facts(value)
            else:
                yield from _fingerprints(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _fingerprints(value)


def _facts(fingerprint: Any) -> Iterator[tuple[str, str]]:
    fingerprint = _unjoined(fingerprint)
    if not isinstance(fingerprint, Mapping):
        yield Node.FINGERPRINT_KEY, _text(fingerprint)
        return
    node = _unjoined(fingerprint.get("node", "a node"))
    label = node if isinstance(node, str) else " and ".join(dict.fromkeys(map(str, node)))
    for key, value in fingerprint.items():
        yield from _flat(f"{label}.{key}", value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    value = _unjoined(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, _text(value)


def _unjoined(value: Any) -> Any:
    while isinstance(value, Mapping) and set(value) in _JOINED:
        value = next(iter(value.values()))
    return value


def _text(value: Any) -> str:
    # What JSON lacks may hold addresses, which differ from rank to rank.
    return json.dumps(value, sort_keys=True, default=lambda v: v.tolist() if hasattr(v, "tolist") else type(v).__name__)


def _samples(root: BaseNode[Any]) -> Iterator[tuple[str, str]]:
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, IndexedRead):
            crc = node.tokens_crc32()
            if crc is not None:
                # Ranks may have the file under other paths.
                yield "IndexedRead.first and last tokens (CRC)", str(crc)
        waiting += [
            n for n in (getattr(node, "source", None), *getattr(node, "sources", ())) if isinstance(n, BaseNode)
        ]
