"""Every kind of fault under a real torchrun: all ranks end with its cause, and the restart continues exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.testing import write_corpus

sys.path.insert(0, str(Path(__file__).parent))
import faulty_run as run
from planted import processes_left, run_two_ranks

pytestmark = pytest.mark.torchrun

SCRIPT = Path(run.__file__)

#: What rank 0, which does nothing wrong, and the culprit say; {k} is the step of the fault, {b} the one before.
#: None: killed before it can say anything.
ERRORS: dict[str, tuple[str, str | None]] = {
    "raises in read": (
        "ExchangeError: step {k}: rank 1 failed: OSError: disk gone",
        "ExchangeError: step {k}: rank 1 failed: OSError: disk gone",
    ),
    "raises in plan": ("rank 1 failed in step {k}: MemoryError: planted", "MemoryError: planted"),
    "raises in exchange": ("rank 1 failed in step {k}: MemoryError: planted", "MemoryError: planted"),
    "raises in pack": ("rank 1 failed in step {k}: MemoryError: planted", "MemoryError: planted"),
    "killed before the exchange": ("rank 1 is missing: it began step {b}, not step {k}", None),
    "killed in the exchange": ("rank 1 vanished in step {k}", None),
    "killed after the exchange": ("rank 1 vanished in step {k}", None),
    "ends early": (
        "ExchangeError: step {k}: the data of rank 1 ended 4 samples short of the step while ranks [0] have more",
        "ExchangeError: step {k}: the data of rank 1 ended 4 samples short of the step while ranks [0] have more",
    ),
    "plans diverge": (
        "of step {k} differs between ranks: ranks [1] disagree with rank 0",
        "of step {k} differs between ranks: ranks [1] disagree with rank 0",
    ),
    "late": (
        "did not complete within 8 s: rank 1 is missing: it began step {b}, not step {k}",
        "still late when torchrun ended it",
    ),
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of one torchrun that meets all faults, one after the other."""
    folder = tmp_path_factory.mktemp("faults")
    rng = np.random.default_rng(2)
    prefix = write_corpus(folder / "d", [rng.integers(0, 99, n) for n in rng.integers(1, 32, 60)])
    run_two_ranks(SCRIPT, len(run.FAULTS), folder / "log", prefix, str(folder / "out"))
    return folder


def attempts(output: Path) -> list[Path]:
    return sorted((output / "out").glob("attempt-*"))


@pytest.mark.parametrize("fault", run.FAULTS)
def test_all_ranks_end_with_the_first_cause(output: Path, fault: str) -> None:
    folder = attempts(output)[run.FAULTS.index(fault)]
    (start,) = read_lines(folder / "start-0.jsonl")
    assert start["fault"] == fault
    k = start["step"] + run.FAULT_AFTER
    for rank, expected in enumerate(ERRORS[fault]):
        errors = read_lines(folder / f"error-{rank}.jsonl")
        assert len(errors) == (expected is not None)
        if expected is not None:
            assert expected.format(k=k, b=k - 1) in errors[0]["text"]
    assert not (folder / "done-0.jsonl").exists()


def test_every_attempt_continues_exactly(output: Path) -> None:
    walk = [tuple(ref) for ref in run.samples(str(output / "d")).take(run.STEPS * run.GLOBAL_BATCH_SIZE).refs.tolist()]
    folders = attempts(output)
    assert len(folders) == len(run.FAULTS) + 1
    starts, reached = [], 0
    for folder in folders:
        (start,) = read_lines(folder / "start-0.jsonl")
        assert read_lines(folder / "start-1.jsonl") == [start]
        first = start["step"]
        assert first == reached // run.SAVE_EVERY * run.SAVE_EVERY
        starts.append(first)
        by_step: dict[int, list[Any]] = {}
        logs = [read_lines(folder / f"step-{rank}.jsonl") for rank in range(2)]
        for line in logs[0] + logs[1]:
            assert line["index"] == line["step"]
            by_step.setdefault(line["step"], []).extend(line["refs"])
        # A step that one of the ranks did not get to did not count.
        reached = first + min(len(log) for log in logs)
        for step in range(first, reached):
            placed = sorted((number, tuple(ref)) for number, ref in by_step[step])
            begin = step * run.GLOBAL_BATCH_SIZE
            assert placed == list(enumerate(walk[begin : begin + run.GLOBAL_BATCH_SIZE]))
    assert starts == sorted(set(starts))  # every attempt got further than the one before
    assert reached == run.STEPS
    assert all((folders[-1] / f"done-{rank}.jsonl").exists() for rank in range(2))


def test_the_read_that_failed_once_was_tried_again(output: Path) -> None:
    last = attempts(output)[-1]
    (start,) = read_lines(last / "start-1.jsonl")
    assert read_lines(last / "retried-1.jsonl") == [{"step": start["step"] + run.FAULT_AFTER}]


def test_no_process_is_left(output: Path) -> None:
    pids = [line["pid"] for path in (output / "out").glob("*/pid-*.jsonl") for line in read_lines(path)]
    assert len(pids) == 2 * (len(run.FAULTS) + 1)
    assert not processes_left(SCRIPT, pids)
