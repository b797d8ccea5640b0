"""The guide to the scheduler runs as it stands, and its tables are what the generator writes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from tdp_megatron.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "scheduler.md").read_text()
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", GUIDE, re.S) for line in block.splitlines()]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedule_tables", ROOT / "benchmarks" / "schedule_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_of_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "scheduler.md", "exec"), {})


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_commands_of_the_guide_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("id,num_tokens\n" + "1,9\n" * 4000)
    Path("steps.csv").write_text(
        "tokens_per_rank,squares,cp_size,seconds\n1000,1e6,1,1.1\n2000,2e6,1,2.0\n2000,4e6,1,2.3\n"
    )
    Path("cost.json").write_text('{"cost_model": {"a": 1e-5, "b": 1e-9}}')
    words = shlex.split(COMMANDS[number])
    assert words.pop(0) == "tdp"
    if "--png" in words:
        pytest.importorskip("matplotlib")
    if "--hidden-size" in words:
        words.append("--smoke")
    if words[0] == "simulate":
        # The batch of the guide takes long to draw and plan.
        words = ["github" if word == "corpus_text_document" else word for word in words]
        words += ["--algorithms", "dp_balanced,auto"]
    assert main(words) == 0
    for option in ("--html", "--png", "--trace", "--output"):
        if option in words:
            assert Path(words[words.index(option) + 1]).stat().st_size > 0


def row(**changed: object) -> dict[str, object]:
    return {
        "mode": "free",
        "model": "8b",
        "ranks": 32,
        "data": "github",
        "dp_balanced": 1.5,
        "balanced_hybrid_cp": None,
        "default_dynamic_cp": 1.25,
        "lpt": 1.0625,
        "auto": 1.0,
        "faster": 1.5,
        "reach": None,
        "padding": 0.001,
        "chosen": "buddy/lpt",
        **changed,
    }


def test_tables() -> None:
    content = {
        "machine": {"cpu": "x"},
        "command": "python benchmarks/schedule.py --seeds 1",
        "rows": [row(model="70b"), row(), row(mode="lockstep", reach=1.125)],
        "missed": ["free 8b: slow"],
    }
    planning = {
        "machine": {"cpu": "x"},
        "command": "python benchmarks/schedule.py --planning",
        "planning": [
            {"ranks": 8, "sequences": 4096, "mode": "free", "algorithm": "auto", "fastest_ms": 1, "slowest_ms": 6}
            | {"target_ms": 5}
        ],
    }
    made = generator().tables([content, planning])
    assert "    python benchmarks/schedule.py --planning\n\non cpu x." in made
    free, lockstep = made.split("### Mode `lockstep`")
    eight, seventy = (line for line in free.splitlines() if "github" in line)
    assert eight == "| 8B, 32 | github | 1.500 | 1.250 | 1.062 | **1.000** | 1.50x | 0.10% | buddy, lpt |"
    assert seventy.startswith("| 70B, 32 |")
    assert "| 1.50x | 1.125 | 0.10% |" in lockstep
    assert "| 8 x 4,096 | free | auto | 1.0 to 6.0 | 5 |" in made
    assert made.endswith("- free 8b: slow\n- planning 8 x 4,096, free, auto: up to 6 ms, target 5 ms")


def test_the_generator_changes_only_what_is_between_its_marks(tmp_path: Path) -> None:
    tool = generator()
    (tmp_path / "a.json").write_text('{"machine": {"cpu": "x"}, "command": "c", "rows": []}')
    guide = tmp_path / "guide.md"
    guide.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    assert tool.main([str(tmp_path / "a.json"), "--write", str(guide)]) == 0
    text = guide.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n\nMade by\n\n    c\n")
    assert text.endswith(f"{tool.END}\nafter\n")
    assert "old" not in text
    guide.write_text("no marks")
    assert tool.main([str(tmp_path / "a.json"), "--write", str(guide)]) == 1
    assert guide.read_text() == "no marks"


def test_the_tables_of_the_guide_are_complete() -> None:
    tool = generator()
    between = GUIDE.partition(tool.BEGIN)[2].partition(tool.END)[0]
    for mode in ("free", "lockstep", "pipeline(4)"):
        rows = between.partition(f"### Mode `{mode}`")[2].partition("###")[0]
        for model in ("8B", "70B", "1.7B"):
            for ranks in (8, 32, 128, 512, 1024):
                assert len(re.findall(rf"^\| {re.escape(model)}, {ranks} \|", rows, re.M)) == 4, (mode, model, ranks)
    assert not re.search(r"%[A-Z]+%", GUIDE)
