"""Files that commands write: looked at before the work begins, and named when they cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tdp_megatron.cli import bench, calibrate, simulate
from tdp_megatron.cli.main import main
from tdp_megatron.indexed import atomic
from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.testing import write_corpus

GOOD = '"--json" "--smoke"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "a", [np.arange(n) for n in range(1, 40)])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "pairs").mkdir()
    write_corpus(tmp_path / "pairs" / "p", [[1]])
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "measured.csv").write_text(
        "tokens_per_rank,squares,cp_size,seconds\n"
        + "".join(f"{n},{n * s},1,{n * 1e-3 + n * s * 1e-7}\n" for n in (1000, 2000, 4000) for s in (10, 100, 900))
    )
    (tmp_path / "bench.py").write_text(GOOD)
    return tmp_path


def must_not_run(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("the work had begun")


#: Per command what follows it but for the file, and the work that must not have begun.
WRITES: dict[str, tuple[list[str], Any, str]] = {
    "calibrate": (["--output"], calibrate, "_measure"),
    "simulate html": (["a", "--dp", "2", "--html"], simulate, "compare"),
    "simulate trace": (["a", "--dp", "2", "--trace"], simulate, "compare"),
    "simulate png": (["a", "--dp", "2", "--png"], simulate, "compare"),
    "bench json": (["--folder", ".", "bench", "--json"], bench, "_run"),
    "bench markdown": (["--folder", ".", "bench", "--markdown"], bench, "_run"),
}


@pytest.mark.parametrize("command", WRITES)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/x", "missing is missing; make that folder first: 'missing/x'"),
        ("text.txt/x", "text.txt is a file; make that folder first: 'text.txt/x'"),
        ("folder", "it is a folder; give the name of a file: 'folder'"),
    ],
)
def test_a_bad_output_is_found_before_the_work(
    command: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, module, work = WRITES[command]
    monkeypatch.setattr(module, work, must_not_run)
    assert main([command.split()[0], *arguments, path]) == 1
    assert capsys.readouterr().err == f"tdp: error: cannot write it: {message}\n"


@pytest.mark.parametrize("command", WRITES)
def test_a_folder_that_may_not_be_written_is_found_before_the_work(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, module, work = WRITES[command]
    monkeypatch.setattr(module, work, must_not_run)

    def refused(*arguments: Any, **options: Any) -> NoReturn:  # root may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied", arguments[0])

    monkeypatch.setattr(atomic, "open", refused, raising=False)
    assert main([command.split()[0], *arguments, "folder/x"]) == 1
    assert "cannot write it: Permission denied: 'folder/x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate", "--measurements", "measured.csv", "--output", "out"],
        ["simulate", "a", "--dp", "2", "--html", "out"],
        ["simulate", "a", "--dp", "2", "--trace", "out"],
        ["sequences", "--data-path", "a", "--per-dataset-sequences-path", "out"],
        ["merge", "--input", "pairs", "--output-prefix", "out"],
        ["preprocess", "--input", "text.txt", "--output-prefix", "out", "--workers", "1"],
    ],
    ids=lambda arguments: arguments[0] + arguments[-2],
)
def test_a_full_disk_names_the_file(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(output: TemporaryOutput) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(p.name for p in folder.rglob("*"))
    monkeypatch.setattr(TemporaryOutput, "sync", full)
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "out" in err.splitlines()[-1]
    assert ".tmp" not in err
    assert sorted(p.name for p in folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["merge", "--input", "none", "--output-prefix", "x"], 1, "--input none does not exist; give the folder"),
        (["merge", "--input", "a.bin", "--output-prefix", "x"], 1, "--input a.bin is no folder; give the folder"),
        (["merge", "--input", "pairs", "--output-prefix", "folder"], 1, "it is a folder; give the name of a file"),
        (["merge", "--input", "pairs", "--output-prefix", "pairs/all"], 2, "lies in the folder to merge"),
        (["preprocess", "--input", "text.txt", "--output-prefix", "t"], 1, "it is a folder"),
        (["inspect", "folder"], 1, "is a folder, not a file"),
        (["inspect", "mine"], 1, "(mine_text_document is there)"),
        (["verify", "mine"], 1, "(mine_text_document is there)"),
        (["inspect", "long"], 1, "long.bin: bin has 9 bytes, index needs 4 (1 sequences, 2 bytes per token); the file "
         "is too long, or belongs to another index or dtype"),
        (["inspect", "a", "--multimodal"], 1, "open it with multimodal=False (without --multimodal)"),
        (["sequences", "--data-path", "nan", "a", "1", "a", "--per-dataset-sequences-path", "x"], 2, "is nan; weights"),
        (["sequences", "--data-path", "1", "a", "-1", "a", "--per-dataset-sequences-path", "x"], 2, "is -1.0; weights"),
        (["sequences", "--data-path", "0.7", "a", "b", "--per-dataset-sequences-path", "x"], 2,
         "has 3 items, of which '0.7' is a weight: give a weight before every prefix, or none at all"),
        (["simulate", "github", "--dp", "1000000"], 2, "dp x cp is 1000000 ranks, 65536 can be simulated"),
        (["simulate", "github", "--dp", "8", "--max-seqlen-per-rank", str(1 << 40)], 2, "give --global-batch-size"),
        (["simulate", "github", "--dp", "8", "--global-batch-size", "9999999"], 2, "size 9999999 is more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_messages_say_what_to_do_here(
    arguments: list[str], code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(folder / "mine_text_document", [[1]])
    write_corpus(folder / "long", [[1, 2]])
    (folder / "long.bin").write_bytes(bytes(9))
    (folder / "folder.idx").write_bytes((folder / "a.idx").read_bytes())
    (folder / "t_text_document.idx").mkdir()
    before = sorted(p.name for p in folder.rglob("*"))
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert message in err
    assert "[Errno" not in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in folder.rglob("*")) == before


def test_a_prefix_that_looks_like_a_number_is_one(folder: Path) -> None:
    write_corpus(folder / "7", [[1]])
    assert main(["sequences", "--data-path", "7", "--per-dataset-sequences-path", "x"]) == 0


_ENDLESS = '''"""Waits, with a child, both with something in a temporary folder.

    python benchmarks/waits.py
"""
import os, sys, tempfile, time
"--json" "--smoke"
tempfile.mkdtemp(prefix="left-")
os.fork()
tempfile.mkdtemp(prefix="left-")
print("ready", flush=True)
time.sleep(60)
'''


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_an_interrupted_benchmark_leaves_nothing(folder: Path) -> None:
    (folder / "waits.py").write_text(_ENDLESS)
    temporary = folder / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "tdp_megatron.cli.main", "bench", "--folder", ".", "waits"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_for(lambda: len(list(temporary.glob("tdp-bench-*/left-*"))) == 3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)  # its pipe is held by the children, which so have ended
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, b"tdp: interrupted\n")
    assert list(temporary.iterdir()) == []
