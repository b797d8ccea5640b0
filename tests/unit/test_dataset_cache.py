"""Caches: used when they are right, built again with a reason when they are not, built once by many."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.datasets import BlendedDataset, GPTDataset, GPTDatasetConfig, Split, TokenizerSpec, cache_writer
from tdp_megatron.errors import CacheError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder

NAMES = ("document_index", "sample_index", "shuffle_index")


def write(prefix: Path, lengths: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for i, length in enumerate(lengths):
        builder.add_document(np.full(length, i + 1, dtype=np.int32), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


LENGTHS = [3, 9, 1, 0, 14, 8, 5, 5, 2, 30]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "data", LENGTHS)


def make(prefix: str, **changes: Any) -> GPTDataset:
    split = changes.pop("index_split", Split.train)
    num_samples = changes.pop("num_samples", 30)
    fields: dict[str, Any] = {
        "random_seed": 5,
        "sequence_length": 8,
        "blend": ([prefix], None),
        "split": "1,0,0",
        "tokenizer": TokenizerSpec.null(100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": os.path.join(os.path.dirname(prefix), "cache"),
        **changes,
    }
    low_level = IndexedDataset(prefix)
    indices = np.arange(len(low_level), dtype=np.int32)
    return GPTDataset(low_level, prefix, indices, num_samples, split, GPTDatasetConfig(**fields))


def arrays(dataset: GPTDataset) -> dict[str, Any]:
    return {name: np.array(getattr(dataset, name)) for name in NAMES}


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per index that is built."""
    seen: list[str] = []
    build = GPTDataset._build

    def counted(self: GPTDataset) -> Any:
        seen.append(self.label)
        return build(self)

    monkeypatch.setattr(GPTDataset, "_build", counted)
    return seen


def cache_files(prefix: str) -> dict[str, Path]:
    folder = Path(prefix).parent / "cache"
    return {path.name.rsplit("-", 1)[1]: path for path in folder.iterdir()}


def test_a_cache_is_used(prefix: str, builds: list[str]) -> None:
    first = make(prefix)
    second = make(prefix)
    assert len(builds) == 1
    assert_equal(arrays(first), arrays(second))
    assert not second.sample_index.flags.owndata  # a map of the file
    assert set(cache_files(prefix)) == {"description.txt", "manifest.json", *(f"{name}.npy" for name in NAMES)}


def test_no_cache_when_asked(prefix: str, builds: list[str]) -> None:
    assert_equal(arrays(make(prefix, path_to_cache="")), arrays(make(prefix, path_to_cache="")))
    assert len(builds) == 2
    assert {path.suffix for path in Path(prefix).parent.iterdir()} == {".bin", ".idx"}


def test_data_rewritten_at_the_same_path(prefix: str, builds: list[str], caplog: pytest.LogCaptureFixture) -> None:
    make(prefix)
    write(Path(prefix), [7, *LENGTHS[1:]])
    with caplog.at_level(logging.WARNING):
        after = make(prefix)
    assert len(builds) == 2
    assert "tokens 77, now tokens is 81" in caplog.text
    assert_equal(arrays(after), arrays(make(prefix, path_to_cache="")))


def test_same_counts_but_other_lengths(prefix: str, builds: list[str], caplog: pytest.LogCaptureFixture) -> None:
    make(prefix)
    write(Path(prefix), LENGTHS[::-1])
    with caplog.at_level(logging.WARNING):
        make(prefix)
    assert len(builds) == 2
    assert "lengths_crc32" in caplog.text


def test_a_copy_of_the_data_keeps_its_cache(prefix: str, builds: list[str]) -> None:
    make(prefix)
    os.utime(f"{prefix}.idx", ns=(1, 1))
    make(prefix)
    assert len(builds) == 1


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"add_extra_token_to_sequence": True}, {"add_extra_token_to_sequence": False}, "add_extra_token_to_sequence"),
        (
            {"index_split": Split.valid, "drop_last_partial_validation_sequence": True},
            {"index_split": Split.valid, "drop_last_partial_validation_sequence": False},
            "drop_last_partial_sequence True, now",
        ),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_settings_that_the_name_leaves_out(
    prefix: str,
    first: dict[str, Any],
    second: dict[str, Any],
    reason: str,
    manifest: bool,
    builds: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(prefix, **first)
    if not manifest:
        cache_files(prefix)["manifest.json"].unlink()
    with caplog.at_level(logging.WARNING):
        after = make(prefix, **second)
    assert len(builds) == 2
    assert "is not used and built again" in caplog.text
    if manifest:
        assert reason in caplog.text
    assert_equal(arrays(after), arrays(make(prefix, **second, path_to_cache="")))


def test_settings_that_change_nothing_do_not_build(prefix: str, builds: list[str]) -> None:
    make(prefix)
    make(prefix, reset_position_ids=True, drop_last_partial_validation_sequence=False)
    assert len(builds) == 1


@pytest.mark.parametrize("keep", [0, 40, 128, 135])
@pytest.mark.parametrize("name", NAMES)
def test_truncated_files(
    prefix: str, name: str, keep: int, builds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = arrays(make(prefix))
    path = cache_files(prefix)[f"{name}.npy"]
    path.write_bytes(path.read_bytes()[:keep])
    with caplog.at_level(logging.WARNING):
        assert_equal(arrays(make(prefix)), expected)
    assert len(builds) == 2
    assert "damaged" in caplog.text


@pytest.mark.parametrize("suffix", ["description.txt", *(f"{name}.npy" for name in NAMES)])
def test_missing_files(prefix: str, suffix: str, builds: list[str]) -> None:
    expected = arrays(make(prefix))
    cache_files(prefix)[suffix].unlink()
    assert_equal(arrays(make(prefix)), expected)
    assert len(builds) == 2


def change(name: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Path]], None]:
    def apply(files: dict[str, Path]) -> None:
        array = np.load(files[f"{name}.npy"])
        np.save(files[f"{name}.npy"], edit(array))

    return apply


def swap(array: Any) -> Any:
    array = array.copy()
    array[[0, 1]] = array[[1, 0]]
    return array


def set_first(value: int) -> Callable[[Any], Any]:
    def edit(array: Any) -> Any:
        array = array.copy()
        array.flat[0] = value
        return array

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("document_index", lambda a: a.astype(np.int64)), "document_index is int64"),
        (change("document_index", lambda a: a[:-1]), "documents, 4 epochs of 10 are needed"),
        (change("document_index", set_first(10)), "the split ends at 9"),
        (change("document_index", set_first(-1)), "its documents are -1"),
        (change("document_index", lambda a: np.zeros_like(a)), "not those of the split"),
        (change("sample_index", lambda a: a.astype(np.float64)), "sample_index is float64"),
        (change("sample_index", lambda a: a[:, :1]), "sample_index is int32 (39, 1)"),
        (change("sample_index", lambda a: a[:-1]), "rows for"),
        (change("sample_index", set_first(1)), "sample 0 begins at [1, 0], the data says [0, 0]"),
        (change("shuffle_index", lambda a: a.astype(np.int32)), "shuffle_index is int32"),
        (change("shuffle_index", lambda a: a[:-1]), "rows for"),
        (change("shuffle_index", set_first(10**6)), "not a permutation"),
        (change("shuffle_index", lambda a: np.zeros_like(a)), "not a permutation"),
    ],
)
def test_caches_of_others_are_looked_at(
    prefix: str,
    damage: Callable[[dict[str, Path]], None],
    reason: str,
    builds: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = arrays(make(prefix))
    files = cache_files(prefix)
    files["manifest.json"].unlink()
    damage(files)
    with caplog.at_level(logging.WARNING):
        assert_equal(arrays(make(prefix)), expected)
    assert len(builds) == 2
    assert reason in caplog.text


def test_right_caches_of_others_are_taken_over(prefix: str, builds: list[str], monkeypatch: Any) -> None:
    make(prefix)
    files = cache_files(prefix)
    files["manifest.json"].unlink()
    make(prefix)
    assert len(builds) == 1
    # From now on the manifest vouches for it, and nothing is computed.
    monkeypatch.setattr(GPTDataset, "_content_complaint", lambda *_: pytest.fail("checked twice"))
    make(prefix)


def test_files_replaced_after_the_manifest_are_looked_at(prefix: str, builds: list[str]) -> None:
    expected = arrays(make(prefix))
    change("document_index", swap)(cache_files(prefix))
    assert_equal(arrays(make(prefix)), expected)
    assert len(builds) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "settings": 3}'])
def test_a_manifest_that_is_none_counts_as_missing(prefix: str, text: str, builds: list[str]) -> None:
    make(prefix)
    cache_files(prefix)["manifest.json"].write_text(text)
    make(prefix)
    assert len(builds) == 1
    assert json.loads(cache_files(prefix)["manifest.json"].read_text())["format"] == 1


class Payload:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_no_pickle_is_loaded(prefix: str, tmp_path: Path, builds: list[str]) -> None:
    make(prefix)
    path = cache_files(prefix)["shuffle_index.npy"]
    array = np.empty(1, dtype=object)
    array[0] = Payload(str(tmp_path / "trace"))
    np.save(path, array, allow_pickle=True)
    make(prefix)
    assert len(builds) == 2
    assert not (tmp_path / "trace").exists()


def test_an_interrupted_build_leaves_no_cache(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_array = cache_writer._write_array
    calls = []

    def fail_late(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write_array(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache_writer, "_write_array", fail_late)
        with pytest.raises(KeyboardInterrupt):
            make(prefix)
    assert "description.txt" not in cache_files(prefix)
    assert_equal(arrays(make(prefix)), arrays(make(prefix, path_to_cache="")))
    assert not [path for path in (Path(prefix).parent / "cache").iterdir() if path.suffix in (".tmp", ".lock")]


def test_a_rebuild_never_mixes_with_the_old_files(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is replaced, a cache has no description, so nobody takes it for one."""
    make(prefix)
    description = cache_files(prefix)["description.txt"].name
    write(Path(prefix), [7, *LENGTHS[1:]])
    write_array = cache_writer._write_array
    described: list[bool] = []

    def look(*args: Any) -> None:
        described.append((Path(prefix).parent / "cache" / description).exists())
        write_array(*args)

    monkeypatch.setattr(cache_writer, "_write_array", look)
    make(prefix)
    assert described == [False] * 3


def test_a_folder_that_cannot_be_written(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"Not a directory.*Set path_to_cache to a folder"):
        make(prefix, path_to_cache=str(tmp_path / "file" / "cache"))


def test_a_full_device(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_writer, "_write_array", full)
    with pytest.raises(CacheError, match=r"No space left on device.*path_to_cache"):
        make(prefix)
    assert "description.txt" not in cache_files(prefix)


def test_a_read_only_folder_with_a_cache_is_enough(
    prefix: str, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = arrays(make(prefix))
    cache_files(prefix)["manifest.json"].unlink()

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache_writer, "_write_bytes", read_only)
    monkeypatch.setattr(os, "makedirs", read_only)
    assert_equal(arrays(make(prefix)), expected)
    assert len(builds) == 1


# -- fast start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["fast_cache_load", "defer_npy_index_mmap"])
def test_a_fast_start_without_caches(prefix: str, flag: str) -> None:
    fields = {"blend": None, "split": None, "blend_per_split": [([prefix], None), None, None], flag: True}
    dataset = make(prefix, **fields)  # nothing is looked at before the first access
    with pytest.raises(CacheError, match=r"description.txt is missing. .*tdp prepare-cache"):
        dataset[0]
    with pytest.raises(CacheError, match="tdp prepare-cache"):
        len(dataset)


@pytest.mark.parametrize("flag", ["fast_cache_load", "defer_npy_index_mmap"])
def test_a_fast_start_with_caches(prefix: str, flag: str, builds: list[str]) -> None:
    fields = {"blend": None, "split": None, "blend_per_split": [([prefix], None), None, None]}
    expected = make(prefix, **fields)
    fast = make(prefix, **fields, **{flag: True})
    assert fast._indices is None
    assert len(fast) == len(expected)
    for name, value in expected[3].items():
        assert np.array_equal(value, fast[3][name])
    assert len(builds) == 1


def test_a_fast_start_checks_what_it_opens(prefix: str) -> None:
    fields = {"blend": None, "split": None, "blend_per_split": [([prefix], None), None, None]}
    make(prefix, **fields)
    write(Path(prefix), [7, *LENGTHS[1:]])
    with pytest.raises(CacheError, match=r"cannot be used: it was made with tokens 77.*tdp prepare-cache"):
        _ = make(prefix, **fields, defer_npy_index_mmap=True)[0]


# -- several processes -----------------------------------------------------------------------------------------


def count_builds(path: str) -> None:
    build = GPTDataset._build

    def counted(self: GPTDataset) -> Any:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{self.config.random_seed}\n".encode())
        os.close(descriptor)
        return build(self)

    GPTDataset._build = counted  # type: ignore[method-assign]


def many_rounds(prefix: str, counter: str, rounds: int, queue: Any) -> None:
    count_builds(counter)
    errors = []
    for seed in range(rounds):
        try:
            dataset = make(prefix, random_seed=seed)
            expected = make(prefix, random_seed=seed, path_to_cache="", num_samples=30)
            assert_equal(arrays(dataset), arrays(expected))
        except BaseException as error:
            errors.append(repr(error))
    queue.put(errors)


def test_many_processes_build_each_cache_once(prefix: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    rounds, workers = 100, 8
    counter = tmp_path / "builds"
    processes = [
        context.Process(target=many_rounds, args=(prefix, str(counter), rounds, queue)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(10)
    assert results == [[]] * workers
    seeds = np.array([int(line) for line in counter.read_text().split()])
    # Each process also builds once per seed without a cache, to compare.
    assert np.bincount(seeds).tolist() == [workers + 1] * rounds
    left = [p.name for p in (tmp_path / "cache").iterdir() if p.name.endswith((".tmp", "lock"))]
    assert left == []


def hold_lock(prefix: str, ready: Any) -> None:
    def stuck(self: GPTDataset) -> Any:
        ready.set()
        time.sleep(600)

    GPTDataset._build = stuck  # type: ignore[method-assign]
    make(prefix)


def test_a_killed_builder_blocks_nobody(prefix: str) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold_lock, args=(prefix, ready))
    holder.start()
    assert ready.wait(60)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    assert len(make(prefix)) >= 30
    assert "lock" not in cache_files(prefix)


def test_a_file_system_without_locks(
    prefix: str, builds: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING):
        make(prefix)
    assert "has no locks" in caplog.text
    make(prefix)
    assert len(builds) == 1


def test_pickles_are_small_and_open_the_cache_again(prefix: str) -> None:
    dataset = make(prefix, num_samples=20_000)
    data = pickle.dumps(dataset)
    assert len(data) < 6000 < dataset.shuffle_index.nbytes
    again = pickle.loads(data)
    assert len(again) == len(dataset)
    for name, value in dataset[77].items():
        assert np.array_equal(value, again[77][name])


# -- blends ----------------------------------------------------------------------------------------------------


def blend(prefix: str, weights: list[float], size: int | None, **fields: Any) -> BlendedDataset:
    datasets = [make(prefix, random_seed=seed, num_samples=40) for seed in range(len(weights))]
    config = datasets[0].config
    for name, value in fields.items():
        setattr(config, name, value)
    return BlendedDataset(datasets, weights, size, config)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("dataset_index", lambda a: a.astype(np.int32)), "dataset_index is int32"),
        (change("dataset_index", lambda a: a[:-1]), r"dataset_index is int16 (19,)"),
        (change("dataset_index", lambda a: np.full_like(a, 2)), "it names datasets 2..2 of 2"),
        (change("dataset_sample_index", lambda a: np.zeros_like(a)), "it repeats or leaves out samples"),
        (change("dataset_sample_index", lambda a: a.astype(np.int32)), "dataset_sample_index is int32"),
    ],
)
def test_blends_of_others_are_looked_at(
    prefix: str, damage: Callable[[dict[str, Path]], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = blend(prefix, [0.3, 0.7], 20)
    numbers = np.array(expected.dataset_index), np.array(expected.dataset_sample_index)
    folder = Path(prefix).parent / "cache"
    files = {p.name.rsplit("-", 1)[1]: p for p in folder.iterdir() if "BlendedDataset" in p.name}
    files["manifest.json"].unlink()
    damage(files)
    with caplog.at_level(logging.WARNING):
        again = blend(prefix, [0.3, 0.7], 20)
    assert reason in caplog.text
    np.testing.assert_array_equal(again.dataset_index, numbers[0])
    np.testing.assert_array_equal(again.dataset_sample_index, numbers[1])


def test_blends_start_fast(prefix: str) -> None:
    with pytest.raises(CacheError, match="tdp prepare-cache"):
        _ = blend(prefix, [0.3, 0.7], 21, defer_npy_index_mmap=True)[0]
    expected = blend(prefix, [0.3, 0.7], 20)
    fast = blend(prefix, [0.3, 0.7], 20, defer_npy_index_mmap=True)
    assert len(fast) == 20
    for name, value in expected[5].items():
        assert np.array_equal(value, fast[5][name])
