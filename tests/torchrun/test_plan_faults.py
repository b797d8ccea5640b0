"""By plan, under a real torchrun: a rank fails and lives on, the other is stuck in the loop's collective; both end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tdp_megatron.testing import write_corpus

pytestmark = pytest.mark.torchrun

SCRIPT = Path(__file__).with_name("plan_run.py")
specification = importlib.util.spec_from_file_location("plan_run", SCRIPT)
assert specification is not None
assert specification.loader is not None
run = importlib.util.module_from_spec(specification)
specification.loader.exec_module(run)


def test_the_stuck_rank_says_why_it_ends_and_the_restart_continues_exactly(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", [[i] * (3 + i % 7) for i in range(60)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(SCRIPT), prefix, str(tmp_path)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            code = process.wait(600)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    said = log.read_text()
    assert code == 0, said[-5000:]
    cause = f"rank 1 failed in step {run.FAULT_STEP}: OSError: disk gone"
    assert f"{cause}; rank 0 cannot go on without it" in said
    assert f"{cause}; rank 0 has been waiting in one place for {run.DEADLINE_S:g} s since" in said
    steps = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(tmp_path.glob("steps-*"))]
    first_0, first_1, second_0, second_1 = steps
    # The step that rank 1 could not make was begun by rank 0, and counted for nothing.
    assert [index for index, _ in first_0] == list(range(run.FAULT_STEP + 1))
    assert [index for index, _ in first_1] == list(range(run.FAULT_STEP))
    saved = run.FAULT_STEP // run.SAVE_EVERY * run.SAVE_EVERY
    for mine, other in zip(second_0, second_1, strict=True):
        assert mine[0] == other[0]
        assert sorted(mine[1] + other[1]) == list(range(run.GLOBAL_BATCH_SIZE))
    assert [index for index, _ in second_0] == list(range(saved, run.STEPS))
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-1-0", "done-1-1"}
