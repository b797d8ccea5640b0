"""More samples than any memory holds the order of: told before anything is built, with the argument and the way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tdp_megatron.cli.main import main
from tdp_megatron.datasets import memory
from tdp_megatron.nodes import GPTSample, IndexedRead
from tdp_megatron.testing import write_corpus


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_corpus(tmp_path / name, [np.arange(n) for n in range(1, 40)])
    return tmp_path


def test_samples_of_a_node(folder: Path) -> None:
    source = GPTSample(IndexedRead("a"), sequence_length=8, num_samples=10**15)
    with pytest.raises(ValueError, match=r"num_samples 10{15} of 8 tokens \(\d+ epochs\) needs \d+ bytes") as caught:
        source.reset(None)
    assert "ask for fewer samples" in str(caught.value)
    assert "order='instant'" in str(caught.value)
    instant = GPTSample(IndexedRead("a"), sequence_length=8, num_samples=10**15, order="instant")
    assert len(instant.take(4)) == 4


@pytest.mark.parametrize("data", [["a"], ["1", "a", "2", "b"]])
def test_prepare_cache(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seq-length", "8", "--global-batch-size", "4", "--train-samples", str(10**13), "--eval-iters", "0"]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    command = ["prepare-cache", "--data-path", *data, "--split", "1,0,0", "--data-cache-path", "cache"]
    assert main([*command, *arguments, *tokenizer]) == 2
    err = capsys.readouterr().err
    assert "needs" in err
    assert "GiB" in err
    assert "(--train-samples or --train-iters)" in err
    assert err.count("\n") == 1


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 4096}.get)
    GPTSample(IndexedRead("a"), sequence_length=8, num_samples=100).reset(None)
    with pytest.raises(ValueError, match="needs .* bytes"):
        GPTSample(IndexedRead("a"), sequence_length=8, num_samples=1000).reset(None)


def test_a_cache_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("")
    arguments = ["--seq-length", "8", "--global-batch-size", "4", "--train-samples", "8", "--eval-iters", "0"]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    command = ["prepare-cache", "--data-path", "a", "--split", "1,0,0", "--data-cache-path", "file/cache"]
    assert main([*command, *arguments, *tokenizer]) == 1
    err = capsys.readouterr().err
    assert "Give --data-cache-path a folder with room" in err
    assert "path_to_cache" not in err
