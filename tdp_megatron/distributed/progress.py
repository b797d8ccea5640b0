"""Who is missing when a collective fails: every rank notes in the store which step it has begun, and that it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore

from tdp_megatron.distributed.ordered_group import default_store

__all__ = ["Cause", "Progress"]

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
    number: int
    """How many causes the rank had told before: one that is taken back and told again is another."""


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
            step: number of the global batch.
            cause: the error.
            teller: who takes it back; there may be several pipelines, of which one goes on while another has failed.
        """
        with self._telling:
            if teller not in self._told:
                text = f"rank {self._rank} failed in step {step}: {cause}"
                text = text.encode(errors="backslashreplace").decode()  # it may hold the name of a file
                self._told[teller] = f"{self._rank} {step} {self._number}\n{text}"
                self._number += 1
            self._replace_cause("", self._told[teller])

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
        rank, step, number = map(int, place.split())
        return Cause(rank, step, text, number)

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
        while silent and time.monotonic() < deadline:
            cause = self.read_cause()
            if cause is not None:
                return cause.text, True
            silent = [r for r in silent if self._get(f"failed/{r}") is None]
            if silent:
                time.sleep(_POLL_SECONDS)
        if not silent:
            return "all ranks report the failure, so that the connection broke", False
        return "; ".join(self._describe(r, step) for r in silent), False

    def _describe(self, rank: int, step: int) -> str:
        begun = self._get(f"begun/{rank}")
        if begun is None:
            return f"rank {rank} never began a step"
        if int(begun) < step:
            return f"rank {rank} is missing: it began step {begun}, not step {step}"
        return f"rank {rank} vanished in step {begun}"

    def _replace_cause(self, note: str, by: str) -> None:
        """Note another first cause, or none, if ``note`` is still the first."""
        store = self._store
        try:
            if store is not None:
                store.compare_set("first_cause", note, by)  # "" also stands for a key that was never set
        except RuntimeError:
            self._store = None

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

    def _get(self, key: str) -> str | None:
        store = self._store
        try:
            return store.get(key).decode() if store is not None and store.check([key]) else None
        except RuntimeError:
            self._store = None
            return None


def _confirmed(cause: Cause) -> str:
    return f"confirmed/{cause.rank}/{cause.number}"
