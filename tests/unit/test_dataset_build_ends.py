"""Builds that end early: Ctrl-C, a full device, an error in another thread. What is left is of use to the next one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron import _C
from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, TokenizerSpec
from tdp_megatron.datasets.giving_up import GivenUpError, current_stop
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDatasetBuilder


def write(folder: Path, count: int, documents: int = 8) -> list[str]:
    prefixes = []
    for i in range(count):
        prefix = str(folder / f"part{i}")
        with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
            tokens = np.full(20 * documents, i + 1, dtype=np.uint16)
            builder.add_sequences(tokens, [20] * documents, [1] * documents)
            builder.finalize(f"{prefix}.idx")
        prefixes.append(prefix)
    return prefixes


def build(prefixes: list[str], cache: Path | str, **changes: Any) -> Any:
    config = GPTDatasetConfig(
        **{
            "random_seed": 5,
            "sequence_length": 8,
            "blend_per_split": [(prefixes, [1.0] * len(prefixes)), None, None],
            "tokenizer": TokenizerSpec.null(100),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            "path_to_cache": str(cache),
            **changes.pop("config", {}),
        }
    )
    size = changes.pop("size", 40)
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config, **changes).build()[0]


def tokens(dataset: Any) -> list[Any]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def whole(cache: Path) -> None:
    """Only whole caches are there."""
    names = {path.name for path in cache.iterdir()}
    bases = {name.removesuffix("-description.txt") for name in names if name.endswith("-description.txt")}
    arrays = {name for name in names if name.endswith(".npy")}
    assert {name.rsplit("-", 1)[0] for name in arrays} == bases
    for name in arrays:
        np.load(cache / name)
    assert not [name for name in names if name.endswith((".tmp", "lock"))]


# -- native loops -----------------------------------------------------------------------------------------------

SHUFFLE = "_C.LegacyRandom(1).shuffle(np.zeros(60_000_000, dtype=np.int32), stop)"
BLEND = "_C.blend_continue(np.full(1000, 1e-3), np.zeros(1000, dtype=np.int64), 0, 5_000_000, stop)"
EVERY = "_C.blend_exhaustive(np.full(1000, 5_000, dtype=np.int64), stop)"


@pytest.mark.parametrize("work", [SHUFFLE, BLEND, EVERY], ids=["shuffle", "blend", "exhaustive blend"])
def test_native_loops_see_signals(work: str) -> None:
    """The handler runs while the loop does: otherwise ``stop`` would never know of the signal."""
    code = f"""
import signal
import numpy as np
from tdp_megatron import _C

class Enough(Exception):
    pass

def stop():
    if seen:
        raise Enough

seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    {work}
    print("not interrupted")
except Enough:
    print("interrupted")
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    {work.replace(", stop", "")}
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("interrupted\ninterrupted\n", "")


class EnoughError(Exception):
    pass


@pytest.mark.parametrize("kind", ["shuffle", "samples", "blend", "exhaustive"])
def test_native_loops_of_other_threads_end_when_asked(kind: str) -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise EnoughError

    n = 10_000_000
    loops = {
        "shuffle": lambda: _C.LegacyRandom(1).shuffle(np.zeros(n, dtype=np.int32), stop),
        "samples": lambda: _C.build_sample_index(
            np.ones(1, dtype=np.int32), np.zeros(n, dtype=np.int32), 8, 1, n // 8 - 1, False, stop
        ),
        "blend": lambda: _C.blend_continue(np.full(40, 0.025), np.zeros(40, dtype=np.int64), 0, n, stop),
        "exhaustive": lambda: _C.blend_exhaustive(np.full(40, n // 40, dtype=np.int64), stop),
    }
    caught: list[BaseException] = []

    def run() -> None:
        try:
            loops[kind]()
        except EnoughError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert len(caught) == 1


# -- builds -----------------------------------------------------------------------------------------------------

BUILD = """
import os, signal, sys, threading
sys.path.insert(0, {here!r})
from test_dataset_build_ends import build, GPTDataset
once = GPTDataset._build
def counted(self):
    if "large" in self.dataset_path:
        # From another thread, as if typed while the build is in native code.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    return once(self)
GPTDataset._build = counted
weights = [1e-6, 1e-6, 1e-6, 1.0]
config = dict(num_dataset_builder_threads={threads}, blend_per_split=[({prefixes!r}, weights), None, None])
build({prefixes!r}, {cache!r}, size=40_000_000, config=config)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_build(tmp_path: Path, threads: int) -> None:
    """Three small prefixes, then one whose many epochs take long."""
    (tmp_path / "large").mkdir()
    prefixes = [*write(tmp_path, 3), *write(tmp_path / "large", 1, documents=100_000)]
    cache = tmp_path / "cache"
    code = BUILD.format(here=str(Path(__file__).parent), prefixes=prefixes, cache=str(cache), threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert not list(cache.glob("*BlendedDataset*"))
    whole(cache)
    assert tokens(build(prefixes, cache)) == tokens(build(prefixes, ""))
    whole(cache)


def limited(limit: int) -> Any:
    def apply() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return apply


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """One array is larger than a file may be: an error that says what to do, and no file of that cache."""
    prefixes = write(tmp_path, 2)
    cache = tmp_path / "cache"
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_dataset_build_ends import build
build({prefixes!r}, {str(cache)!r}, size=4000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, preexec_fn=limited(9000)
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "CacheError: cannot keep the index cache" in last
    assert "File too large" in last
    assert "Set path_to_cache to a folder with room" in last
    assert list(cache.iterdir()) == []
    assert tokens(build(prefixes, cache, size=4000)) == tokens(build(prefixes, "", size=4000))


FULL = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tdp_megatron.errors import CacheError
from test_dataset_build_ends import build, tokens, whole
prefixes, cache = {prefixes!r}, Path({device!r}) / "cache"
try:
    build(prefixes, cache)
except CacheError as error:
    print(error)
whole(cache)
# What did fit is not in the way of fewer prefixes, and with more room everything is built.
assert tokens(build(prefixes[:2], cache)) == tokens(build(prefixes[:2], ""))
subprocess.run(["mount", "-o", "remount,size=8m", {device!r}], check=True)
assert tokens(build(prefixes, cache)) == tokens(build(prefixes, ""))
whole(cache)
print("built")
"""


def test_a_full_device(tmp_path: Path) -> None:
    """A file system of 64 KiB, which nobody but this process and its children sees."""
    device = tmp_path / "small"
    device.mkdir()
    own = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=64k tmpfs {device}"
    try:
        subprocess.run([*own, mount], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system may be mounted here: {error}")
    code = FULL.format(here=str(Path(__file__).parent), prefixes=write(tmp_path, 12), device=str(device))
    command = [*own, f'{mount} && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said, built = done.stdout.splitlines()
    assert "No space left on device" in said
    assert "Set path_to_cache to a folder with room" in said
    assert built == "built"


@pytest.mark.parametrize("threads", [1, 3])
def test_progress(tmp_path: Path, threads: int) -> None:
    prefixes = write(tmp_path, 6)
    seen: list[tuple[int, int]] = []
    weights = [1.0, 0.0, 2.0, 1.0, 1.0, 1.0]
    blends = [(prefixes, weights), (prefixes[:1], [3.0]), None]
    fields = {"blend_per_split": blends, "num_dataset_builder_threads": threads}
    build(prefixes, tmp_path / "cache", config=fields, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(7)]


def test_progress_may_end_a_build(tmp_path: Path) -> None:
    prefixes = write(tmp_path, 6)

    def enough(done: int, total: int) -> None:
        if done == 3:
            raise EnoughError

    for threads in (1, 2):
        with pytest.raises(EnoughError):
            build(prefixes, tmp_path / "cache", progress=enough, config={"num_dataset_builder_threads": threads})
        whole(tmp_path / "cache")


def test_an_error_ends_the_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prefix is under way for as long as nobody stops it; the second fails at once."""
    prefixes = write(tmp_path, 2)
    os.truncate(f"{prefixes[1]}.bin", 8)
    ended: list[str] = []

    def for_ever(self: GPTDataset) -> Any:
        stop = current_stop()
        assert stop is not None
        try:
            while True:
                stop()
                time.sleep(0.001)
        except GivenUpError:
            ended.append(str(self.dataset_path))
            raise

    monkeypatch.setattr(GPTDataset, "_build", for_ever)
    with pytest.raises(FormatError, match=r"part1\.bin: bin has 8 bytes"):
        build(prefixes, tmp_path / "cache", config={"num_dataset_builder_threads": 2})
    assert ended == prefixes[:1]
    whole(tmp_path / "cache")
