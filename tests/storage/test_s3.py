"""Reading pairs from a real S3 server: the same data as from files, and what is asked for on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Loader

from tdp_megatron.cli.main import main
from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, TokenizerSpec
from tdp_megatron.errors import FormatError, TdpError
from tdp_megatron.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    ObjectStorageConfig,
    is_object_storage_path,
    verify,
)
from tdp_megatron.indexed import object_reader as object_reader_module
from tdp_megatron.indexed.index_cache import get_index_cache_path
from tdp_megatron.indexed.pool import OPEN_FILES
from tdp_megatron.indexed.s3 import S3Store
from tdp_megatron.indexed.transfers import BLOCKS
from tdp_megatron.nodes import GPTSample, IndexedRead

TOKENS = np.random.default_rng(3).integers(0, 60000, 300_000).astype(np.uint16)
LENGTHS = np.array([0, 1, 999, 0, 199_000, 100_000])
SEQUENCES = np.split(TOKENS, np.cumsum(LENGTHS)[:-1])


@pytest.fixture
def config(tmp_path: Path) -> ObjectStorageConfig:
    return ObjectStorageConfig(str(tmp_path / "idx"))


@pytest.fixture
def url(upload: Callable[..., str]) -> str:
    return upload(TOKENS, LENGTHS)


def open_s3(url: str, config: ObjectStorageConfig, **arguments: Any) -> IndexedDataset:
    return IndexedDataset(url, mmap=False, object_storage_config=config, **arguments)


def test_same_as_files(url: str, config: ObjectStorageConfig, tmp_path: Path) -> None:
    dataset, local = open_s3(url, config), IndexedDataset(tmp_path / "local" / "x")
    assert (len(dataset), dataset.dtype, dataset.num_tokens) == (6, np.uint16, 300_000)
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        np.testing.assert_array_equal(getattr(dataset, name), getattr(local, name))
    for i, expected in enumerate(SEQUENCES):
        np.testing.assert_array_equal(dataset[i], expected)
    for part, expected in zip(dataset[1:5], SEQUENCES[1:5], strict=True):
        np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(dataset.get(4, 198_000, 1000), SEQUENCES[4][198_000:])
    assert dataset.bin_bytes() is None
    assert dataset.fingerprint() == local.fingerprint()
    assert dataset.bin_nbytes == 600_000


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 17, 300_000, 256 << 20])
@pytest.mark.parametrize(("pieces", "longest"), [(0, 1), (1, 5000), (300, 5), (60, 9000), (7, 250_000)])
def test_pieces(
    url: str, config: ObjectStorageConfig, chunk: int, pieces: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader_module, "_PART", 1 << 16)
    monkeypatch.setattr(object_reader_module, "_BLOCKS_AT_A_TIME", 5)
    if chunk == 1:  # a request per byte
        pieces, longest = min(pieces, 5), 5
    dataset = open_s3(url, ObjectStorageConfig(config.path_to_idx_cache, bin_chunk_nbytes=chunk))
    rng = np.random.default_rng(pieces)
    starts = rng.integers(0, len(TOKENS) + 1, pieces)
    counts = np.minimum(rng.integers(0, longest + 1, pieces), len(TOKENS) - starts)
    expected = [TOKENS[a : a + n] for a, n in zip(starts, counts, strict=True)]
    for _ in range(2):
        np.testing.assert_array_equal(dataset.read_pieces(starts * 2, counts), np.concatenate([*expected, TOKENS[:0]]))
    assert BLOCKS.nbytes <= chunk


def test_pieces_outside(url: str, config: ObjectStorageConfig) -> None:
    dataset = open_s3(url, config)
    with pytest.raises(IndexError, match="not inside the file of 600000 bytes"):
        dataset.read_pieces(np.array([599_998]), np.array([2]))
    with pytest.raises(IndexError, match="sequence 1 has 1 tokens"):
        dataset.get(1, 0, 2)


def test_nearby_reads_are_one_request(proxy: Any, url: str, config: ObjectStorageConfig) -> None:
    dataset = open_s3(url, config)
    starts = np.arange(0, 60_000, 500)
    dataset.read_pieces(starts * 2, np.full(len(starts), 100))
    assert proxy.ranges() == ["bytes=0-131071"]
    dataset.read_pieces(starts * 2, np.full(len(starts), 100))
    assert len(proxy.ranges()) == 1
    # Two far places are two requests, neighbours are one.
    dataset.read_pieces(np.array([131_072, 270_000, 599_000]), np.array([5, 5, 5]))
    assert sorted(filter(None, proxy.ranges()[1:])) == ["bytes=131072-393215", "bytes=524288-599999"]


def test_sequential_reads_fetch_ahead(proxy: Any, url: str, config: ObjectStorageConfig) -> None:
    monkey = ObjectStorageConfig(config.path_to_idx_cache, bin_chunk_nbytes=256 << 20)
    dataset = open_s3(url, monkey)
    got = [dataset.read_pieces(np.array([at]), np.array([1000])) for at in range(0, 600_000, 2000)]
    np.testing.assert_array_equal(np.concatenate(got), TOKENS)
    assert proxy.ranges() == ["bytes=0-131071", "bytes=131072-393215", "bytes=393216-599999"]


def test_long_reads_are_parts_and_not_kept(
    proxy: Any, url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader_module, "_PART", 1 << 17)
    dataset = open_s3(url, config)
    np.testing.assert_array_equal(dataset.read_pieces(np.array([200]), np.array([290_000])), TOKENS[100:290_100])
    assert len(proxy.ranges()) == 5
    assert BLOCKS.nbytes == 0


def test_threads_share_the_cache(url: str, config: ObjectStorageConfig) -> None:
    dataset = open_s3(url, ObjectStorageConfig(config.path_to_idx_cache, bin_chunk_nbytes=200_000))
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            starts = rng.integers(0, 299_000, 5)
            expected = np.concatenate([TOKENS[a : a + 900] for a in starts])
            try:
                if not np.array_equal(dataset.read_pieces(starts * 2, np.full(5, 900)), expected):
                    wrong.append(starts)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert BLOCKS.nbytes <= 200_000


def _read_in_child(dataset: IndexedDataset, queue: Any) -> None:
    queue.put([dataset[2].tolist(), dataset.read_pieces(np.array([0, 500_000]), np.array([3, 3])).tolist()])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_a_fork(url: str, config: ObjectStorageConfig) -> None:
    dataset = open_s3(url, config)
    dataset.read_pieces(np.array([0, 400_000]), np.array([3, 3]))  # threads and connections are there
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_read_in_child, args=(dataset, queue)) for _ in range(2)]
    for child in children:
        child.start()
    expected = [SEQUENCES[2].tolist(), [*TOKENS[:3].tolist(), *TOKENS[250_000:250_003].tolist()]]
    assert [queue.get(timeout=60) for _ in children] == [expected, expected]
    for child in children:
        child.join(timeout=30)
        assert child.exitcode == 0


def test_pickles_as_arguments(url: str, config: ObjectStorageConfig) -> None:
    data = pickle.dumps(open_s3(url, config))
    assert len(data) < 600
    other = pickle.loads(data)
    assert other.object_storage_config == config
    np.testing.assert_array_equal(other[2], SEQUENCES[2])


# -- the index --------------------------------------------------------------------------------------------------


def test_the_index_is_downloaded_once(proxy: Any, url: str, config: ObjectStorageConfig) -> None:
    open_s3(url, config)
    kept = Path(get_index_cache_path(f"{url}.idx", config))
    assert kept == Path(config.path_to_idx_cache) / "corpora" / "en" / "x.idx"
    assert len(proxy.ranges(".idx")) == 1
    open_s3(url, config)
    assert len(proxy.ranges(".idx")) == 1
    assert sorted(p.name for p in kept.parent.iterdir()) == ["x.idx", "x.idx.source.json"]


@pytest.mark.parametrize("damage", ["cut", "touched", "no note", "bad note", "note of other object", "foreign"])
def test_a_local_copy_that_cannot_be_trusted_is_fetched_again(
    proxy: Any, url: str, config: ObjectStorageConfig, damage: str
) -> None:
    kept = Path(get_index_cache_path(f"{url}.idx", config))
    if damage == "foreign":  # as Megatron leaves it: without a note
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"something else")
    else:
        open_s3(url, config)
        note = Path(f"{kept}.source.json")
        if damage == "cut":
            os.truncate(kept, 50)
        elif damage == "touched":
            os.utime(kept, ns=(0, 0))
        elif damage == "no note":
            note.unlink()
        elif damage == "bad note":
            note.write_text("{")
        else:
            note.write_text(json.dumps({**json.loads(note.read_text()), "url": "s3://corpora/de/x.idx"}))
    before = len(proxy.ranges(".idx"))
    np.testing.assert_array_equal(open_s3(url, config)[2], SEQUENCES[2])
    assert len(proxy.ranges(".idx")) == before + 1


def test_a_changed_object_is_noticed_at_open(upload: Callable[..., str], config: ObjectStorageConfig) -> None:
    url = upload(TOKENS, LENGTHS)
    old = open_s3(url, config)
    upload(TOKENS[::-1].copy(), LENGTHS[::-1].copy())
    np.testing.assert_array_equal(open_s3(url, config)[0], TOKENS[::-1][:100_000])
    with pytest.raises(FormatError, match="changed while in use"):
        old[2]


def test_processes_that_share_the_folder_download_once(
    proxy: Any, url: str, config: ObjectStorageConfig, tmp_path: Path
) -> None:
    code = (
        "import sys; from tdp_megatron.indexed import IndexedDataset, ObjectStorageConfig\n"
        f"config = ObjectStorageConfig({config.path_to_idx_cache!r})\n"
        f"d = IndexedDataset({url!r}, mmap=False, object_storage_config=config)\n"
        "print(d[2].sum())"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=120)[0] for child in children] == [f"{SEQUENCES[2].sum()}\n"] * 4
    assert len(proxy.ranges(".idx")) == 1


def test_large_index_comes_in_parts(
    proxy: Any, url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tdp_megatron.indexed.index_cache as module

    monkeypatch.setattr(module, "_PART", 50)
    np.testing.assert_array_equal(open_s3(url, config)[2], SEQUENCES[2])
    size = 34 + 6 * 12 + 7 * 8
    assert len(proxy.ranges(".idx")) == -(-size // 50)


def test_no_room_for_the_index(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_s3(url, ObjectStorageConfig(str(tmp_path / "file")))


def test_index_cache_in_the_home_folder_by_default(url: str, tmp_path: Path) -> None:
    np.testing.assert_array_equal(IndexedDataset(url, mmap=False)[2], SEQUENCES[2])
    assert (tmp_path / "xdg-cache" / "tdp_megatron" / "idx" / "corpora" / "en" / "x.idx").is_file()


# -- what is there, and what is not ----------------------------------------------------------------------------


def test_exists_asks_the_server(bucket: Any, url: str) -> None:
    assert IndexedDataset.exists(url)
    assert not IndexedDataset.exists(f"{url}y")
    bucket.delete_object(Bucket="corpora", Key="en/x.idx")
    assert not IndexedDataset.exists(url)
    assert not IndexedDataset.exists("s3://no-such-bucket/x")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_missing_object(bucket: Any, url: str, suffix: str, config: ObjectStorageConfig) -> None:
    bucket.delete_object(Bucket="corpora", Key=f"en/x.{suffix}")
    with pytest.raises(FileNotFoundError) as caught:
        open_s3(url, config)
    assert caught.value.filename == f"{url}.{suffix}"


def test_truncated_object_is_refused_at_open(bucket: Any, url: str, config: ObjectStorageConfig) -> None:
    bucket.put_object(Bucket="corpora", Key="en/x.bin", Body=TOKENS.tobytes()[:1000])
    with pytest.raises(FormatError, match=rf"{url}.bin: bin has 1000 bytes, index needs 600000"):
        open_s3(url, config)


def test_index_that_is_none(bucket: Any, url: str, config: ObjectStorageConfig) -> None:
    bucket.put_object(Bucket="corpora", Key="en/x.idx", Body=b"<html>no</html>" * 9)
    with pytest.raises(FormatError, match=rf"{url}.idx: byte 0: .*an HTML page"):
        open_s3(url, config)


def test_empty_objects(upload: Callable[..., str], config: ObjectStorageConfig) -> None:
    dataset = open_s3(upload(TOKENS[:0], []), config)
    assert (len(dataset), dataset.num_tokens) == (0, 0)
    assert dataset[0:0][0].tolist() == []
    # An object without bytes is an index of no layout.
    assert dataset.read_pieces(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("s3://b/x", {}, "objects cannot be mapped; set mmap=False"),
        ("msc://p/x", {"mmap": True}, "objects cannot be mapped"),
        ("/data/x", {"object_storage_config": ObjectStorageConfig("/c")}, "no s3:// or msc:// path"),
        ("gs://b/x", {"mmap": False}, "only s3:// and msc:// are read"),
        ("https://h/x", {}, "only s3:// and msc:// are read"),
        ("s3://", {"mmap": False}, "must be s3://BUCKET/KEY"),
        ("s3://b", {"mmap": False}, "must be s3://BUCKET/KEY"),
        ("s3://corpora/../../etc/x", {"mmap": False}, "cannot be kept below"),
        ("s3://Not A Bucket!/x", {"mmap": False}, "Not A Bucket"),
    ],
)
def test_arguments_that_do_not_go_together(bucket: Any, path: str, arguments: dict[str, Any], message: str) -> None:
    if ".." in path:
        for suffix in ("bin", "idx"):
            bucket.put_object(Bucket="corpora", Key=f"../../etc/x.{suffix}", Body=b"1")
    with pytest.raises(ValueError, match=message):
        IndexedDataset(path, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"), [(("",), "path_to_idx_cache is empty"), (("/c", 0), "at least 1, got 0")]
)
def test_bad_config(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectStorageConfig(*fields)


def test_what_is_an_object() -> None:
    assert [is_object_storage_path(p) for p in ("s3://a/b", "msc://a/b", "/s3://a", "a", "gs://a/b")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_missing_package_names_the_extra(
    url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr(S3Store, "_shared", None)
    with pytest.raises(TdpError, match=r"need the package boto3: pip install 'tdp-megatron\[s3\]'"):
        open_s3(url, config)


def test_fast_start_asks_nothing(proxy: Any, url: str, config: ObjectStorageConfig) -> None:
    entry = [6, 7, 8, 600_000, 34 + 6 * 12 + 7 * 8]
    dataset = open_s3(url, config, fast_cache_load=True, sequences_per_dataset={url: entry})
    assert (len(dataset), dataset.dtype, dataset.num_tokens) == (6, np.uint16, 300_000)
    assert proxy.requests == []
    np.testing.assert_array_equal(dataset[2], SEQUENCES[2])
    wrong = open_s3(url, config, fast_cache_load=True, sequences_per_dataset={url: [6, 7, 8, 600_002, entry[4]]})
    with pytest.raises(FormatError, match="says 600002 bytes, the file has 600000"):
        wrong[2]


# -- from end to end -------------------------------------------------------------------------------------------


def test_samples_are_those_of_the_files(url: str, tmp_path: Path) -> None:
    def samples(path: str, mmap: bool) -> list[Any]:
        node = GPTSample(IndexedRead(path, mmap=mmap), sequence_length=4096, num_samples=100)
        return [np.stack([np.asarray(s["tokens"]), np.asarray(s["labels"])]) for s in Loader(node)]

    local, remote = samples(str(tmp_path / "local" / "x"), True), samples(url, False)
    assert len(remote) == len(local) >= 100
    for a, b in zip(local, remote, strict=True):
        np.testing.assert_array_equal(a, b)


def test_index_map_leaves_the_pool(url: str, config: ObjectStorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_s3(url, config)
    monkeypatch.setattr(OPEN_FILES, "_handles", type(OPEN_FILES._handles)())
    np.testing.assert_array_equal(dataset[2], SEQUENCES[2])


def test_verify_and_inspect(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(url).tokens == 300_000
    assert main(["verify", url, f"{url}y"]) == 1
    out, err = capsys.readouterr()
    assert f"{url}: ok, 6 documents" in out
    assert f"{url}y.bin" in err
    assert main(["inspect", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bin_bytes"] == 600_000


def test_caches_and_samples_of_a_blend(url: str, upload: Callable[..., str], tmp_path: Path) -> None:
    other = upload(TOKENS[:200_000], [50_000, 150_000], key="de/y")
    cache, idx_cache = str(tmp_path / "cache"), str(tmp_path / "idx-cache")
    local = [str(tmp_path / "copy" / name) for name in ("x", "y")]
    for remote, prefix in zip((url, other), local, strict=True):
        data = open_s3(remote, ObjectStorageConfig(idx_cache))
        with IndexedDatasetBuilder(_made(f"{prefix}.bin"), np.uint16) as builder:
            builder.add_sequences(
                np.concatenate(list(data)), data.sequence_lengths, np.diff(np.asarray(data.document_indices))
            )
            builder.finalize(f"{prefix}.idx")
    arguments = [
        "--train-data-path",
        "1",
        url,
        "2",
        other,
        "--no-mmap-bin-files",
        "--object-storage-cache-path",
        idx_cache,
    ]
    arguments += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60001", "--seq-length", "1024"]
    arguments += ["--train-samples", "200", "--global-batch-size", "1", "--eval-iters", "0", "--data-cache-path", cache]
    assert main(["prepare-cache", *arguments]) == 0

    def samples(prefixes: list[str], **fields: Any) -> Any:
        fields |= {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
        blend = [(prefixes, [1.0, 2.0]), None, None]
        tokenizer = TokenizerSpec.null(60001)
        config = GPTDatasetConfig(
            random_seed=1234, sequence_length=1024, blend_per_split=blend, tokenizer=tokenizer, **fields
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [200, 0, 0], lambda: True, config).build()[0]

    remote = samples(
        [url, other],
        path_to_cache=cache,
        mmap_bin_files=False,
        object_storage_cache_path=idx_cache,
        fast_cache_load=True,
    )
    expected = samples(local, path_to_cache="")
    assert len(remote) == len(expected) == 201
    for i in range(len(expected)):
        np.testing.assert_array_equal(remote[i]["tokens"], expected[i]["tokens"])


def _made(path: str) -> str:
    Path(path).parent.mkdir(exist_ok=True)
    return path
