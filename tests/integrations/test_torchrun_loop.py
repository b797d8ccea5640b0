"""docs/torchrun.md under a real torchrun, with a failure in between."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchrun

#: Rank 1 of the first start fails in its eighth optimizer step.
FAILURE = """
import os
import torch

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    real_step, calls = torch.optim.AdamW.step, []

    def step(self, *arguments):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("planted")
        return real_step(self, *arguments)

    torch.optim.AdamW.step = step
"""


def test_the_loop_trains_and_resumes_after_a_failure(
    page_code: Callable[[str], str], prefix: str, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(FAILURE + page_code("torchrun.md"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(script), prefix, str(tmp_path / "checkpoint.pt"), "12"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "planted" in done.stderr
    lines = re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)
    assert [int(step) for step, _ in lines] == [*range(1, 8), *range(6, 13)]  # from the checkpoint of step 5
    losses = [float(loss) for _, loss in lines]
    assert losses[5:7] == losses[7:9]  # steps 6 and 7, trained twice on the same data
    assert losses[-1] < losses[0]


def test_a_run_that_has_ended_ends_at_once(page_code: Callable[[str], str], prefix: str, tmp_path: Path) -> None:
    """The same command again: nothing is trained, and the endless data does not make it go on for ever."""
    script = tmp_path / "loop.py"
    script.write_text(page_code("torchrun.md"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(script), prefix, str(tmp_path / "checkpoint.pt"), "3"]
    steps = []
    for _ in range(2):
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=True
        )
        steps.append(re.findall(r"step (\d+):", done.stdout))
    assert steps == [["1", "2", "3"], []]
