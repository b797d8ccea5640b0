"""Who is missing when a collective fails: every rank notes in the store which step it has begun, and that it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore

from tdp_megatron.distributed.beats import has_left
from tdp_megatron.distributed.ordered_group import default_store

__all__ = ["Cause", "Progress"]

#: Who tells that another rank is gone.
_LIVENESS = "liveness"
#: How long a failed rank waits for the others to say that they failed, too.
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a rank failed."""

    rank: int
    """Its place in the group."""
    step: int
    text: str
    """The rank, the step and the error."""
    told_by: int
    """The rank itself, or one that has found it gone."""
    number: int
    """How many causes ``told_by`` had told before: one that is taken back and told again is another."""
    silent_s: int = -1
    """For how long the rank had given no sign of life, seconds; -1 where it was not found by that."""


class Progress:
    """Notes of the ranks of one group, kept in the job's store.

    Args:
        ranks: torch.distributed ranks of the group, in the group's order.
        rank: this process's place among them.
        name: of the group, the same on all its ranks and different from other groups'.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self._count = len(ranks)
        self._rank = rank
        # Without a store errors only lose the rank's number.
        store = default_store()
        self._store = None if store is None else PrefixStore(name, store)
        self._told: dict[str, str] = {}
        """Notes of causes told and not yet taken back, by who told them."""
        self._number = 0
        self._beating: set[int] = set()
        # Or a watch could tell again what is being taken back.
        self._telling = threading.Lock()

    @property
    def has_store(self) -> bool:
        """Whether notes can be left; not without a default process group, nor when the store is gone."""
        return self._store is not None

    def begin(self, step: int) -> None:
        """Note that this rank has begun a step; what it told as nobody in particular is over, then."""
        self.take_back()
        self._set(f"begun/{self._rank}", str(step))

    def tell_cause(self, step: int, cause: str, teller: str = "") -> None:
        """Note why this rank cannot go on with ``step``; the first cause noted is the one all ranks are told.

        Args:
            step: number of the global batch; negative before the first.
            cause: the error.
            teller: who takes it back; there may be several pipelines, of which one goes on while another has failed.
        """
        where = "before its first step" if step < 0 else f"in step {step}"
        self._tell(teller, self._rank, step, f"rank {self._rank} failed {where}: {cause}")

    def accuse(self, rank: int, step: int, text: str, *, teller: str = _LIVENESS, silent_s: float = -1.0) -> None:
        """Note that another rank is gone and cannot make ``step``.

        Args:
            rank: which.
            step: number of the global batch.
            text: what all ranks are told.
            teller: who takes it back; ``acquit`` does unless it is named.
            silent_s: for how long it has given no sign of life, seconds; negative where it was not found by that.
        """
        self._tell(teller, rank, step, text, int(silent_s))

    def acquit(self) -> None:
        """Take back that another rank is gone."""
        self.take_back(_LIVENESS)

    def take_back(self, teller: str = "") -> None:
        """Note that ``teller`` goes on after all; where it has told no cause, nothing is sent."""
        with self._telling:
            note = self._told.pop(teller, None)
            if note is not None:
                self._replace_cause(note, next(iter(self._told.values()), ""))

    def tell_again(self) -> None:
        """Note what this rank has told and not taken back, where another's cause came first and has been taken back."""
        if self._told:
            with self._telling:
                for note in self._told.values():
                    self._replace_cause("", note)

    def read_cause(self) -> Cause | None:
        """The first cause, when some rank has told one."""
        note = self._get("first_cause")
        if not note:
            return None
        place, text = note.split("\n", 1)
        rank, step, told_by, number, silent_s = map(int, place.split())
        return Cause(rank, step, text, told_by, number, silent_s)

    def note_end(self, pipeline: str, count: int, step: int) -> tuple[int, int]:
        """Note that there is no global batch ``step``; the first rank that came to its end, and the step it noted.

        Args:
            pipeline: whose data it is.
            count: how often the data had ended before.
            step: number of the global batch.
        """
        first = self._compare_set(f"ended/{pipeline}/{count}", "", f"{self._rank} {step}")
        rank, at = map(int, (first or f"{self._rank} {step}").split())
        return rank, at

    def note_beat(self, note: str) -> None:
        """Note that this rank lives, or has left."""
        self._set(f"beat/{self._rank}", note)

    def note_left(self, note: str) -> None:
        """Note that this rank has left; the first one is remembered, for ranks that do not look after it."""
        self._compare_set("first_left", "", f"{self._rank} {note}")

    def read_left(self) -> tuple[int, str] | None:
        """The first rank that has left, and its note; None where there is none, or it is this one."""
        rank, _, note = (self._get("first_left") or "").partition(" ")
        return None if not note or int(rank) == self._rank else (int(rank), note)

    def read_beat(self, rank: int) -> str | None:
        """What the rank has noted last; None where it has not begun."""
        note = self._get(f"beat/{rank}", is_there=rank in self._beating)
        if note is not None:
            self._beating.add(rank)
        return note

    def confirm_cause(self, cause: Cause) -> None:
        """Note that this rank knows the cause."""
        self._add(_confirmed(cause), 1)

    def await_confirmations(self, num_ranks: int, timeout_s: float) -> bool:
        """Wait until that many ranks have confirmed the first cause, or the time is over.

        Returns:
            Whether they have.
        """
        deadline = time.monotonic() + timeout_s
        while self.has_store:
            cause = self.read_cause()
            if cause is not None and self._add(_confirmed(cause), 0) >= num_ranks:
                return True
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return False

    def explain(self, step: int) -> tuple[str, bool]:
        """Note that this rank failed in ``step``, and say why: the first cause, or who did not get there or vanished.

        Returns:
            The reason, and whether it is a cause some rank has told.
        """
        self._set(f"failed/{self._rank}", str(step))
        if self._store is None:
            return "which rank is missing is unknown", False
        deadline = time.monotonic() + _GRACE_SECONDS
        silent = list(range(self._count))
        cause: Cause | None = None
        while silent and time.monotonic() < deadline:
            cause = self.read_cause()
            if cause is not None and cause.told_by == cause.rank:
                return cause.text, True
            silent = [r for r in silent if self._get(f"failed/{r}") is None]
            if cause is not None and silent == [cause.rank]:
                break
            if silent:
                time.sleep(_POLL_SECONDS)
        if cause is not None:
            return f"{self._describe(cause.rank, step)}; {cause.text}", True
        if not silent:
            return "all ranks report the failure, so that the connection broke", False
        return "; ".join(self._describe(r, step) for r in silent), False

    def _describe(self, rank: int, step: int) -> str:
        begun = self._get(f"begun/{rank}")
        if has_left(self._get(f"beat/{rank}") or ""):
            where = "before it began a step" if begun is None else f"having begun step {begun}"
            return f"rank {rank} left of its own accord, {where}"
        if begun is None:
            return f"rank {rank} never began a step"
        if int(begun) < step:
            return f"rank {rank} is missing: it began step {begun}, not step {step}"
        return f"rank {rank} vanished in step {begun}"

    def _tell(self, teller: str, rank: int, step: int, text: str, silent_s: int = -1) -> None:
        with self._telling:
            if teller not in self._told:
                text = text.encode(errors="backslashreplace").decode()  # it may hold the name of a file
                self._told[teller] = f"{rank} {step} {self._rank} {self._number} {silent_s}\n{text}"
                self._number += 1
            self._replace_cause("", self._told[teller])

    def _replace_cause(self, note: str, by: str) -> None:
        """Note another first cause, or none, if ``note`` is still the first."""
        self._compare_set("first_cause", note, by)

    def _compare_set(self, key: str, expected: str, value: str) -> str:
        """Set ``key`` if it holds what is expected; what it holds then, empty where that is unknown.

        Args:
            key: of the store.
            expected: empty also stands for a key that was never set.
            value: what to set.
        """
        store = self._store
        try:
            held = None if store is None else store.compare_set(key, expected, value)
        except RuntimeError:
            self._store = held = None
        return held.decode() if isinstance(held, bytes) else str(held or "")

    def _add(self, key: str, count: int) -> int:
        store = self._store  # another thread may find it gone meanwhile
        try:
            return 0 if store is None else int(store.add(key, count))
        except RuntimeError:  # the store went with its host; the collective's own error is still to come
            self._store = None
            return 0

    def _set(self, key: str, value: str) -> None:
        store = self._store
        try:
            if store is not None:
                store.set(key, value)
        except RuntimeError:
            self._store = None

    def _get(self, key: str, *, is_there: bool = False) -> str | None:
        """The value; None where there is none, for which the store is asked first unless ``is_there``."""
        store = self._store
        try:
            return store.get(key).decode() if store is not None and (is_there or store.check([key])) else None
        except RuntimeError:
            self._store = None
            return None


def _confirmed(cause: Cause) -> str:
    return f"confirmed/{cause.told_by}/{cause.number}"
