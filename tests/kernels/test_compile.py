"""The compiler takes the kernels (the interpreter accepts more), and keeps their registers in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("compile_kernels.py")
#: Ampere, Hopper, Blackwell, and the MI300.
TARGETS = ("80", "90", "100", "gfx942")


#: Arguments of one run of the script each.
RUNS = {**{target: (target,) for target in TARGETS}, "few registers": ("90", "32")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All runs, side by side: each is a process that takes a processor for many seconds."""
    folder = tmp_path_factory.mktemp("kernels")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    processes = {}
    try:
        for name, arguments in RUNS.items():
            # Files, not pipes: nobody reads while another run is waited for.
            with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
                processes[name] = subprocess.Popen(
                    [sys.executable, SCRIPT, *arguments],
                    env={**environment, "TRITON_CACHE_DIR": str(folder / name)},
                    stdout=out,
                    stderr=err,
                )
        yield {name: (process, folder) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def built_by(runs: dict[str, Any], name: str) -> list[dict[str, object]]:
    process, folder = runs[name]
    code = process.wait(timeout=600)
    assert code == 0, (folder / f"{name}.err").read_text()[-4000:]
    return [json.loads(line) for line in (folder / f"{name}.out").read_text().splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_every_specialisation_compiles_without_spills(target: str, runs: dict[str, Any]) -> None:
    built = built_by(runs, target)
    assert len(built) == {"90": 40}.get(target, 28)
    assert [b["kernel"] for b in built if b["spilled"]] == []
    # A source of more than 2**31 tokens must not wrap around.
    assert {b["kernel"] for b in built if b["narrow"]} == set()
    # Four warps of more than 128 registers would leave a multiprocessor with fewer than 16 warps.
    assert all(0 < int(str(b["registers"])) <= 128 and int(str(b["bytes"])) > 0 for b in built)


def test_spills_would_be_seen(runs: dict[str, Any]) -> None:
    (built,) = built_by(runs, "few registers")
    assert int(str(built["spilled"])) > 0
