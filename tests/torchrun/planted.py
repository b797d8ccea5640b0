"""What the runs under torchrun share: a node that meets a fault, and the start of a script; scripts import it, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchdata.nodes import BaseNode

TIMEOUT_S = 900  # about a minute on an idle machine


class Faulty(BaseNode[Any]):
    """A user's node that passes samples on until ``fault``, told how many it has passed, has its way."""

    def __init__(self, source: BaseNode[Any], fault: Callable[[int], None]) -> None:
        super().__init__()
        self.source, self.fault = source, fault

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.passed = 0 if initial_state is None else initial_state["passed"]

    def next(self) -> Any:
        self.fault(self.passed)
        self.passed += 1
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "passed": self.passed}


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_memory_error(*_: Any, **__: Any) -> Any:
    raise MemoryError("planted")


def fail_next_read(note: Callable[[], None]) -> None:
    """Make this process's next read from a disk fail, which ``note`` is told."""
    real = os.preadv

    def fail_once(*arguments: Any) -> int:
        os.preadv = real
        note()
        raise OSError(5, "planted")

    os.preadv = fail_once


def run_two_ranks(script: Path, max_restarts: int, log: Path, *words: str) -> None:
    """Run a script to its end; a run that fails once more than it may be restarted is an error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(max_restarts), str(script), *words]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    assert code == 0, log.read_text()[-5000:]


def processes_left(script: Path, pids: list[int]) -> list[int]:
    """Those that still run the script, or are its zombies."""
    left = []
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            is_zombie = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if is_zombie or script.name.encode() in (place / "cmdline").read_bytes():
                left.append(pid)
        except OSError:
            continue
    return left
