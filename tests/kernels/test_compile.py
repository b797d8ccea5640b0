"""The compiler takes the kernels (the interpreter accepts more), and keeps their registers in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("compile_kernels.py")
#: Ampere, Hopper, Blackwell, and the MI300.
TARGETS = ("80", "90", "100", "gfx942")


def compile_for(target: str, cache: Path, *arguments: str) -> list[dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, target, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_every_specialisation_compiles_without_spills(target: str, tmp_path: Path) -> None:
    built = compile_for(target, tmp_path)
    assert len(built) == {"90": 40}.get(target, 28)
    assert [b["kernel"] for b in built if b["spilled"]] == []
    # Four warps of more than 128 registers would leave a multiprocessor with fewer than 16 warps.
    assert all(0 < int(str(b["registers"])) <= 128 and int(str(b["bytes"])) > 0 for b in built)


def test_spills_would_be_seen(tmp_path: Path) -> None:
    (built,) = compile_for("90", tmp_path, "32")
    assert int(str(built["spilled"])) > 0
