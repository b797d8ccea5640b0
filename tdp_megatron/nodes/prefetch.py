"""``Prefetch``: steps made ahead of the training loop in one background thread."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int
from tdp_megatron.background import BackgroundThread
from tdp_megatron.nodes.base import require_node, skip_samples
from tdp_megatron.stats import NodeStats

__all__ = ["Prefetch"]

T = TypeVar("T")

_POLL_SECONDS = 0.1


class Prefetch(BaseNode[T]):
    """Keeps up to ``depth`` items of ``source`` ready.

    The state is that of the last item handed out, whatever has been read ahead. An error of the source is raised
    after the items that came before it, and again by every later ``next``. ``reset`` waits until the thread has
    ended, so that no item is lost to it. torchdata's own Prefetcher does neither.

    Args:
        source: any node; put whole steps or batches through here, not single samples.
        depth: items to keep ready.

    Raises:
        ValueError, TypeError: a bad argument.
        RuntimeError: at ``next``, after ``shutdown``.
    """

    def __init__(self, source: BaseNode[T], *, depth: int = 2) -> None:
        super().__init__()
        require_node(source)
        self.source = source
        self.depth = checked_int("depth", depth, least=1)
        self.stats = NodeStats()
        self._thread: BackgroundThread | None = None
        self._failure: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._thread is not None:
            raise TypeError("a Prefetch that runs cannot be pickled; pickle it before the first reset")
        return {key: value for key, value in self.__dict__.items() if key not in ("_stop", "_queue", "_end")}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.shutdown()
        self._failure = None
        self.source.reset(initial_state)
        self._start()

    def skip_to(self, step: int) -> None:
        """Drop what has been read ahead and go on with step ``step`` of the source; where it cannot, nothing changes.

        Raises:
            TypeError: the source cannot skip.
            ValueError: it lies behind the last step handed out, or beyond the end of the data.
        """
        if self._thread is None:
            self.reset(None)
        skip = getattr(self.source, "skip_to", None)
        if skip is None:
            raise TypeError(f"{type(self.source).__name__} cannot skip; it has no skip_to")
        self._move(lambda: skip(step))

    def skip_items(self, n: int) -> None:
        """Drop what has been read ahead and pass over the next ``n`` items; where they are fewer, nothing changes.

        Raises:
            BeyondEndError: there are fewer.
        """
        if self._thread is None:
            self.reset(None)
        self._move(lambda: skip_samples(self.source, n))

    def _move(self, skip: Callable[[], None]) -> None:
        self.shutdown()
        self._failure = None
        self.source.reset(self._state)
        try:
            skip()
        except (TypeError, ValueError):
            self.source.reset(self._state)
            raise
        finally:
            self._start()

    def _start(self) -> None:
        self._state: dict[str, Any] = self.source.state_dict()
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[T | None, dict[str, Any], Exception | None]] = queue.Queue(self.depth)
        # The thread knows the source and the queue, not this node: a node nobody keeps ends its thread.
        run = functools.partial(_run, self.source, self._queue, self._stop)
        self._thread = BackgroundThread(run, name="tdp-prefetch", stop=self._stop)
        self._thread.start()
        self._end = weakref.finalize(self, self._stop.set)

    def shutdown(self) -> None:
        """End the thread and wait for it; what it has read ahead is dropped."""
        if self._thread is None:
            return
        self._end()
        self._thread.join()
        self._thread = None

    def next(self) -> T:
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            raise RuntimeError("this Prefetch was shut down; reset it first")
        self.stats.queue_depth = self._queue.qsize()
        with self.stats.waiting():
            item, state, failure = self._get()
        if failure is not None:
            self._failure = failure
            raise failure
        check = getattr(self.source, "check_before_use", None)
        if check is not None:  # a step that another rank cannot make would leave the loop waiting for that rank
            try:
                check(item)
            except Exception as error:
                self._failure = error
                raise
        self._state = state
        self.stats.items += 1
        return item  # type: ignore[return-value]  # None only with a failure

    def _get(self) -> tuple[T | None, dict[str, Any], Exception | None]:
        while True:
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._thread is None or not self._thread.is_alive():
                    if not self._queue.empty():
                        continue
                    raise RuntimeError("the prefetch thread ended without an item or an error") from None

    def get_state(self) -> dict[str, Any]:
        return self._state


def _run(
    source: BaseNode[Any],
    items: queue.Queue[tuple[Any, dict[str, Any], Exception | None]],
    stop: threading.Event,
) -> None:
    failed = False
    while not stop.is_set() and not failed:
        entry: tuple[Any, dict[str, Any], Exception | None]
        try:
            entry = (next(source), source.state_dict(), None)
        except Exception as error:
            entry = (None, {}, error)
            failed = True
        while not stop.is_set():
            try:
                items.put(entry, timeout=_POLL_SECONDS)
                break
            except queue.Full:
                continue
