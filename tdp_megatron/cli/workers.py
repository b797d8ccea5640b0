"""Worker processes that give results in the order of their input, and die with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Generic, TypeVar

from tdp_megatron.errors import TdpError

__all__ = ["OrderedPool"]

T = TypeVar("T")
R = TypeVar("R")

_function: Callable[..., object] | None = None


def _start_worker(function: Callable[..., object]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches every process of the terminal; only the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    # A worker waits on a queue whose other end it holds itself, so it would outlive a killed parent for ever.
    wait([sentinel])
    os._exit(1)


def _call(item: object) -> object:
    assert _function is not None
    return _function(item)


class OrderedPool(Generic[T, R]):
    """Applies a function to a stream in spawned processes; with one worker, in this process.

    Args:
        function: picklable; called with one item.
        workers: processes.
    """

    def __init__(self, function: Callable[[T], R], workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._function_here = function
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> OrderedPool[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is None:
            return
        if kind is not None:
            # Nobody wants the results that are still being computed.
            for process in self._processes:
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """Results in the order of ``items``; at most two items per worker are under way.

        Raises:
            TdpError: a worker process died.
        """
        if self._workers == 1:
            yield from map(self._function_here, items)
            return
        waiting: deque[Future[object]] = deque()
        try:
            for item in items:
                waiting.append(self._submit(item))
                if len(waiting) > 2 * self._workers:
                    yield waiting.popleft().result()  # type: ignore[misc]
            while waiting:
                yield waiting.popleft().result()  # type: ignore[misc]
        except BrokenProcessPool as error:
            raise TdpError(
                "a worker process died; it was killed or the machine ran out of memory: try fewer --workers"
            ) from error

    def _submit(self, item: T) -> Future[object]:
        if self._executor is not None:
            return self._executor.submit(_call, item)
        before = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self._function_here,),
        )
        # Blocked while the processes start, and so in them: they would print tracebacks for a Ctrl-C otherwise.
        with _blocked(signal.SIGINT):
            future = self._executor.submit(_call, item)
        self._processes = [process for process in multiprocessing.active_children() if process not in before]
        return future


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
