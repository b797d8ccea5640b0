"""``Liveness``: a rank that dies tells nobody, so each leaves a beat in the job's store and looks after another one.

The ranks form a ring, in which each looks after the next one that has not left: as many notes are written and read per
rank, however many there are. A beat is a counter whose age is taken by the clock of the rank that looks, so that
the machines' clocks need not agree. On one machine a rank also sees at once that the other's process has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tdp_megatron.distributed.process_place import Condition, ProcessPlace
from tdp_megatron.distributed.progress import Progress

__all__ = ["Liveness"]

_LEFT = "left"
_SLOWEST_BEAT_SECONDS = 10.0
_LOOKS_PER_BEAT = 3
#: So much longer than a beat must silence be, whatever the deadline.
_BEATS_OF_SILENCE = 3
#: What a process wrote last may reach the store a little after its end.
_LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Beat:
    count: int
    step: int
    place: ProcessPlace

    @classmethod
    def parse(cls, note: str) -> _Beat:
        count, step, place = note.split(" ", 2)
        return cls(int(count), int(step), ProcessPlace.parse(place))

    def __str__(self) -> str:
        return f"{self.count} {self.step} {self.place}"


class Liveness:
    """The beats of this rank, and what it knows of the ranks it looks after; used by the watch's thread alone.

    Args:
        progress: the group's notes.
        rank: this process's place in the group.
        num_ranks: ranks in the group.
        timeout_s: how long another rank may give no sign of life, seconds.
    """

    def __init__(self, progress: Progress, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._progress = progress
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._here = ProcessPlace.of_this_process()
        # A process may watch a group again; its counter must not come to where it stood before.
        self._count = time.monotonic_ns()
        self._step = -1
        self._next_beat = 0.0
        self._next: tuple[int, _Beat] | None = None
        """The rank this one looks after, and its last beat."""
        self._first: tuple[int, _Beat] | None = None
        """The first of the neighbours on this machine of whom this rank is the last: their ring is closed here."""
        self._looked = 0.0
        self._silent_s = 0.0
        self._accused: int | None = None
        progress.acquit()  # who is still gone will be found again

    def look(self, step: int, interval_s: float) -> None:
        """Leave a beat when it is time or this rank has come further, and tell when a rank it looks after is gone.

        Args:
            step: where this rank is.
            interval_s: seconds between two calls.
        """
        now = time.monotonic()
        is_due = now >= self._next_beat or self._next is None
        if is_due or step != self._step:
            self._step = step
            self._count += 1
            self._progress.note_beat(str(_Beat(self._count, step, self._here)))
        if is_due:
            beat_s = max(_LOOKS_PER_BEAT * interval_s, min(self._timeout_s / 8, _SLOWEST_BEAT_SECONDS))
            self._next_beat = now + beat_s
            self._look_at_beat(now, beat_s)
            self._close_ring_of_machine()
        for other in (self._next, self._first):
            if other is not None and other[1].place.is_near(self._here):
                self._look_at_process(*other)

    def leave(self) -> None:
        """Note that this rank ends of its own accord; what it has told of another stays."""
        self._progress.note_beat(_LEFT)

    def _look_at_beat(self, now: float, beat_s: float) -> None:
        passed, self._looked = now - self._looked, now
        before, self._next = self._next, self._find_next()
        if self._next is None or self._next != before:
            self._silent_s = 0.0
            if self._next is not None and self._next[0] == self._accused:
                self._accused = None  # it was late, or stopped
                self._progress.acquit()
            return
        # A long time between two looks is this rank's own pause, and the other may have been stopped with it.
        self._silent_s += min(passed, 2 * beat_s)
        if self._silent_s > max(self._timeout_s, _BEATS_OF_SILENCE * beat_s):
            rank, beat = self._next
            condition = beat.place.condition(self._here)
            self._accuse(rank, beat, f"has given no sign of life for {self._silent_s:.0f} s", condition)

    def _find_next(self) -> tuple[int, _Beat] | None:
        """The next rank that has not left; None where it has not begun yet, or there is none."""
        for distance in range(1, self._num_ranks):
            rank = (self._rank + distance) % self._num_ranks
            note = self._progress.read_beat(rank)
            if note != _LEFT:
                return None if note is None else (rank, _Beat.parse(note))
        return None

    def _close_ring_of_machine(self) -> None:
        if self._next is None or self._next[1].place.is_near(self._here):
            self._first = None
            return
        while True:
            rank = ((self._rank if self._first is None else self._first[0]) - 1) % self._num_ranks
            note = None if rank == self._next[0] else self._progress.read_beat(rank)
            if note is None or note == _LEFT:
                return
            beat = _Beat.parse(note)
            if not beat.place.is_near(self._here):
                return
            self._first = rank, beat

    def _look_at_process(self, rank: int, beat: _Beat) -> None:
        if rank == self._accused or beat.place.condition(self._here) is not Condition.ENDED:
            return
        time.sleep(_LAST_WORDS_SECONDS)
        note = self._progress.read_beat(rank)
        if note is None or note == _LEFT:
            self._next = self._first = None  # found anew
            return
        last = _Beat.parse(note)
        if last.place == beat.place:
            self._accuse(rank, last, "is gone", Condition.ENDED)

    def _accuse(self, rank: int, beat: _Beat, what: str, condition: Condition) -> None:
        self._accused = rank
        where = "before its first step" if beat.step < 0 else f"last seen at step {beat.step}"
        place = f"pid {beat.place.pid} on {beat.place.host}"
        self._progress.accuse(rank, beat.step + 1, f"rank {rank} ({place}) {what}; {where}; {condition.value}")
