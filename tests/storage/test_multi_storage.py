"""Reading through the Multi-Storage Client: the real package over a folder and over S3, and one that fails."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multistorageclient
import numpy as np
import pytest
from multistorageclient.types import RetryableError

from tdp_megatron.errors import FormatError, TdpError
from tdp_megatron.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    ObjectStorageConfig,
    multi_storage,
    object_storage,
)
from tdp_megatron.indexed.multi_storage import MultiStorageStore
from tdp_megatron.indexed.transfers import BLOCKS

TOKENS = np.random.default_rng(7).integers(0, 60000, 100_000).astype(np.uint16)
LENGTHS = [1000, 0, 99_000]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_storage, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(MultiStorageStore, "_shared", None)
    BLOCKS.clear()
    yield
    BLOCKS.clear()


@pytest.fixture
def config(tmp_path: Path) -> ObjectStorageConfig:
    return ObjectStorageConfig(str(tmp_path / "idx"))


def write(prefix: Path, tokens: np.ndarray = TOKENS) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_sequences(tokens, LENGTHS, np.ones(len(LENGTHS)))
        builder.finalize(f"{prefix}.idx")


def configure(monkeypatch: pytest.MonkeyPatch, path: Path, profiles: dict[str, Any]) -> None:
    path.write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("MSC_CONFIG", str(path))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a folder behind a profile that no other test has: the client keeps profiles for ever."""
    profile = f"p{os.getpid()}-{tmp_path.name}".replace("_", "-").replace("[", "-").replace("]", "-")
    store = {"type": "file", "options": {"base_path": str(tmp_path / "store")}}
    configure(monkeypatch, tmp_path / "msc.json", {profile: {"storage_provider": store}})
    write(tmp_path / "store" / "en" / "x")
    return f"msc://{profile}/en/x"


def open_msc(url: str, config: ObjectStorageConfig) -> IndexedDataset:
    return IndexedDataset(url, mmap=False, object_storage_config=config)


def test_folder_behind_a_profile(url: str, config: ObjectStorageConfig) -> None:
    assert IndexedDataset.exists(url)
    assert not IndexedDataset.exists(f"{url}y")
    dataset = open_msc(url, config)
    np.testing.assert_array_equal(dataset[2], TOKENS[1000:])
    np.testing.assert_array_equal(
        dataset.read_pieces(np.array([0, 190_000]), np.array([5, 7])), [*TOKENS[:5], *TOKENS[95_000:95_007]]
    )
    with pytest.raises(FileNotFoundError):
        open_msc(f"{url}y", config)


def test_s3_behind_a_profile(
    upload: Callable[..., str],
    s3_endpoint: str,
    config: ObjectStorageConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload(TOKENS, LENGTHS)
    options = {"base_path": "corpora", "endpoint_url": s3_endpoint, "region_name": "us-east-1"}
    keys = {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}}
    profile = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": keys}
    configure(monkeypatch, tmp_path / "msc.json", {"moto": profile})
    dataset = open_msc("msc://moto/en/x", config)
    np.testing.assert_array_equal(dataset[2], TOKENS[1000:])
    upload(TOKENS[:50_000], [20_000, 30_000])
    BLOCKS.clear()
    with pytest.raises(FormatError, match="changed while in use"):
        dataset[2]


@pytest.mark.parametrize("change", ["rewritten", "shorter", "gone"])
def test_object_changed_in_the_middle_of_a_run(
    url: str, config: ObjectStorageConfig, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_msc(url, config)
    monkeypatch.setattr(multi_storage, "CHECK_SECONDS", 0.0)
    data = tmp_path / "store" / "en" / "x.bin"
    if change == "gone":
        data.unlink()
    elif change == "shorter":
        os.truncate(data, 1000)
    else:
        write(data.with_suffix(""), TOKENS[::-1].copy())
    with pytest.raises(FormatError, match=f"{url}.bin: changed while in use"):
        dataset[2]


def test_it_is_looked_at_again_only_from_time_to_time(
    url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_msc(url, config)
    looks: list[str] = []
    original = MultiStorageStore.stat
    monkeypatch.setattr(MultiStorageStore, "stat", lambda self, u: (looks.append(u), original(self, u))[1])
    for i in range(5):
        BLOCKS.clear()
        dataset.get(0, i, 1)
    assert looks == []
    monkeypatch.setattr(multi_storage, "CHECK_SECONDS", 0.0)
    BLOCKS.clear()
    dataset.get(0, 9, 1)
    assert looks == [f"{url}.bin"]


class FailingClient:
    """The client of a profile, failing as its providers do."""

    def __init__(self, client: Any, failures: list[Any]) -> None:
        self.client, self.failures = client, failures

    def info(self, path: str) -> Any:
        return self.client.info(path)

    def read(self, path: str, byte_range: Any) -> bytes:
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        data: bytes = self.client.read(path, byte_range=byte_range)
        return data if failure is None else data[:failure]


@pytest.mark.parametrize("failure", [RetryableError("later"), ConnectionError("cut"), TimeoutError("slow"), 10, 0])
def test_failures_that_pass(
    url: str, config: ObjectStorageConfig, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_msc(url, config)
    failures = [failure] * 3
    original = multistorageclient.resolve_storage_client

    def resolve(u: str) -> Any:
        client, path = original(u)
        return FailingClient(client, failures), path

    monkeypatch.setattr(multistorageclient, "resolve_storage_client", resolve)
    np.testing.assert_array_equal(dataset[2], TOKENS[1000:])
    assert failures == []
    BLOCKS.clear()
    failures += [failure] * object_storage.TRIES
    with pytest.raises(OSError, match=f"failed {object_storage.TRIES} times") as caught:
        dataset[2]
    assert caught.value.filename == f"{url}.bin"


@pytest.mark.parametrize(
    ("failure", "error"), [(PermissionError("no"), PermissionError), (RuntimeError("Failed to read"), OSError)]
)
def test_failures_that_stay(
    url: str, config: ObjectStorageConfig, failure: Exception, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_msc(url, config)
    failures = [failure]
    original = multistorageclient.resolve_storage_client

    def resolve(u: str) -> Any:
        client, path = original(u)
        return FailingClient(client, failures), path

    monkeypatch.setattr(multistorageclient, "resolve_storage_client", resolve)
    with pytest.raises(error, match="no|Failed to read"):
        dataset[2]
    assert failures == []


def test_missing_package_names_the_extra(config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    with pytest.raises(TdpError, match=r"need the package multi-storage-client: pip install 'tdp-megatron\[msc\]'"):
        open_msc("msc://p/x", config)
