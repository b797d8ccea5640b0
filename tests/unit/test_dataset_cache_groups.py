"""Caches of many prefixes: written in groups, found again without opening them, whole or not there at all."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron import _C
from tdp_megatron.datasets import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    TokenizerSpec,
    cache_writer,
)
from tdp_megatron.datasets.builder import collector_paused
from tdp_megatron.errors import CacheError, FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder

NAMES = ("document_index", "sample_index", "shuffle_index")


def write(folder: Path, count: int) -> list[str]:
    prefixes = []
    for i in range(count):
        prefix = str(folder / f"part{i}")
        with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32) as builder:
            for length in (3, 9, 1, 0, 14, 8 + i):
                builder.add_document(np.full(length, i + 1, dtype=np.int32), [length])
            builder.finalize(f"{prefix}.idx")
        prefixes.append(prefix)
    return prefixes


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return write(tmp_path, 5)


def config_of(prefixes: list[str], cache: Path | str, **changes: Any) -> GPTDatasetConfig:
    fields: dict[str, Any] = {
        "random_seed": 5,
        "sequence_length": 8,
        "blend_per_split": [(prefixes, [1.0] * len(prefixes)), None, None],
        "tokenizer": TokenizerSpec.null(100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": str(cache),
        **changes,
    }
    return GPTDatasetConfig(**fields)


def build(prefixes: list[str], cache: Path | str, size: int = 40, **changes: Any) -> Any:
    config = config_of(prefixes, cache, **changes)
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]


def tokens(dataset: Any) -> list[Any]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def final(folder: Path) -> list[str]:
    return sorted(name for name in names(folder) if name.endswith((".npy", ".txt")))


def left(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.endswith((".tmp", "lock"))]


@pytest.mark.parametrize("most", [1, 2, 64])
def test_files_are_on_the_device_before_they_have_their_names(
    prefixes: list[str], tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(cache_writer, "_MOST_CACHES", most)
    durable: set[int] = set()

    def sync_all(folder: str) -> None:
        durable.update(path.stat().st_ino for path in Path(folder).iterdir())

    def sync_one(path: str) -> None:
        durable.add(os.stat(path).st_ino)

    renamed: list[str] = []
    rename = os.rename

    def watched(source: str, target: str) -> None:
        assert os.stat(source).st_ino in durable or target.endswith("manifest.json"), target
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(_C, "sync_file_system", sync_all)
    monkeypatch.setattr(cache_writer, "_sync_file", sync_one)
    monkeypatch.setattr(os, "rename", watched)
    built = build(prefixes, cache)
    assert len(renamed) == 5 * 5 + 4  # the blend has two arrays
    # The description, which completes a cache, is the last of its files.
    suffixes = [name.rsplit("-", 1)[1] for name in renamed if "GPTDataset" in name]
    assert suffixes[4::5] == ["description.txt"] * 5
    assert tokens(built) == tokens(build(prefixes, ""))
    assert left(cache) == []


def test_many_caches_take_few_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = write(tmp_path, 20)
    waits: list[str] = []
    monkeypatch.setattr(_C, "sync_file_system", waits.append)
    monkeypatch.setattr(os, "fsync", lambda _: waits.append("file"))
    build(prefixes, tmp_path / "cache")
    assert len(waits) <= 3


def test_what_a_manifest_vouches_for_is_not_opened(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(build(prefixes, tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(_C, "map_file", lambda path: pytest.fail(f"opened {path}"))
        patch.setattr("tdp_megatron.indexed.opening.open_map", lambda path: pytest.fail(f"opened {path}"))
        again = build(prefixes, tmp_path / "cache")
        assert len(again) == 40
        assert len(again.datasets[0]) > 8
    assert tokens(again) == expected


def test_shapes_that_the_manifest_makes_up(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(prefixes[:1], tmp_path / "cache")
    (manifest,) = (tmp_path / "cache").glob("*GPTDataset*manifest.json")
    said = json.loads(manifest.read_text())
    said["shapes"]["shuffle_index"] = [10**6]
    manifest.write_text(json.dumps(said))
    again = build(prefixes[:1], tmp_path / "cache")
    with pytest.raises(CacheError, match="had 1000000 samples at the start and has 43 now"):
        again[0]
    assert "its manifest says" in caplog.text
    assert tokens(build(prefixes[:1], tmp_path / "cache")) == tokens(build(prefixes[:1], ""))


@pytest.mark.parametrize("draws", [None, [], ["x"] * 5, [10**9] * 4, {"a": 1}, 7])
def test_draws_that_the_manifest_makes_up(prefixes: list[str], tmp_path: Path, draws: Any) -> None:
    expected = tokens(build(prefixes, tmp_path / "cache"))
    (manifest,) = (tmp_path / "cache").glob("*BlendedDataset*manifest.json")
    said = json.loads(manifest.read_text())
    said["facts"] = {"draws": draws}
    manifest.write_text(json.dumps(said))
    assert tokens(build(prefixes, tmp_path / "cache")) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_leaves_whole_caches_and_nothing_else(prefixes: list[str], tmp_path: Path, threads: int) -> None:
    """The fourth prefix is damaged; the others are built again, or found, when it is repaired."""
    good = Path(f"{prefixes[3]}.bin").read_bytes()
    Path(f"{prefixes[3]}.bin").write_bytes(good[:-4])
    cache = tmp_path / "cache"
    with pytest.raises(FormatError, match=r"part3.bin: bin has 148 bytes, index needs 152"):
        build(prefixes, cache, num_dataset_builder_threads=threads)
    assert left(cache) == []
    whole = [name for name in final(cache) if name.endswith(".txt")]
    assert len(final(cache)) == 4 * len(whole)
    Path(f"{prefixes[3]}.bin").write_bytes(good)
    assert tokens(build(prefixes, cache)) == tokens(build(prefixes, ""))


def test_a_prefix_that_is_listed_twice(prefixes: list[str], tmp_path: Path) -> None:
    twice = [prefixes[0], prefixes[1], prefixes[0]]
    assert tokens(build(twice, tmp_path / "cache")) == tokens(build(twice, ""))
    assert len(list((tmp_path / "cache").glob("*GPTDataset*description.txt"))) == 2


def test_default_folders_beside_the_data(prefixes: list[str], tmp_path: Path) -> None:
    built = build(prefixes, tmp_path, path_to_cache=None)
    assert tokens(built) == tokens(build(prefixes, ""))
    for prefix in prefixes:
        folder = Path(prefix) / "cache" / "GPTDataset_indices"
        assert len(final(folder)) == 4
        assert left(folder) == []


def die_while_writing(prefixes: list[str], cache: str) -> None:
    write_array = cache_writer._write_array
    written: list[str] = []

    def last(path: str, array: Any) -> None:
        written.append(path)
        write_array(path, array)
        if len(written) == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    cache_writer._write_array = last
    build(prefixes, cache)


def test_a_killed_builder_leaves_nothing_that_counts(prefixes: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(prefixes, str(cache)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert final(cache) == []
    assert len(left(cache)) >= 8
    assert tokens(build(prefixes, cache)) == tokens(build(prefixes, ""))
    assert left(cache) == []


def build_and_count(prefixes: list[str], cache: str, barrier: Any, queue: Any) -> None:
    build_one = GPTDataset._build
    built: list[str] = []

    def counted(self: GPTDataset) -> Any:
        built.append(str(self.dataset_path))
        return build_one(self)

    GPTDataset._build = counted  # type: ignore[method-assign]
    barrier.wait()
    found = build(prefixes, cache, num_dataset_builder_threads=2)
    queue.put((built, sorted(map(str, tokens(found)))))


def test_builders_in_opposite_orders_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each holds what the other wants next; every cache is built by one of them."""
    prefixes = write(tmp_path, 30)
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(3), context.Queue()
    orders = [prefixes, prefixes[::-1], prefixes[15:] + prefixes[:15]]
    processes = [
        context.Process(target=build_and_count, args=(order, str(tmp_path / "cache"), barrier, queue))
        for order in orders
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(10)
    assert sorted(path for built, _ in results for path in built) == sorted(prefixes)
    assert left(tmp_path / "cache") == []


def test_threads_of_other_builds_keep_their_own_groups(prefixes: list[str], tmp_path: Path) -> None:
    """What a thread beside the build makes is there at once, not when the build ends."""
    seen: list[bool] = []

    def beside() -> None:
        build(prefixes[:1], tmp_path / "other")
        seen.append(bool(final(tmp_path / "other")))

    with cache_writer.grouped_writes():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert cache_writer.current_writer() is not None
    assert seen == [True]
    assert cache_writer.current_writer() is None


def test_a_device_that_fails_at_the_end(prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: str) -> None:
        raise OSError(28, "No space left on device", folder)

    with monkeypatch.context() as patch:
        patch.setattr(_C, "sync_file_system", full)
        with pytest.raises(CacheError, match=r"No space left on device.*Set path_to_cache"):
            build(prefixes, tmp_path / "cache")
    assert names(tmp_path / "cache") == set()
    assert tokens(build(prefixes, tmp_path / "cache")) == tokens(build(prefixes, ""))


def test_sync_file_system(tmp_path: Path) -> None:
    _C.sync_file_system(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _C.sync_file_system(str(tmp_path / "nowhere"))


# -- what is checked when ---------------------------------------------------------------------------------------


def test_a_header_alone_finds_a_cut_data_file(prefixes: list[str]) -> None:
    for change in (b"", b"\0\0\0\0"):
        path = Path(f"{prefixes[0]}.bin")
        good = path.read_bytes()
        path.write_bytes(good + change if change else good[:-1])
        with pytest.raises(FormatError, match="index needs 140"):
            IndexedDataset(prefixes[0], header_only=True)
        path.write_bytes(good)


def test_arrays_are_checked_at_their_first_use(prefixes: list[str]) -> None:
    path = Path(f"{prefixes[0]}.idx")
    data = bytearray(path.read_bytes())
    data[34 + 4 * 6 + 8 * 2] += 4  # a pointer in the middle
    path.write_bytes(data)
    dataset = IndexedDataset(prefixes[0], header_only=True)
    assert (len(dataset), dataset.num_tokens, dataset.dtype) == (6, 35, np.int32)
    for _ in range(2):
        with pytest.raises(FormatError, match="pointers must be the prefix sum"):
            dataset[0]
    with pytest.raises(FormatError, match="pointers must be the prefix sum"):
        IndexedDataset(prefixes[0])


def test_a_header_alone_counts(prefixes: list[str]) -> None:
    with pytest.raises(FormatError, match="sequences_per_dataset says"):
        IndexedDataset(prefixes[0], sequences_per_dataset=[5, 6], header_only=True)
    with pytest.raises(FileNotFoundError, match="without .idx"):
        IndexedDataset(f"{prefixes[0]}.idx", header_only=True)


# -- garbage ----------------------------------------------------------------------------------------------------


def test_the_collector_is_as_before() -> None:
    with pytest.raises(KeyError, match="7"), collector_paused():
        {}[7 if gc.isenabled() is False else 8]
    assert gc.isenabled()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        # What was frozen may be freed, but nothing was thawed.
        assert frozen - 1000 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
