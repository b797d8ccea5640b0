"""Both readers: the same data, bad ranges, failing file systems, many files, other processes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder, readers
from tdp_megatron.indexed.pool import OPEN_FILES, HandlePool

TOKENS = np.random.default_rng(3).integers(0, 60000, 5000).astype(np.uint16)
LENGTHS = np.array([0, 1, 999, 0, 3000, 1000])


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
        builder.add_sequences(TOKENS, LENGTHS, np.ones(len(LENGTHS)))
        builder.finalize(tmp_path / "x.idx")
    return tmp_path / "x"


@pytest.fixture(params=[True, False], ids=["mmap", "file"])
def dataset(prefix: Path, request: pytest.FixtureRequest) -> IndexedDataset:
    return IndexedDataset(prefix, mmap=request.param)


def test_access_by_number(dataset: IndexedDataset) -> None:
    sequences = np.split(TOKENS, np.cumsum(LENGTHS)[:-1])
    assert len(list(dataset)) == len(sequences) == len(dataset)
    for i, expected in enumerate(sequences):
        for key in (i, np.int32(i), i - len(sequences)):
            np.testing.assert_array_equal(dataset[key], expected)
    np.testing.assert_array_equal(dataset.get(4, 2990), TOKENS[3990:4000])
    np.testing.assert_array_equal(dataset.get(-2, offset=1, length=3), TOKENS[1001:1004])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6,), "no sequence 6; there are 6"),
        ((-7,), "no sequence -7"),
        ((1, 2), "sequence 1 has 1 tokens; offset 2"),
        ((1, 0, 2), "sequence 1 has 1 tokens; offset 0, length 2"),
        ((1, -1), "offset -1"),
        ((1, 0, -1), "length -1"),
        ((2, 2**62, 2**62), "offset 4611686018427387904"),
    ],
)
def test_access_outside(dataset: IndexedDataset, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(IndexError, match=message):
        dataset.get(*arguments)


@pytest.mark.parametrize("key", [True, 1.0, "1", None, np.array([1, 2])])
def test_access_by_something_else(dataset: IndexedDataset, key: Any) -> None:
    with pytest.raises(TypeError, match="an int or a slice"):
        dataset[key]


def test_slices(dataset: IndexedDataset) -> None:
    sequences = np.split(TOKENS, np.cumsum(LENGTHS)[:-1])
    for which in (slice(None), slice(1, 4), slice(-2, None), slice(0, 100)):
        for found, expected in zip(dataset[which], sequences[which], strict=True):
            np.testing.assert_array_equal(found, expected)
    for step in (2, -1):
        with pytest.raises(ValueError, match=f"step {step}"):
            dataset[::step]


@pytest.mark.parametrize(("pieces", "longest"), [(0, 1), (1, 5000), (300, 5), (300, 400), (40, 2000)])
def test_pieces(dataset: IndexedDataset, pieces: int, longest: int) -> None:
    rng = np.random.default_rng(pieces)
    starts = rng.integers(0, len(TOKENS) + 1, pieces)
    counts = np.minimum(rng.integers(0, longest + 1, pieces), len(TOKENS) - starts)
    found = dataset.read_pieces(starts * 2, counts)
    expected = [TOKENS[a : a + n] for a, n in zip(starts, counts, strict=True)]
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, np.concatenate([*expected, TOKENS[:0]]))


def test_neighbouring_pieces_are_one_read(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    dataset = IndexedDataset(prefix, mmap=False)
    found = dataset.read_pieces(np.array([0, 20, 40, 2000, 2010]), np.array([10, 10, 10, 5, 5]))
    np.testing.assert_array_equal(found, np.concatenate([TOKENS[:30], TOKENS[1000:1010]]))
    assert calls == [0, 2000]


@pytest.mark.parametrize(
    ("offsets", "counts", "error", "message"),
    [
        ([0, 9998], [1, 2], IndexError, "piece 1: 2 tokens from byte 9998 are not inside the file of 10000"),
        ([-2], [1], IndexError, "piece 0"),
        ([0], [-1], IndexError, "piece 0: -1 tokens"),
        ([0], [2**62], IndexError, "piece 0"),
        ([2**62], [0], IndexError, "piece 0"),
        ([1], [1], ValueError, "byte offset 1 is not a multiple of the 2-byte token"),
        ([0, 2], [1], ValueError, "equally long"),
        ([[0]], [[1]], ValueError, "1-D"),
    ],
)
def test_pieces_outside(dataset: IndexedDataset, offsets: Any, counts: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        dataset.read_pieces(np.array(offsets), np.array(counts))


def test_bin_bytes(prefix: Path) -> None:
    mapped = IndexedDataset(prefix).bin_bytes()
    assert mapped is not None
    assert (mapped.dtype, mapped.shape, mapped.flags.writeable) == (np.uint8, (10000,), False)
    np.testing.assert_array_equal(mapped.view(np.uint16), TOKENS)
    assert IndexedDataset(prefix, mmap=False).bin_bytes() is None


def test_index_arrays_cannot_be_written(dataset: IndexedDataset) -> None:
    for array in (dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices):
        assert not array.flags.writeable


def test_pickles_as_arguments(dataset: IndexedDataset) -> None:
    data = pickle.dumps(dataset)
    assert len(data) < 500
    for other in (pickle.loads(data), copy.deepcopy(dataset)):
        assert (other.path_prefix, other.mmap) == (dataset.path_prefix, dataset.mmap)
        np.testing.assert_array_equal(other[2], dataset[2])


class FailingReads:
    """``os.preadv`` that fails, or reads little, as a network file system may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int = 0, code: int = errno.EIO, most: int = 1 << 30):
        self.failures, self.code, self.most, self.calls = failures, code, most, 0
        self.original = os.preadv
        self.waits: list[float] = []
        monkeypatch.setattr(os, "preadv", self)
        monkeypatch.setattr(readers.time, "sleep", self.waits.append)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(self.code, os.strerror(self.code))
        return self.original(descriptor, [buffers[0][: self.most]], offset)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN])
def test_reads_are_tried_four_times(prefix: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix, mmap=False)
    failing = FailingReads(monkeypatch, failures=3, code=code)
    np.testing.assert_array_equal(dataset[2], TOKENS[1:1000])
    assert failing.calls == 4
    assert failing.waits == [0.1, 0.2, 0.4]
    failing = FailingReads(monkeypatch, failures=4, code=code)
    with pytest.raises(OSError, match="reading 1998 bytes from byte 2 failed 4 times") as caught:
        dataset[2]
    assert (caught.value.errno, caught.value.filename) == (code, f"{prefix}.bin")


def test_permanent_errors_are_not_tried_again(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix, mmap=False)
    failing = FailingReads(monkeypatch, failures=9, code=errno.EACCES)
    with pytest.raises(PermissionError):
        dataset[2]
    assert failing.calls == 1


def test_short_reads_go_on(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = IndexedDataset(prefix, mmap=False)
    failing = FailingReads(monkeypatch, most=7)
    np.testing.assert_array_equal(dataset[2], TOKENS[1:1000])
    assert failing.calls == -(-1998 // 7)


def test_file_cut_after_opening(prefix: Path) -> None:
    dataset = IndexedDataset(prefix, mmap=False)
    np.testing.assert_array_equal(dataset[5], TOKENS[4000:])
    os.truncate(f"{prefix}.bin", 9000)
    with pytest.raises(FormatError, match="ends at byte 9000, 1000 bytes short"):
        dataset[5]


@pytest.mark.parametrize("mmap", [True, False])
def test_file_replaced_after_it_left_the_pool(prefix: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    dataset = IndexedDataset(prefix, mmap=mmap)
    OPEN_FILES._handles.clear()
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.new").write_bytes(content)
    os.replace(f"{prefix}.new", f"{prefix}.bin")
    with pytest.raises(FormatError, match="changed while in use"):
        dataset[5]


@pytest.mark.parametrize("mmap", [True, False])
def test_the_process_works_in_another_folder(
    prefix: Path, tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are opened at their first use, and again after others have pushed them out of the pool."""
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    monkeypatch.chdir(tmp_path)
    dataset = IndexedDataset(prefix.name, mmap=mmap)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    np.testing.assert_array_equal(dataset[5], TOKENS[4000:])
    OPEN_FILES._handles.clear()
    np.testing.assert_array_equal(dataset[4], TOKENS[1000:4000])


@pytest.mark.parametrize("mmap", [True, False])
def test_more_datasets_than_open_files(tmp_path: Path, mmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    monkeypatch.setattr(OPEN_FILES, "_limit", 8)
    datasets = []
    for i in range(40):
        with IndexedDatasetBuilder(tmp_path / f"{i}.bin") as builder:
            builder.add_document([i, i], [2])
            builder.finalize(tmp_path / f"{i}.idx")
        datasets.append(IndexedDataset(tmp_path / str(i), mmap=mmap))
    for _ in range(2):
        assert [dataset[0].tolist() for dataset in datasets] == [[i, i] for i in range(40)]
    assert len(OPEN_FILES) == 8
    descriptors = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)]
    assert sum(str(tmp_path) in name for name in descriptors) <= 8


def _is_open(number: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{number}")


def test_threads_share_a_small_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    monkeypatch.setattr(OPEN_FILES, "_limit", 2)
    datasets = []
    for i in range(6):
        with IndexedDatasetBuilder(tmp_path / f"{i}.bin") as builder:
            builder.add_document([i] * 50, [50])
            builder.finalize(tmp_path / f"{i}.idx")
        datasets.append(IndexedDataset(tmp_path / str(i), mmap=i % 2 == 0))
    wrong: list[Any] = []

    def read(seed: int) -> None:
        try:
            for i in np.random.default_rng(seed).integers(0, 6, 300):
                if datasets[i][0].tolist() != [i] * 50:
                    wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_pool_limit() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HandlePool(0)
