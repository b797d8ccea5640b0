"""The training script under a real torchrun: a rank is killed, a signal stops it, other layouts resume it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tdp_megatron.indexed import IndexedDatasetBuilder

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import verify_resume

pytestmark = pytest.mark.torchrun

TIMEOUT_S = 120
SCRIPT = Path(verify_resume.__file__).with_name("train_gpt.py")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(11)
    made = []
    for name in ("a", "b"):
        prefix = str(folder / name)
        with IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16) as builder:
            for length in rng.integers(1, 80, 150):
                builder.add_document(np.minimum(rng.geometric(0.2, length), 63).astype(np.uint16), [int(length)])
            builder.finalize(prefix + ".idx")
        made.append(prefix)
    return made


@contextmanager
def torchrun(num_ranks: int, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with its output in ``log``; ended, ranks included, when the block is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(SCRIPT), *words], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(TIMEOUT_S)


def training_words(prefixes: list[str], output: Path, cp: int, steps: int) -> list[str]:
    words = [word for prefix in prefixes for word in ("--data", prefix)]
    words += ["--weights", "0.6", "0.4", "--vocab-size", "64", "--global-batch-size", "8", "--max-seqlen", "64"]
    words += ["--hidden-size", "16", "--num-layers", "1", "--num-attention-heads", "2", "--lr", "0.03"]
    words += ["--cp", str(cp), "--steps", str(steps), "--save-interval", "4", "--output", str(output)]
    return [*words, "--device", "cpu"]


def steps_logged(output: Path, attempt: int) -> int:
    path = output / f"attempt-{attempt:03d}" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_steps(process: subprocess.Popen[bytes], log: Path, output: Path, attempt: int, steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while steps_logged(output, attempt) < steps:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def children_of(parent: int) -> list[int]:
    """Processes that ``parent`` started, oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == parent:
            found.append(int(entry.name))
    return sorted(found)


def saved_step(output: Path) -> int:
    checkpoints = output / "checkpoints"
    state = checkpoints / (checkpoints / "latest").read_text().strip() / "state.json"
    return int(json.loads(state.read_text())["step"])


def test_killed_and_stopped_runs_resume_exactly_on_other_layouts(prefixes: list[str], tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log"

    with torchrun(2, log, *training_words(prefixes, output, cp=2, steps=100_000)) as process:
        wait_for_steps(process, log, output, attempt=0, steps=10)
        os.kill(children_of(process.pid)[-1], signal.SIGKILL)
        assert process.wait(TIMEOUT_S) != 0
    killed_at = steps_logged(output, 0)
    first_save = saved_step(output)
    assert 8 <= first_save <= killed_at
    assert first_save % 4 == 0

    with torchrun(2, log, *training_words(prefixes, output, cp=1, steps=100_000)) as process:
        wait_for_steps(process, log, output, attempt=1, steps=3)
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
    said = log.read_text()
    assert f"from step {first_save}\n" in said
    stopped_at = first_save + steps_logged(output, 1)
    assert f"stopped after {stopped_at} of 100000 steps: SIGTERM asked to stop" in said
    assert saved_step(output) == stopped_at

    with torchrun(1, log, *training_words(prefixes, output, cp=1, steps=stopped_at + 20)) as process:
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    assert "training is complete" in log.read_text()
    assert saved_step(output) == stopped_at + 20

    assert verify_resume.main(["--run", str(output), "--summary", str(tmp_path / "summary.json")]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["resumed_exactly"]
    assert summary["steps"] == stopped_at + 20
    assert [(run["dp"], run["cp"], run["first_step"] - 1) for run in summary["runs"]] == [
        (1, 2, 0),
        (2, 1, first_save),
        (1, 1, stopped_at),
    ]


def test_what_the_user_got_wrong_is_said_once(prefixes: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [*training_words(prefixes, tmp_path / "run", cp=1, steps=2), "--weights", "1", "nan"]
    with torchrun(2, log, *words) as process:
        assert process.wait(TIMEOUT_S) != 0
    said = log.read_text()
    assert said.count("error: weight 1 of source 1") == 1, said
    # torchrun reports the ranks that failed with their code, 2 for what could not start.
    assert "exitcode  : 2" in said
    assert 'train_gpt.py", line' not in said
    assert not (tmp_path / "run").exists()
