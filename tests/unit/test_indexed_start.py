"""What is known before files are opened, how much is opened when, and how many stay open."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder, layout
from tdp_megatron.indexed.pool import OPEN_FILES


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_document(range(10), [10])
        builder.add_document([1, 2, 3], [2, 1])
        builder.end_document()
        builder.add_document([7] * 5, [5])
        builder.finalize(tmp_path / "x.idx")
    return tmp_path / "x"


def idx(prefix: Path) -> Path:
    return prefix.with_suffix(".idx")


#: What is true of these files: counts alone, and with dtype code and sizes.
ENTRIES = [[4, 5], [4, 5, 4, 72, 34 + 12 * 4 + 8 * 5]]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("alone", [True, False])
def test_manifest_that_agrees(prefix: Path, entry: list[int], alone: bool) -> None:
    path = str(prefix)
    dataset = IndexedDataset(
        path, sequences_per_dataset=entry if alone else {path: entry, "other": [1, 1]}, dtype_code=4
    )
    assert len(dataset) == 4
    with pytest.raises(FormatError, match="expected dtype code 8, found 4"):
        IndexedDataset(path, dtype_code=8)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([4, 4], r"says \(4, 4\) sequences and document indices, the index has \(4, 5\)"),
        ([5, 5], r"says \(5, 5\)"),
        ([4, 5, 8, 72, 122], "expected dtype code 8, found 4"),
        ([4, 5, 4, 76, 122], r"x.bin: sequences_per_dataset says 76 bytes, the file has 72"),
        ([4, 5, 4, 72, 120], r"x.idx: sequences_per_dataset says 120 bytes, the file has 122"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_manifest_that_differs(prefix: Path, entry: list[int], message: str, fast: bool) -> None:
    def use() -> None:
        _ = IndexedDataset(prefix, fast_cache_load=fast, sequences_per_dataset={str(prefix): entry})[0]

    with pytest.raises(FormatError, match=message):
        use()


@pytest.mark.parametrize(
    ("counts", "code", "message"),
    [
        ({}, None, "no entry for"),
        ([4], None, "must give"),
        ([4, 5, 4], None, "must give"),
        ("45", None, "must give"),
        ([4, -1], None, "must give"),
        ([4.0, 5], None, "must give"),
        (7, None, "must give"),
        ([4, 5, 9, 72, 122], None, "dtype code 9 is unknown"),
        (None, 0, "dtype code 0 is unknown"),
        ([4, 5, 4, 72, 122], 8, "dtype_code is 8, sequences_per_dataset says 4"),
    ],
)
def test_manifest_that_is_none(prefix: Path, counts: Any, code: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix, fast_cache_load=True, sequences_per_dataset=counts, dtype_code=code)


def test_fast_start_opens_at_first_access(prefix: Path) -> None:
    content = idx(prefix).read_bytes()
    idx(prefix).unlink()
    dataset = IndexedDataset(prefix, fast_cache_load=True)
    assert "not opened" in repr(dataset)
    with pytest.raises(FileNotFoundError):
        len(dataset)
    idx(prefix).write_bytes(content)
    assert len(dataset) == 4
    assert "sequences=4" in repr(dataset)


def test_fast_start_knows_what_the_manifest_says(prefix: Path) -> None:
    gone = str(prefix) + "-gone"
    dataset = IndexedDataset(gone, fast_cache_load=True, sequences_per_dataset={gone: ENTRIES[1]})
    for known in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert (len(known), known.dtype, known.num_tokens) == (4, np.int32, 18)
        with pytest.raises(FileNotFoundError):
            known[0]
    counts_only = IndexedDataset(gone, fast_cache_load=True, sequences_per_dataset=[4, 5])
    assert len(counts_only) == 4
    with pytest.raises(FileNotFoundError):
        _ = counts_only.dtype


def test_fast_start_of_a_thousand_prefixes_looks_at_no_file(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{prefix}-{i}" for i in range(1000)]
    manifest = dict.fromkeys(names, ENTRIES[1])
    looks: list[Any] = []
    for module, name in ((os, "stat"), (os, "open"), (io, "open"), (builtins, "open"), (os.path, "exists")):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: looks.append(args))
    datasets = [IndexedDataset(n, fast_cache_load=True, sequences_per_dataset=manifest) for n in names]
    counted = sum(len(dataset) for dataset in datasets)
    monkeypatch.undo()
    assert (counted, looks) == (4000, [])


def test_opening_opens_one_file(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    stats: list[Any] = []
    real_open, real_stat = os.open, os.stat
    monkeypatch.setattr(os, "open", lambda *a, **k: (opened.append(a[0]), real_open(*a, **k))[1])
    monkeypatch.setattr(os, "stat", lambda *a, **k: (stats.append(a[0]), real_stat(*a, **k))[1])
    IndexedDataset(prefix)
    monkeypatch.undo()
    assert opened == [f"{prefix}.idx"]
    assert [path for path in stats if isinstance(path, str)] == [f"{prefix}.idx", f"{prefix}.bin", f"{prefix}.idx"]


def test_an_index_that_left_the_pool_is_not_read_again(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix)
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    monkeypatch.setattr(layout, "_check_sequences", lambda *args: pytest.fail("read again"))
    assert dataset.sequence_lengths.tolist() == [len(sequence) for sequence in dataset]


def test_five_thousand_prefixes_under_a_small_limit(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_document([1, 2, 3], [3])
        builder.finalize(tmp_path / "x.idx")
    for i in range(5000):
        for suffix in ("bin", "idx"):
            os.link(tmp_path / f"x.{suffix}", tmp_path / f"{i}.{suffix}")
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from tdp_megatron.indexed import IndexedDataset\n"
        f"before = len(os.listdir('/proc/self/fd'))\n"
        f"datasets = [IndexedDataset(f'{tmp_path}/{{i}}') for i in range(5000)]\n"
        "total = sum(int(dataset[0].sum()) for dataset in datasets)\n"
        "print(total, len(os.listdir('/proc/self/fd')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    total, held = map(int, done.stdout.split())
    assert total == 30_000
    assert held <= 64
