"""Maps without descriptors, lists of temporary files, and the description that names a cache."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdp_megatron import _C
from tdp_megatron.datasets import cache_writer
from tdp_megatron.datasets.cache_lock import CacheLock
from tdp_megatron.datasets.megatron_dataset import describe
from tdp_megatron.indexed.atomic import TemporaryOutput


def test_a_map_holds_no_descriptor_and_outlives_the_name(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 100)
    before = len(os.listdir("/proc/self/fd"))
    maps = [_C.map_file(str(path)) for _ in range(300)]
    assert len(os.listdir("/proc/self/fd")) == before
    part = maps[7][1000:1010]
    path.unlink()
    del maps
    assert part.tolist() == [i % 256 for i in range(1000, 1010)]
    assert not part.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1


def test_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        _C.map_file(str(tmp_path / "nothing"))
    with pytest.raises(OSError, match=str(tmp_path)):
        _C.map_file(str(tmp_path))
    (tmp_path / "empty").touch()
    assert _C.map_file(str(tmp_path / "empty")).shape == (0,)


def test_left_files_go_and_those_of_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "index.npy"
    left = tmp_path / "index.npy.0123abcd.tmp"
    others = [tmp_path / "index.npy.backup.tmp", tmp_path / "other.npy.0123abcd.tmp", tmp_path / "index.npy.tmp"]
    for path in [left, *others]:
        path.touch()
    output = TemporaryOutput(str(target))
    assert not left.exists()
    assert all(path.exists() for path in others)
    writing = TemporaryOutput(str(target))  # the first one is locked: it is not taken for a left one
    assert os.path.exists(output.temporary_path)
    for each in (output, writing):
        each.discard()


keys = st.text(max_size=8)
entries = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | keys,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(st.dictionaries(keys, entries, max_size=5))
def test_a_description_is_indented_json(identifiers: dict[str, Any]) -> None:
    text, digest = describe(OrderedDict(identifiers))
    assert text == json.dumps(identifiers, indent=4)
    assert len(digest) == 32


def test_a_description_expands_what_has_identifiers() -> None:
    class Tokenizer:
        unique_identifiers: ClassVar[Any] = OrderedDict({"class": "T", "numbers": [1, 2.5, np.float64(3)]})

    identifiers = OrderedDict({"a": {1: "int key", "b": []}, "tokenizer": Tokenizer(), "deep": [[Tokenizer()]]})
    expected = json.dumps(identifiers, indent=4, default=lambda entry: entry.unique_identifiers)
    assert describe(identifiers)[0] == expected
    with pytest.raises(TypeError, match="object has no unique_identifiers"):
        describe(OrderedDict({"tokenizer": object()}))


@pytest.mark.parametrize(
    "array",
    [np.zeros(10, np.int32), np.zeros((5, 2), np.int64), np.zeros((0, 2), np.int16), np.zeros(10**6, np.uint32)],
)
def test_headers_are_numpys(array: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "theirs.npy", array)
    cache_writer._write_array(str(tmp_path / "ours.npy"), array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_a_descriptor_that_is_none() -> None:
    with pytest.raises(OSError, match="descriptor -1"):
        _C.map_descriptor(-1)


# -- lock files that become what is written ----------------------------------------------------------------------


def test_a_lock_that_becomes_a_file(tmp_path: Path) -> None:
    first = CacheLock(str(tmp_path / "lock"), lambda: None)
    waited = threading.Event()
    seen: list[str] = []

    def wait() -> None:
        waited.set()

    def second() -> None:
        lock = CacheLock(str(tmp_path / "lock"), wait)
        seen.extend(sorted(os.listdir(tmp_path)))
        lock.release()
        lock.release()

    thread = threading.Thread(target=second)
    thread.start()
    assert waited.wait(10)
    first.write(b"a long text")
    first.write(b"text")
    first.rename(str(tmp_path / "file"))
    first.release()
    thread.join(10)
    # The one that waited for the old file has a lock of its own, and has not touched the renamed one.
    assert seen == ["file", "lock"]
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"text"


def test_what_a_dead_holder_wrote_into_its_lock_is_gone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("half of a much longer text")
    lock = CacheLock(str(tmp_path / "lock"), lambda: None)
    lock.write(b"whole")
    lock.rename(str(tmp_path / "file"))
    lock.release()
    assert (tmp_path / "file").read_bytes() == b"whole"
