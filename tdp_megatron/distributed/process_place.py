"""Where a process runs, and whether it is still there: what a neighbour on the same machine sees at once."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = ["Condition", "ProcessPlace"]

#: States of /proc/PID/stat: zombie, and dead while it is taken apart; stopped, by a signal or by a tracer.
_ENDED, _STOPPED = "ZXx", "Tt"


class Condition(Enum):
    """What can be said of a process that gives no sign of life."""

    RUNS = "its process is there, but its threads get no time, as in a call that keeps Python's lock"
    STOPPED = "its process is stopped, by a signal or by a debugger"
    ENDED = "it was killed, or left with os._exit before DpCpGroups.close()"
    UNKNOWN = "it was killed, stopped or cut off, or its machine is gone"
    """It runs on another machine, or in another container."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """A process of the job, as it is noted for the others."""

    pid: int
    started: int
    """Clock ticks from the machine's start to the process's: another process may get the same pid."""
    space: str
    """In which its pid means it: this start of the machine, and the container; "-" where unknown."""
    host: str
    """Name of the machine, for messages."""

    @classmethod
    def of_this_process(cls) -> ProcessPlace:
        """The place of the process that asks."""
        pid, host = os.getpid(), socket.gethostname()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(pid, _read_stat(pid)[1], f"{boot}/{os.readlink('/proc/self/ns/pid')}", host)
        except (OSError, ValueError):  # no Linux
            return cls(pid, 0, "-", host)

    @classmethod
    def parse(cls, text: str) -> ProcessPlace:
        """From the ``str`` of a place."""
        pid, started, space, host = text.split(" ", 3)
        return cls(int(pid), int(started), space, host)

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.space} {self.host}"

    def is_near(self, here: ProcessPlace) -> bool:
        """Whether ``here`` can look at the process."""
        return self.space == here.space != "-"

    def condition(self, here: ProcessPlace) -> Condition:
        """How the process is, as far as one can see from ``here``."""
        if not self.is_near(here):
            return Condition.UNKNOWN
        try:
            state, started = _read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return Condition.ENDED
        except (OSError, ValueError):
            return Condition.UNKNOWN
        if state in _ENDED or started != self.started:
            return Condition.ENDED
        return Condition.STOPPED if state in _STOPPED else Condition.RUNS


def _read_stat(pid: int) -> tuple[str, int]:
    """State and start of a process."""
    # The name of the program, in parentheses, may itself hold spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])
