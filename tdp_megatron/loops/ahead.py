"""A step in the making while the loop trains on the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from tdp_megatron.background import BackgroundThread

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Generic[T]):
    """A step in the making, in a thread of its own."""

    def __init__(self, num_microbatches: int, make: Callable[[], T]) -> None:
        self.num_microbatches = num_microbatches
        self._step: T | None = None
        self._error: BaseException | None = None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                self._step = make()
            except BaseException as error:
                self._error = error

        self._thread = BackgroundThread(run, name="tdp-read-ahead")
        self._thread.start()
        self.is_awaited = False

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self.is_awaited = True
        self._thread.join()

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._step is not None
        return self._step
