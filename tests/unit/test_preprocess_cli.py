"""The ``tdp`` command itself, and ``tdp inspect`` and ``tdp verify``."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tdp_megatron
from tdp_megatron.cli.inspecting import describe
from tdp_megatron.cli.main import COMMANDS, main
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder

TDP = [sys.executable, "-m", "tdp_megatron.cli.main"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "x.bin", "uint16") as builder:
        builder.add_documents([[], [5, 6, 7], [1] * 4, [2] * 1000])
        builder.end_document()
        builder.finalize(tmp_path / "x.idx")
    return tmp_path / "x"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[command][0])
    assert callable(module.add_arguments)
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: tdp {command}" in capsys.readouterr().out


def test_help_loads_no_command() -> None:
    code = (
        "import sys; from tdp_megatron.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'rich', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in COMMANDS)


def test_preprocess_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    code = (
        "import sys; from tdp_megatron.cli.main import main\n"
        f"main(['preprocess', '--quiet', '--input', {str(tmp_path / 'a.jsonl')!r}, "
        f"'--output-prefix', {str(tmp_path / 'x')!r}])\n"
        "print([m for m in ('torch', 'tokenizers', 'tiktoken', 'sentencepiece', 'zstandard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tdp_megatron {tdp_megatron.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["--nothing"], ["verify"], ["inspect", "a", "b"], ["verify", "--no"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: tdp" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_inspect(prefix: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{prefix}{suffix}"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "documents        5",
        "sequences        4",
        "tokens           1007",
        "dtype            uint16",
        "5 6 7",
    ):
        assert expected in out


def test_inspect_json(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prefix), "--json", "--tokens", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(describe(IndexedDataset(prefix), 2)))
    assert (facts["bin_bytes"], facts["empty_sequences"], facts["empty_documents"]) == (2014, 1, 1)
    assert facts["first_tokens"] == [5, 6]
    assert facts["length_percentiles"]["0"] == 0
    assert facts["length_percentiles"]["50"] == 3.5
    assert facts["length_percentiles"]["100"] == 1000
    assert facts["length_histogram"] == [
        {"from": 0, "to": 0, "sequences": 1},
        {"from": 2, "to": 3, "sequences": 1},
        {"from": 4, "to": 7, "sequences": 1},
        {"from": 512, "to": 1023, "sequences": 1},
    ]


def test_inspect_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.finalize(tmp_path / "x.idx")
    assert main(["inspect", str(tmp_path / "x")]) == 0
    assert main(["inspect", str(tmp_path / "x"), "--json"]) == 0
    assert '"tokens": 0' in capsys.readouterr().out


def test_inspect_errors(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prefix), "--tokens", "-1"]) == 2
    assert main(["inspect", str(prefix), "--multimodal"]) == 1
    assert "open it with multimodal=False" in capsys.readouterr().err


def test_verify_goes_on_after_a_bad_one(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prefix.parent / "bad.idx").write_bytes(b"no")
    (prefix.parent / "bad.bin").write_bytes(b"")
    assert main(["verify", str(prefix.parent / "bad"), f"{prefix}.idx", "--vocab-size", "8"]) == 1
    out, err = capsys.readouterr()
    assert out == (f"{prefix}: ok, 5 documents (1 empty), 4 sequences (1 empty), 1007 tokens of uint16 from 1 to 7\n")
    assert err.startswith(f"tdp: error: {prefix.parent / 'bad.idx'}: byte 0")
    assert err.count("\n") == 1
    assert main(["verify", str(prefix)]) == 0
    assert main(["verify", str(prefix), "--vocab-size", "7"]) == 1
    assert main(["verify", str(prefix), "--vocab-size", "0"]) == 2


def test_reader_of_the_output_goes_away(prefix: Path) -> None:
    # More output than a pipe holds, to a reader that has closed it.
    prefixes = [str(prefix)] * 3000
    with subprocess.Popen([*TDP, "verify", *prefixes], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
