"""Options of the training script: every wrong value is named, and said by one rank only."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from options import TrainOptions, parse_options
from training import learning_rate


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data{suffix}").touch()
    return str(tmp_path / "data")


def parse(prefix: str, *words: str, world_size: int = 4) -> TrainOptions:
    return parse_options(["--data", prefix, "--vocab-size", "100", *words], world_size)


def test_data_parallel_size_and_cap_follow_from_the_rest(prefix: str) -> None:
    options = parse(prefix, "--cp", "2", "--max-seqlen", "512", "--data", prefix)
    assert (options.dp, options.cp, options.max_seqlen_per_rank) == (2, 2, 512)
    assert options.weights == (1.0, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cp", "3"], r"--cp 3 does not divide the 4 ranks"),
        (["--cp", "0"], r"--cp 0 does not divide"),
        (["--dp", "2", "--cp", "4"], r"--dp 2 x --cp 4 is 8 ranks but torchrun started 4.*--nproc-per-node 8"),
        (["--steps", "0"], r"--steps must be at least 1, got 0"),
        (["--global-batch-size", "-1"], r"--global-batch-size must be at least 1, got -1"),
        (["--deadline", "0"], r"--deadline must be above 0 seconds and at most 31,536,000, got 0"),
        (["--deadline", "nan"], r"--deadline must be above 0 seconds and at most 31,536,000, got nan"),
        (["--deadline", "inf"], r"--deadline must be above 0 seconds and at most 31,536,000, got inf"),
        (["--lr", "nan"], r"--lr must be at least 0, got nan"),
        (["--lr", "-1"], r"--lr must be at least 0"),
        (["--min-lr", "inf"], r"--min-lr must be below 2\*\*63, got inf"),
        (["--weight-decay", "-0.5"], r"--weight-decay must be at least 0"),
        (["--clip-grad", "-1"], r"--clip-grad must be at least 0"),
        (["--seed", "-1"], r"--seed must be at least 0"),
        (["--seed", str(2**63)], r"--seed must be below 2\*\*63"),
        (["--steps", str(2**63)], r"--steps must be below 2\*\*63"),
    ],
)
def test_wrong_values_are_named(prefix: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(prefix, *words)


def test_missing_files_are_named(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.idx; give the path without \.idx or \.bin"):
        parse(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"--tokenizer .*absent\.json: no such file"):
        parse(prefix, "--tokenizer", str(tmp_path / "absent.json"))
    with pytest.raises(FileNotFoundError, match=r"--resume .*absent: no such folder"):
        parse(prefix, "--resume", str(tmp_path / "absent"))
    Path(prefix + ".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*data\.bin"):
        parse(prefix)


def test_vocabulary_must_be_known(prefix: str) -> None:
    with pytest.raises(ValueError, match="give --tokenizer or --vocab-size"):
        parse_options(["--data", prefix], 1)


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_only_rank_0_speaks_about_unknown_options(
    prefix: str, rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        parse(prefix, "--no-such-option")
    assert caught.value.code == 2
    assert ("--no-such-option" in capfd.readouterr().err) == speaks


def test_learning_rate_rises_then_follows_a_cosine() -> None:
    rates = [learning_rate(step, 100, 10, 1.0, 0.1) for step in range(120)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert all(a > b for a, b in itertools.pairwise(rates[10:101]))
    assert rates[100:] == pytest.approx([0.1] * 20)
    assert learning_rate(0, 1, 0, 1.0, 0.1) == pytest.approx(1.0)
