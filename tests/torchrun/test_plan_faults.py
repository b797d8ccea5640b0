"""By plan, under a real torchrun: whatever rank 1 meets, rank 0 ends with that; the restart continues exactly."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tdp_megatron.testing import write_corpus

sys.path.insert(0, str(Path(__file__).parent))
import plan_run as run
from planted import processes_left, run_two_ranks

pytestmark = pytest.mark.torchrun

SCRIPT = Path(run.__file__)
CANNOT = "rank 0 cannot go on without it"
KILLED = r"rank 1 \(pid {pid} on \S+\) is gone; last seen at step {seen}; it was killed.*; " + CANNOT

#: What rank 0 says: {k} is the step of the fault, {b} the one before; as regular expressions.
SAID = {
    "raises in read": "rank 1 failed in step {k}: OSError: disk gone; " + CANNOT,
    "raises in plan": "rank 1 failed in step {k}: MemoryError: planted; " + CANNOT,
    "raises in pack": "rank 1 failed in step {k}: MemoryError: planted; " + CANNOT,
    "killed before the step": KILLED.replace("{seen}", "{b}"),
    "killed in the step": KILLED.replace("{seen}", "{k}"),
    "killed after the step": KILLED.replace("{seen}", "{k}"),
    "ends early": "the data of rank 1 ended after {k} global batches, that of rank 0 has more.*; " + CANNOT,
    "leaves in the step": r"rank 1 \(pid {pid} on \S+\) left after step {k}, without an uncaught error; rank 0 ends",
    "plans diverge": r"ExchangeError: the plan .* of step {k} differs between ranks: ranks \[1\] disagree with rank 0",
    "late": "did not complete within 3 s: rank 1 is missing: it began step {b}, not step {k}",
    "ends early where plans are compared": (
        r"ExchangeError: comparing .* of step {k}: the data of ranks \[1\] has ended, ranks \[0\] have more"
    ),
}
#: Of whose step k both parts were made.
COMPLETE = ("killed after the step",)
GOT_IT = ("killed in the step", "killed after the step", "leaves in the step")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one torchrun has left whose attempts meet all faults, one after the other."""
    folder = tmp_path_factory.mktemp("plan")
    prefix = write_corpus(folder / "d", [[i] * (3 + i % 7) for i in range(run.STEPS * run.GLOBAL_BATCH_SIZE)])
    run_two_ranks(SCRIPT, len(run.FAULTS), folder / "log", prefix, str(folder))
    return folder


def steps_of(output: Path, attempt: int, rank: int) -> list[tuple[int, list[int]]]:
    lines = (output / f"steps-{attempt}-{rank}.jsonl").read_text().splitlines()
    return [(index, ids) for index, ids in map(json.loads, lines)]


@pytest.mark.parametrize("fault", run.FAULTS)
def test_the_other_rank_says_what_happened(output: Path, fault: str) -> None:
    attempt = run.FAULTS.index(fault)
    k = run.fault_step(attempt)
    pid = (output / f"pid-{attempt}-1").read_text()
    said = (output / "log").read_text()
    assert (output / f"fault-{attempt}-1").exists()
    assert re.search(SAID[fault].format(k=k, b=k - 1, pid=pid), said), said


def test_a_stuck_rank_says_why_it_ends(output: Path) -> None:
    cause = f"rank 1 failed in step {run.fault_step(0)}: OSError: disk gone"
    stuck = f"{cause}; rank 0 has been waiting in one place for {run.DEADLINE_S:g} s since"
    assert stuck in (output / "log").read_text()


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
        assert last == (at if run.FAULTS[attempt] in GOT_IT else at - 1)
        complete = at + (run.FAULTS[attempt] in COMPLETE)
        first = complete // run.SAVE_EVERY * run.SAVE_EVERY
    assert {path.name for path in output.glob("done-*")} == {f"done-{len(run.FAULTS)}-{rank}" for rank in (0, 1)}


def test_the_read_that_failed_once_was_tried_again(output: Path) -> None:
    assert [path.name for path in output.glob("retried-*")] == [f"retried-{len(run.FAULTS)}-1"]


def test_no_process_is_left(output: Path) -> None:
    pids = [int(path.read_text()) for path in output.glob("pid-*")]
    assert len(pids) == 2 * (len(run.FAULTS) + 1)
    assert not processes_left(SCRIPT, pids)
