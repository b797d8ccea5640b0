"""``tdp preprocess`` when its processes are interrupted or killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tdp_megatron.cli.workers import OrderedPool
from tdp_megatron.errors import TdpError

LINE = b'{"text": "' + b"x" * 1000 + b'"}\n'
DEADLINE_SECONDS = 60


class Run:
    """A command that waits in the middle of its input: a FIFO that nobody closes."""

    def __init__(self, tmp_path: Path) -> None:
        fifo = tmp_path / "a.jsonl"
        os.mkfifo(fifo)
        self.out = tmp_path / "out"
        command = [sys.executable, "-m", "tdp_megatron.cli.main", "preprocess", "--input", str(fifo)]
        command += ["--output-prefix", str(self.out / "x"), "--workers", "2"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        self.fifo = open(fifo, "wb", buffering=0)  # noqa: SIM115
        self.fifo.write(LINE * 3000)
        self.wait_for(lambda: len(self.workers()) == 2 and os.listdir(self.out))
        self.workers_seen = self.workers()

    def workers(self) -> list[int]:
        """Process ids of the spawned workers."""
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                ours = name.isdigit() and f"\nPPid:\t{self.process.pid}\n" in Path(f"/proc/{name}/status").read_text()
                if ours and b"spawn_main" in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit status and stderr; the workers must be gone too."""
        # A signal that comes just before a blocking read is seen only after it.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.fifo.write(LINE * 3000)
        _, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        self.wait_for(lambda: not any(is_alive(number) for number in self.workers_seen))
        return self.process.returncode, err.decode()


def is_alive(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False
    return "\nState:\tZ" not in status


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(tmp_path)
    yield started
    with contextlib.suppress(ProcessLookupError):
        started.process.kill()
    started.process.communicate()
    with contextlib.suppress(BrokenPipeError):
        started.fifo.close()


def test_interrupt_of_the_whole_terminal(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == (130, "tdp: interrupted\n")
    assert os.listdir(run.out) == []


def test_workers_do_not_answer_an_interrupt_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts multiprocessing's resource tracker unblocks the signal behind its back."""
    blocked: list[bool] = []
    start = multiprocessing.get_context("spawn").Process.start

    def started(process: multiprocessing.process.BaseProcess) -> None:
        start(process)  # type: ignore[arg-type]
        status = Path(f"/proc/{process.pid}/status").read_text()
        mask = int(status.split("\nSigBlk:\t")[1].split("\n")[0], 16)
        blocked.append(bool(mask >> (signal.SIGINT - 1) & 1))

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", started)
    resource_tracker._resource_tracker._stop()  # as in a fresh process
    with OrderedPool(len, 2) as pool:
        assert list(pool.map(["a", "bc"])) == [1, 2]
    assert blocked == [True, True]


def test_terminate(run: Run) -> None:
    run.process.terminate()
    assert run.end() == (128 + signal.SIGTERM, "")
    assert os.listdir(run.out) == []


def test_killed_worker_is_an_error(run: Run) -> None:
    os.kill(run.workers_seen[0], signal.SIGKILL)
    run.fifo.close()
    code, err = run.end()
    assert code == 1
    assert err.startswith("tdp: error: a worker process died (exit code -9): it was killed, or")
    assert os.listdir(run.out) == []


def test_workers_do_not_outlive_a_killed_parent(run: Run) -> None:
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
    # Only the temporary file is left, and the next run removes it.
    assert [name.endswith(".tmp") for name in os.listdir(run.out)] == [True]
    source = run.out.parent / "b.jsonl"
    source.write_bytes(LINE)
    command = [sys.executable, "-m", "tdp_megatron.cli.main", "preprocess", "--input", str(source)]
    subprocess.run([*command, "--output-prefix", str(run.out / "x"), "--quiet"], check=True, timeout=DEADLINE_SECONDS)
    assert sorted(os.listdir(run.out)) == ["x_text_document.bin", "x_text_document.idx"]


# The pool's function in these tests is eval, so that the workers need not import this file.
DIE_INSIDE_A_RESULT = (
    "[__import__('threading').Timer(0.3, __import__('os').kill, (__import__('os').getpid(), 9)).start(), 'x' * 10**7]"
)


def test_worker_killed_inside_a_result() -> None:
    before = set(multiprocessing.active_children())

    def items() -> Iterator[str]:
        yield DIE_INSIDE_A_RESULT
        # Nobody reads meanwhile, and no pipe holds that much: the worker dies while it sends.
        while len(set(multiprocessing.active_children()) - before) == 2:
            time.sleep(0.02)
        yield "1"

    with OrderedPool(eval, 2) as pool, pytest.raises(TdpError, match=r"a worker process died \(exit code -9\)"):
        list(pool.map(items()))
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_in_order_and_the_first_error(workers: int) -> None:
    with OrderedPool(eval, workers) as pool:
        slow_first = ["__import__('time').sleep(0.3) or 0"] + [str(i) for i in range(1, 40)]
        assert list(pool.map(slow_first)) == list(range(40))
    seen = []

    def consume() -> None:
        with OrderedPool(eval, workers) as pool:
            for value in pool.map(["1", "__import__('time').sleep(0.2) or int('first')", "int('second')", "4"]):
                seen.append(value)  # noqa: PERF402

    with pytest.raises(ValueError, match="first"):
        consume()
    assert seen == [1]


def test_items_are_not_read_far_ahead() -> None:
    drawn = []

    def items() -> Iterator[str]:
        for i in range(100):
            drawn.append(i)
            yield str(i)

    with OrderedPool(eval, 2) as pool:
        results = pool.map(items())
        assert next(results) == 0
        assert len(drawn) <= 10


def test_no_workers() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        OrderedPool(eval, 0)


def test_end_of_input_after_a_pause(run: Run) -> None:
    run.fifo.close()
    assert run.end() == (0, "")
    assert sorted(os.listdir(run.out)) == ["x_text_document.bin", "x_text_document.idx"]
