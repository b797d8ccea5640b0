"""A store that throttles, breaks off, stalls, or holds another object by now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, ObjectStorageConfig, object_storage, s3
from tdp_megatron.indexed import object_reader as object_reader_module
from tdp_megatron.indexed.s3 import S3Store
from tdp_megatron.indexed.transfers import BLOCKS

TOKENS = np.random.default_rng(5).integers(0, 60000, 50_000).astype(np.uint16)
LENGTHS = [20_000, 0, 30_000]
TRIES = object_storage.TRIES


@pytest.fixture
def config(tmp_path: Path) -> ObjectStorageConfig:
    return ObjectStorageConfig(str(tmp_path / "idx"))


@pytest.fixture
def url(upload: Callable[..., str]) -> str:
    return upload(TOKENS, LENGTHS)


@pytest.fixture
def dataset(proxy: Any, url: str, config: ObjectStorageConfig) -> IndexedDataset:
    return IndexedDataset(url, mmap=False, object_storage_config=config)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(object_storage, "BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr(object_storage, "time", SimpleNamespace(sleep=waits.append))
    return waits


@pytest.mark.parametrize("fault", [500, 502, 503, 504, 429, "reset", ("short", 0), ("short", 5001), "whole"])
@pytest.mark.parametrize("times", [1, TRIES - 1])
def test_faults_that_pass(proxy: Any, dataset: IndexedDataset, fault: Any, times: int, waits: list[float]) -> None:
    proxy.faults = [fault] * times
    np.testing.assert_array_equal(dataset[2], TOKENS[20_000:])
    assert proxy.faults == []
    assert len(waits) == times or isinstance(fault, tuple)
    # Growing, and never in step with other ranks.
    for i, wait in enumerate(waits):
        assert 0.05 * 2**i <= wait <= min(0.1 * 2**i, 10)


@pytest.mark.parametrize(
    ("fault", "last"),
    [(503, "the server answered 503 SlowDown"), ("reset", ""), (("short", 0), ""), ("whole", "the whole object")],
)
def test_faults_that_stay(proxy: Any, dataset: IndexedDataset, fault: Any, last: str, waits: list[float]) -> None:
    proxy.faults = [fault] * TRIES
    with pytest.raises(
        OSError, match=f"reading 100000 bytes from byte 0 failed {TRIES} times, last: .*{last}"
    ) as caught:
        dataset[2]
    assert caught.value.filename == f"{dataset.path_prefix}.bin"
    assert len(waits) == TRIES - 1
    # The reader is none the worse for it.
    np.testing.assert_array_equal(dataset[2], TOKENS[20_000:])


def test_a_broken_transfer_goes_on_where_it_broke(proxy: Any, dataset: IndexedDataset) -> None:
    proxy.faults = [("short", 60_000), ("short", 30_000)]
    np.testing.assert_array_equal(dataset[2], TOKENS[20_000:])
    # Of what is in flight when the connection breaks, a part may be lost.
    starts = [int(given.removeprefix("bytes=").split("-")[0]) for given in proxy.ranges()]
    assert starts[0] == 0
    assert 0 <= starts[1] <= starts[2] <= 90_000
    assert starts[2] > 0


def test_a_stalled_server(proxy: Any, url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(S3Store, "_shared", None)
    dataset = IndexedDataset(url, mmap=False, object_storage_config=config)
    proxy.faults = ["stall"]
    np.testing.assert_array_equal(dataset[2], TOKENS[20_000:])
    monkeypatch.setattr(object_storage, "TRIES", 2)
    BLOCKS.clear()
    proxy.faults = ["stall"] * 2
    with pytest.raises(OSError, match=r"failed 2 times, last: .*[Tt]imed? ?out"):
        dataset[2]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_opening_survives_faults(
    proxy: Any, url: str, config: ObjectStorageConfig, method: str, suffix: str, waits: list[float]
) -> None:
    proxy.methods, proxy.suffix, proxy.faults = (method,), suffix, [503, "reset", 500]
    dataset = IndexedDataset(url, mmap=False, object_storage_config=config)
    np.testing.assert_array_equal(dataset[2], TOKENS[20_000:])
    assert proxy.faults == []
    assert IndexedDataset.exists(url)


def test_no_server(url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr(S3Store, "_shared", None)
    with pytest.raises(OSError, match=f"asking for {url}.bin failed {TRIES} times, last: .*127.0.0.1:9"):
        IndexedDataset(url, mmap=False, object_storage_config=config)
    with pytest.raises(OSError, match="asking for"):
        IndexedDataset.exists(url)


@pytest.mark.parametrize(("status", "error"), [(403, PermissionError), (401, PermissionError), (405, OSError)])
def test_refusals_are_not_tried_again(
    proxy: Any, dataset: IndexedDataset, status: int, error: type[Exception], waits: list[float]
) -> None:
    proxy.methods, proxy.suffix, proxy.faults = ("HEAD", "GET"), "", [status]
    with pytest.raises(error, match=f"{status}"):
        IndexedDataset.exists(dataset.path_prefix)
    proxy.faults = [status]
    with pytest.raises(error, match=f"{status}"):
        dataset[2]
    assert (proxy.faults, waits) == ([], [])


def test_no_credentials(url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(S3Store, "_shared", None)
    with pytest.raises(PermissionError, match="no credentials"):
        IndexedDataset(url, mmap=False, object_storage_config=config)


@pytest.mark.parametrize("change", ["other", "same size", "shorter", "gone"])
@pytest.mark.parametrize("when", ["between reads", "in the middle of a read"])
def test_object_changed_in_the_middle_of_a_run(
    bucket: Any, proxy: Any, dataset: IndexedDataset, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader_module, "_BLOCK", 1 << 14)
    bodies = {
        "other": TOKENS[::-1].tobytes() + b"more",
        "same size": TOKENS[::-1].tobytes(),
        "shorter": TOKENS.tobytes()[:1000],
    }

    def replace() -> None:
        if change == "gone":
            bucket.delete_object(Bucket="corpora", Key="en/x.bin")
        else:
            bucket.put_object(Bucket="corpora", Key="en/x.bin", Body=bodies[change])

    np.testing.assert_array_equal(dataset.get(0, 0, 10), TOKENS[:10])
    BLOCKS.clear()
    if when == "between reads":
        replace()
    else:
        proxy.faults = [("short", 10), replace]
    with pytest.raises(FormatError, match=f"{dataset.path_prefix}.bin: changed while in use .* open the dataset again"):
        dataset[2]


def test_a_store_that_ignores_the_condition(
    bucket: Any, proxy: Any, dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = S3Store.shared()._client

    class Careless:
        def get_object(self, **arguments: Any) -> Any:
            return client.get_object(**{k: v for k, v in arguments.items() if k != "IfMatch"})

    monkeypatch.setattr(S3Store.shared(), "_client", Careless())
    bucket.put_object(Bucket="corpora", Key="en/x.bin", Body=TOKENS[::-1].tobytes())
    with pytest.raises(FormatError, match="changed while in use"):
        dataset[2]


def test_index_changed_while_it_is_downloaded(bucket: Any, proxy: Any, url: str, config: ObjectStorageConfig) -> None:
    proxy.suffix = ".idx"
    proxy.faults = [lambda: bucket.put_object(Bucket="corpora", Key="en/x.idx", Body=b"other")]
    with pytest.raises(FormatError, match=r"x.idx: changed while in use"):
        IndexedDataset(url, mmap=False, object_storage_config=config)
    assert [p.name for p in Path(config.path_to_idx_cache).rglob("*") if p.is_file()] == []


def test_one_failing_part_among_many(
    proxy: Any, dataset: IndexedDataset, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader_module, "_PART", 4096)
    parts = IndexedDataset(dataset.path_prefix, mmap=False, object_storage_config=dataset.object_storage_config)
    proxy.faults = [503, ("short", 100), "reset", 500]
    np.testing.assert_array_equal(parts[2], TOKENS[20_000:])
    proxy.faults = [403]
    with pytest.raises(PermissionError):
        parts[0]
    np.testing.assert_array_equal(parts[0], TOKENS[:20_000])
