"""By plan, under a real torchrun: a rank fails and lives on, or is killed; the other says why it ends, and why."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one torchrun has left whose attempts meet all faults, one after the other."""
    folder = tmp_path_factory.mktemp("plan")
    prefix = write_corpus(folder / "d", [[i] * (3 + i % 7) for i in range(run.STEPS * run.GLOBAL_BATCH_SIZE)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(len(run.FAULTS)), str(SCRIPT), prefix, str(folder)]
    with (folder / "log").open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            code = process.wait(600)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    assert code == 0, (folder / "log").read_text()[-5000:]
    return folder


def steps_of(output: Path, attempt: int, rank: int) -> list[tuple[int, list[int]]]:
    lines = (output / f"steps-{attempt}-{rank}.jsonl").read_text().splitlines()
    return [(index, ids) for index, ids in map(json.loads, lines)]


def test_a_stuck_rank_says_why_it_ends(output: Path) -> None:
    said = (output / "log").read_text()
    cause = f"rank 1 failed in step {run.fault_step(0)}: OSError: disk gone"
    assert f"{cause}; rank 0 cannot go on without it" in said
    assert f"{cause}; rank 0 has been waiting in one place for {run.DEADLINE_S:g} s since" in said


@pytest.mark.parametrize("attempt", range(1, len(run.FAULTS)))
def test_a_killed_rank_is_named(output: Path, attempt: int) -> None:
    pid = (output / f"pid-{attempt}-1").read_text()
    said = (output / "log").read_text()
    found = re.search(
        rf"rank 1 \(pid {pid} on \S+\) is gone; last seen at step (\d+); it was killed.*; rank 0 .*", said
    )
    assert found is not None, said
    assert found[0].endswith("rank 0 cannot go on without it")
    at = run.fault_step(attempt)
    assert int(found[1]) == (at - 1 if run.FAULTS[attempt] == "killed before the step" else at)


def test_every_attempt_continues_exactly(output: Path) -> None:
    first = 0
    for attempt in range(len(run.FAULTS) + 1):
        mine, other = steps_of(output, attempt, 0), steps_of(output, attempt, 1)
        assert mine[0][0] == other[0][0] == first
        for (index, ids), (same_index, other_ids) in zip(mine, other, strict=False):
            assert index == same_index
            begin = index * run.GLOBAL_BATCH_SIZE
            assert sorted(ids + other_ids) == list(range(begin, begin + run.GLOBAL_BATCH_SIZE))
        at = run.fault_step(attempt)
        last = other[-1][0]
        if attempt == len(run.FAULTS):
            assert mine[-1][0] == last == run.STEPS - 1
            continue
        # A step of which one rank's part was never made counts for nothing.
        got_it = run.FAULTS[attempt] in ("killed in the step", "killed after the step")
        assert last == (at if got_it else at - 1)
        complete = at + (run.FAULTS[attempt] == "killed after the step")
        first = complete // run.SAVE_EVERY * run.SAVE_EVERY
    assert {path.name for path in output.glob("done-*")} == {f"done-{len(run.FAULTS)}-{rank}" for rank in (0, 1)}


def test_no_process_is_left(output: Path) -> None:
    pids = [path.read_text() for path in output.glob("pid-*")]
    assert len(pids) == 2 * (len(run.FAULTS) + 1)
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or SCRIPT.name.encode() not in command.read_bytes()
