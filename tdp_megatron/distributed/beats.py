"""What a rank leaves in the job's store about itself: that it lives, how far it has come, that it has left."""

from __future__ import annotations

from dataclasses import dataclass

from tdp_megatron.distributed.process_place import ProcessPlace

__all__ = ["Beat", "End", "Left", "Reached", "has_left"]

_LEFT = "left"
#: Pipelines whose ends a note holds.
_MOST_ENDS = 4
_NONE = "-"


@dataclass(frozen=True, slots=True)
class End:
    """The data of a pipeline has ended."""

    pipeline: str
    step: int
    """Number of its global batches."""


class Reached:
    """How far this rank has come; the training loop and threads that read ahead write, the watch's thread reads.

    A pipeline is known by what decides its order: ranks need not make theirs in the same sequence, or have as many.
    """

    def __init__(self) -> None:
        self.step = -1
        """The last one handed out, of whichever pipeline; -1 before the first."""
        self.begun = -1
        """The last one that was begun, perhaps ahead of the training loop."""
        self.most = 0
        """One more than the highest of them."""
        self._next: dict[str, int] = {}
        """The same by pipeline."""
        self._ends: dict[str, int] = {}
        self._num_ends: dict[str, int] = {}

    def come(self, pipeline: str, step: int) -> None:
        """Note that ``step`` of a pipeline is handed out."""
        self.step = step
        self.most = max(self.most, step + 1)
        self._next[pipeline] = max(self._next.get(pipeline, 0), step + 1)

    def end(self, pipeline: str, step: int) -> int:
        """Note that there is no global batch ``step``; how often the data had ended before."""
        self._ends.pop(pipeline, None)  # the latest come last
        self._ends[pipeline] = step
        count = self._num_ends.get(pipeline, 0)
        self._num_ends[pipeline] = count + 1
        return count

    @property
    def ends(self) -> tuple[End, ...]:
        """Where data has ended that has not gone on since."""
        steps = self._next.copy()
        ends = [End(*entry) for entry in self._ends.copy().items()]
        return tuple(end for end in ends if steps.get(end.pipeline, 0) <= end.step)[-_MOST_ENDS:]

    def beyond(self, ends: tuple[End, ...]) -> End | None:
        """Where another rank's data has ended, and this one's goes on."""
        steps = self._next.copy()
        return next((end for end in ends if steps.get(end.pipeline, 0) > end.step), None)


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank lives; the age of the counter is taken by the clock of the rank that looks."""

    count: int
    step: int
    ends: tuple[End, ...]
    place: ProcessPlace

    @classmethod
    def parse(cls, note: str) -> Beat:
        """From ``str`` of a beat."""
        count, step, ends, place = note.split(" ", 3)
        return cls(int(count), int(step), _parse_ends(ends), ProcessPlace.parse(place))

    def __str__(self) -> str:
        return f"{self.count} {self.step} {_join_ends(self.ends)} {self.place}"


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has left of its own accord."""

    most: int
    """One more than the highest step it was given; 0 before the first, or where that is unknown; -1 where the others
    may go on without it."""
    ends: tuple[End, ...]
    place: ProcessPlace

    @classmethod
    def parse(cls, note: str) -> Left:
        """From ``str`` of it."""
        _, most, ends, place = note.split(" ", 3)
        return cls(int(most), _parse_ends(ends), ProcessPlace.parse(place))

    def __str__(self) -> str:
        return f"{_LEFT} {self.most} {_join_ends(self.ends)} {self.place}"

    def describe(self, rank: int) -> str:
        """Who it is, and how far it came where that is known."""
        where = f" after step {self.most - 1}" if self.most > 0 else ""
        return f"rank {rank} (pid {self.place.pid} on {self.place.host}) left{where}, without an uncaught error"


def has_left(note: str) -> bool:
    """Whether it is the note of a rank that has left."""
    return note.startswith(_LEFT)


def _join_ends(ends: tuple[End, ...]) -> str:
    return ",".join(f"{end.pipeline}:{end.step}" for end in ends) or _NONE


def _parse_ends(note: str) -> tuple[End, ...]:
    words = [] if note == _NONE else [word.split(":") for word in note.split(",")]
    return tuple(End(pipeline, int(step)) for pipeline, step in words)
