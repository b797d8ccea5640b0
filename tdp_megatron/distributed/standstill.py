"""Whether a process stands still: where its threads are, for how long, and in which collective."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TypeAlias

import torch.distributed as dist

__all__ = ["Standstill", "collective_in_progress", "stacks"]

#: Where threads are: code and instruction of every frame.
_Places: TypeAlias = tuple[tuple[int, int], ...]
_COLLECTIVES = dist.distributed_c10d.__name__
#: So long between two looks is no delay any more. They come every second, in big jobs every few seconds.
_PAUSE_SECONDS = 30.0
#: They need one other rank, not the group.
_POINT_TO_POINT = {"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv", "isend", "irecv"}


class Standstill:
    """Since when the threads that the program waits for have been where they are."""

    def __init__(self) -> None:
        self._seen: tuple[int, _Places] | None = None
        self._since = 0.0
        self._looked = 0.0

    def look(self, came: int, now: float) -> float:
        """Look where the threads are.

        Args:
            came: rises with every sign that the program goes on: it may be in one place whenever one looks, and yet
                move.
            now: by a monotonic clock, seconds.

        Returns:
            Since when they have been there, by the same clock.
        """
        seen = came, _places()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._looked > _PAUSE_SECONDS:  # stopped, or kept from looking, and not waiting meanwhile
            self._since += now - self._looked
        self._looked = now
        return self._since


def collective_in_progress() -> tuple[str, list[int]] | None:
    """torch's collective that the main thread is in, and the ranks that it needs; None where it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if frame.f_globals.get("__name__") == _COLLECTIVES and "group" in code.co_varnames[: code.co_argcount]:
            if code.co_name in _POINT_TO_POINT:
                return None
            group = frame.f_locals.get("group")
            try:
                return code.co_name, dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            except (RuntimeError, ValueError, KeyError):  # destroyed meanwhile
                return None
        frame = frame.f_back
    return None


def stacks() -> list[str]:
    """The stack of every thread, the most recent call first; without lines of code, which may lie on a file system that
    hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        at: FrameType | None = frame
        while at is not None:
            lines.append(f'  File "{at.f_code.co_filename}", line {at.f_lineno} in {at.f_code.co_name}')
            at = at.f_back
    return lines


def _places() -> _Places:
    """Where the main thread is, and every other that the program waits for at its end."""
    frames = sys._current_frames()
    main = threading.main_thread()
    places: list[tuple[int, int]] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is not main and thread.daemon:
            continue
        while frame is not None:
            places.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return tuple(places)
