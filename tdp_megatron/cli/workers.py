"""Worker processes that give results in the order of their input, and die with their parent.

The standard library's process pool is not used: its workers share one result pipe, so a worker that is killed in the
middle of a result leaves everybody waiting for the rest of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

from tdp_megatron.errors import TdpError

__all__ = ["OrderedPool"]

T = TypeVar("T")
R = TypeVar("R")

# Results wait for a slow predecessor; this many items per worker may be ahead of it.
_AHEAD = 4


class OrderedPool(Generic[T, R]):
    """Applies a function to a stream in spawned processes; with one worker, in this process.

    Args:
        function: picklable; called with one item.
        workers: processes.
    """

    def __init__(self, function: Callable[[T], R], workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._function = function
        self._num_workers = workers
        self._processes: dict[Connection[Any, Any], BaseProcess] = {}

    def __enter__(self) -> OrderedPool[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in self._processes.items():
            # The end of its connection ends a worker; after an error nobody waits for what it is doing.
            connection.close()
            if kind is not None:
                process.terminate()
        for process in self._processes.values():
            process.join()
            process.close()
        self._processes.clear()

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """Results in the order of ``items``.

        Raises:
            TdpError: a worker process died.
            Exception: whatever the function raises, for the first item it raises on.
        """
        if self._num_workers == 1:
            yield from map(self._function, items)
            return
        self._start()
        idle = list(self._processes)
        busy: dict[Connection[Any, Any], int] = {}
        done: dict[int, tuple[bool, Any]] = {}
        sent = given = 0
        for item in items:
            while not idle or sent - given >= _AHEAD * self._num_workers:
                self._collect(idle, busy, done)
                while given in done:
                    yield _value(done.pop(given))
                    given += 1
            connection = idle.pop()
            self._send(connection, item)
            busy[connection] = sent
            sent += 1
        while given < sent:
            while given not in done:
                self._collect(idle, busy, done)
            yield _value(done.pop(given))
            given += 1

    def _collect(
        self, idle: list[Connection[Any, Any]], busy: dict[Connection[Any, Any], int], done: dict[int, Any]
    ) -> None:
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            try:
                done[busy[ready]] = ready.recv()
            # A plain OSError is the end in the middle of a result.
            except (EOFError, OSError) as error:
                raise self._death(ready) from error
            del busy[ready]
            idle.append(ready)

    def _send(self, connection: Connection[Any, Any], item: T) -> None:
        # Only to an idle worker: it is reading, so neither side can wait for the other.
        try:
            connection.send(item)
        except OSError as error:
            raise self._death(connection) from error

    def _death(self, connection: Connection[Any, Any]) -> TdpError:
        process = self._processes[connection]
        process.join(timeout=5)
        return TdpError(
            f"a worker process died (exit code {process.exitcode}): it was killed, or the machine ran out of memory; "
            f"try fewer --workers"
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # The first start would make it, and unblock what is blocked below.
        resource_tracker.ensure_running()
        # Blocked while the processes start, and so in them: they would print tracebacks for a Ctrl-C otherwise.
        with _blocked(signal.SIGINT):
            for _ in range(self._num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self._function), daemon=True)
                process.start()
                # Ours must be the only copy on this side, or the death of a worker would not end the connection.
                theirs.close()
                self._processes[ours] = process


def _value(result: tuple[bool, Any]) -> Any:
    succeeded, value = result
    if not succeeded:
        raise value
    return value


def _work(connection: Connection[Any, Any], function: Callable[[Any], Any]) -> None:
    # Ctrl-C reaches every process of the terminal; only the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The connection ends when the parent closes it or dies.
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                result = (True, function(item))
            except Exception as error:
                result = (False, error)
            connection.send(result)


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
