"""``Liveness``: a rank that dies tells nobody, so each leaves a beat in the job's store and looks after another one.

The ranks form a ring, in which each looks after the next one that has not left: as many notes are written and read per
rank, however many there are. A beat is a counter whose age is taken by the clock of the rank that looks, so that
the machines' clocks need not agree. On one machine a rank also sees at once that the other's process has ended.
"""

from __future__ import annotations

import time

from tdp_megatron.distributed.beats import Beat, End, Left, Reached, has_left
from tdp_megatron.distributed.process_place import Condition, ProcessPlace
from tdp_megatron.distributed.progress import Progress

__all__ = ["Liveness", "early_end"]

_SLOWEST_BEAT_SECONDS = 10.0
_LOOKS_PER_BEAT = 3
#: So much longer than a beat must silence be, whatever the deadline.
_BEATS_OF_SILENCE = 3
#: What a process wrote last may reach the store a little after its end.
_LAST_WORDS_SECONDS = 0.2


class Liveness:
    """The beats of this rank, and what it knows of the ranks it looks after; used by the watch's thread alone.

    Args:
        progress: the group's notes.
        rank: this process's place in the group.
        num_ranks: ranks in the group.
        timeout_s: how long another rank may give no sign of life, seconds.
        reached: how far this rank has come.
    """

    def __init__(self, progress: Progress, rank: int, num_ranks: int, timeout_s: float, reached: Reached) -> None:
        self._progress = progress
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._here = ProcessPlace.of_this_process()
        # A process may watch a group again; its counter must not come to where it stood before.
        self._count = time.monotonic_ns()
        self._reached = reached
        self._told: tuple[int, tuple[End, ...]] = -1, ()
        """Step and ends of the last beat."""
        self._next_beat = 0.0
        self._next: tuple[int, Beat] | None = None
        """The rank this one looks after, and its last beat."""
        self._first: tuple[int, Beat] | None = None
        """The first of the neighbours on this machine of whom this rank is the last: their ring is closed here."""
        self._looked = 0.0
        self._silent_s = 0.0
        self._accused: int | None = None
        self._missed: set[int] = set()
        """Ranks that do not make a step which this one has come to."""
        progress.acquit()  # who is still gone will be found again

    def look(self, interval_s: float, *, at_once: bool = False) -> None:
        """Leave a beat when it is time or this rank has come further, and tell when a rank it looks after is gone.

        Args:
            interval_s: seconds between two calls.
            at_once: look at the others' beats although it is not yet time.
        """
        now = time.monotonic()
        is_due = at_once or now >= self._next_beat or self._next is None
        told = self._reached.step, self._reached.ends
        if is_due or told != self._told:
            self._told = told
            self._count += 1
            self._progress.note_beat(str(Beat(self._count, *told, self._here)))
        if is_due:
            beat_s = max(_LOOKS_PER_BEAT * interval_s, min(self._timeout_s / 8, _SLOWEST_BEAT_SECONDS))
            self._next_beat = now + beat_s
            self._look_at_beat(now, beat_s)
            self._close_ring_of_machine()
        for other in (self._next, self._first):
            if other is not None and other[1].place.is_near(self._here):
                self._look_at_process(*other)

    def leave(self, *, is_missed: bool) -> None:
        """Note that this rank ends of its own accord; what it has told of another stays.

        Args:
            is_missed: whether the others cannot go further than this rank has come.
        """
        most, ends = (self._reached.most, self._reached.ends) if is_missed else (-1, ())
        note = str(Left(most, ends, self._here))
        self._progress.note_beat(note)
        if is_missed:
            self._progress.note_left(note)

    def _look_at_beat(self, now: float, beat_s: float) -> None:
        passed, self._looked = now - self._looked, now
        before, self._next = self._next, self._find_next()
        if self._next is not None:
            self._compare(*self._next)
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

    def _find_next(self) -> tuple[int, Beat] | None:
        """The next rank that has not left; None where it has not begun yet, or there is none."""
        for distance in range(1, self._num_ranks):
            rank = (self._rank + distance) % self._num_ranks
            note = self._progress.read_beat(rank)
            if note is None:
                return None
            if not has_left(note):
                return rank, Beat.parse(note)
            self._compare(rank, Left.parse(note))
        return None

    def _compare(self, rank: int, note: Beat | Left) -> None:
        """Tell when this rank has come to a step that the other will not make."""
        end = self._reached.beyond(note.ends)
        if end is not None:
            step, text = end.step, early_end(rank, end.step, self._rank)
        elif isinstance(note, Left) and 0 <= note.most < self._reached.most:
            step, text = note.most, f"{note.describe(rank)}, and rank {self._rank} has come to step {note.most}"
        elif rank in self._missed:  # it goes on after all
            self._missed.discard(rank)
            self._progress.take_back(_missing(rank))
            return
        else:
            return
        if rank not in self._missed:
            self._missed.add(rank)
            self._progress.accuse(rank, step, text, teller=_missing(rank))

    def _close_ring_of_machine(self) -> None:
        if self._next is None or self._next[1].place.is_near(self._here):
            self._first = None
            return
        while True:
            rank = ((self._rank if self._first is None else self._first[0]) - 1) % self._num_ranks
            note = None if rank == self._next[0] else self._progress.read_beat(rank)
            if note is None or has_left(note):
                return
            beat = Beat.parse(note)
            if not beat.place.is_near(self._here):
                return
            self._first = rank, beat

    def _look_at_process(self, rank: int, beat: Beat) -> None:
        if rank == self._accused or beat.place.condition(self._here) is not Condition.ENDED:
            return
        time.sleep(_LAST_WORDS_SECONDS)
        note = self._progress.read_beat(rank)
        if note is None or has_left(note):
            self._next = self._first = None  # found anew
            return
        last = Beat.parse(note)
        if last.place == beat.place:
            self._accuse(rank, last, "is gone", Condition.ENDED)

    def _accuse(self, rank: int, beat: Beat, what: str, condition: Condition) -> None:
        self._accused = rank
        where = "before its first step" if beat.step < 0 else f"last seen at step {beat.step}"
        place = f"pid {beat.place.pid} on {beat.place.host}"
        text = f"rank {rank} ({place}) {what}; {where}; {condition.value}"
        self._progress.accuse(rank, beat.step + 1, text, silent_s=self._silent_s)


def early_end(rank: int, num_batches: int, longer: int) -> str:
    """What is said when the data of a rank ends before that of another."""
    return (
        f"the data of rank {rank} ended after {num_batches} global batches, that of rank {longer} has more; "
        "give all ranks the same files, seed and number of samples"
    )


def _missing(rank: int) -> str:
    return f"rank {rank} is missing"
