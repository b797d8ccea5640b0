"""The shell scripts: they parse, help, and refuse wrong options before they install anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tdp_megatron.schedule import algorithms

LAUNCH = Path(__file__).parents[2] / "launch"


def bash(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *words], cwd=cwd, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("script", sorted(p.name for p in [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]))
def test_script_parses(script: str, tmp_path: Path) -> None:
    result = bash("-n", str(LAUNCH / script), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_quickstart_wants_the_tokenizer_of_tokenized_data(tmp_path: Path) -> None:
    (tmp_path / "data.idx").touch()
    result = bash(str(LAUNCH / "quickstart.sh"), "--data", "data", cwd=tmp_path)
    assert result.returncode == 2
    assert f"--data {tmp_path}/data is tokenized already: give --tokenizer too" in result.stderr


def test_quickstart_help_names_every_option(tmp_path: Path) -> None:
    result = bash(str(LAUNCH / "quickstart.sh"), "--help", cwd=tmp_path)
    assert result.returncode == 0
    for option in ("--world-size", "--dp", "--cp", "--steps", "--data", "--weights", "--resume-dp", "--output"):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-option"], "unknown option '--no-such-option'"),
        (["surplus"], "unknown option 'surplus'"),
        (["--steps"], "--steps needs a whole number above 0, got ''"),
        (["--steps", "0"], "--steps needs a whole number above 0, got '0'"),
        (["--steps=-3"], "got '-3'"),
        (["--dp", "two"], "--dp needs a whole number above 0, got 'two'"),
        (["--world-size", "6", "--dp", "2", "--cp", "2"], "--dp 2 x --cp 2 is 4 ranks, but --world-size is 6"),
        (["--world-size", "2", "--dp", "8"], "--dp 8 x --cp 1 is 8 ranks, but --world-size is 2"),
        (["--world-size", "2", "--cp", "8"], "--dp 1 x --cp 8 is 8 ranks, but --world-size is 2"),
        (["--data", "/no/such/file"], "--data /no/such/file: there is no such file or folder"),
        (["--tokenizer", "/no/such.json"], "--tokenizer needs a tokenizer.json"),
        (["--weights", "0.2 0.3 0.5"], "--weights has 3 numbers for 2 datasets"),
        (["--weights", "0.5 -0.5"], "--weights: '-0.5' is no number from 0 up"),
        (["--weights", "nan 1"], "--weights: 'nan' is no number from 0 up"),
        (["--reroute", "magic"], "--reroute is plan or exchange, got 'magic'"),
        (["--algorithm", "foo"], f"--algorithm is one of {', '.join(['auto', *algorithms()])}; got 'foo'"),
        (["--algorithm", "kk lpt"], "got 'kk lpt'"),
        (["--algorithm", ""], "got ''"),
    ],
)
def test_quickstart_refuses_wrong_options(words: list[str], message: str, tmp_path: Path) -> None:
    result = bash(str(LAUNCH / "quickstart.sh"), *words, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    # The message must not scroll away under a page of options.
    assert result.stderr.splitlines()[1:] == ["see bash launch/quickstart.sh --help"]
    assert list(tmp_path.iterdir()) == []
