"""``tdp bench``: which benchmarks there are, what is collected, what a failing one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdp_megatron.cli.main import main

_GOOD = '''"""How fast is nothing?

    python benchmarks/good.py
"""
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--smoke", action="store_true")
args = parser.parse_args()
print("nothing takes", 0 if args.smoke else 1)
open(args.json, "w").write(json.dumps({"smoke": args.smoke}))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "common.py").write_text('"--json" "--smoke"')
    (tmp_path / "tables.py").write_text("print(1)")  # a script that is no benchmark
    (tmp_path / "good.py").write_text(_GOOD)
    return tmp_path


def test_results_and_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, page = folder / "all.json", folder / "page.md"
    arguments = ["bench", "--folder", str(folder), "--smoke", "--json", str(result), "--markdown", str(page)]
    assert main(arguments) == 0
    assert "nothing takes 0" in capsys.readouterr().out
    assert json.loads(result.read_text())["results"] == {"good": {"smoke": True}}
    text = page.read_text()
    assert "How fast is nothing?" in text
    assert "nothing takes 0" in text
    assert "tdp bench good --smoke --markdown" in text
    assert [p.name for p in folder.glob("*.tmp")] == []


def test_without_smoke(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "good", "--folder", str(folder)]) == 0
    assert "nothing takes 1" in capsys.readouterr().out


def test_a_failing_one_does_not_stop_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text('"--json" "--smoke"\nprint("so far")\nraise SystemExit(3)')
    result = folder / "all.json"
    assert main(["bench", "--folder", str(folder), "--json", str(result)]) == 1
    captured = capsys.readouterr()
    assert "1 of 2 benchmarks failed: bad (exit code 3)" in captured.err
    assert json.loads(result.read_text())["results"] == {"bad": None, "good": {"smoke": False}}


def test_wrong_use(folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "godo", "--folder", str(folder)]) == 2
    assert "no benchmark 'godo'; there are good" in capsys.readouterr().err
    assert main(["bench", "--folder", str(tmp_path_factory.mktemp("empty"))]) == 2
    assert "give --folder" in capsys.readouterr().err
    assert main(["bench", "--list", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == "good\n"


@pytest.mark.parametrize("name", ["blend", "cold", "fetch", "index", "reroute", "schedule", "startup"])
def test_the_checkouts_own_run(name: str, tmp_path: Path) -> None:
    checkout = Path(__file__).parents[2] / "benchmarks"
    result = tmp_path / "result.json"
    assert main(["bench", name, "--folder", str(checkout), "--smoke", "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["results"][name]["rows"]
    assert rows
    if name in ("blend", "index"):
        assert all(row["cpu_seconds"] > 0 and row["way"] for row in rows)
