"""Who is missing when a collective fails: every rank notes in the store which step it has begun, and that it failed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore

from tdp_megatron.distributed.ordered_group import default_store

__all__ = ["Progress"]

#: How long a failed rank waits for the others to say that they failed, too.
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05


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
        self._told = 0
        """Causes told and not yet taken back."""

    def begin(self, step: int) -> None:
        """Note that this rank has begun a step; a cause it told before is over, then."""
        if self._told:
            self._add_to_causes(-self._told)
            self._told = 0
            self._set("first_cause", "")
        self._set(f"begun/{self._rank}", str(step))

    def tell_cause(self, step: int, cause: str) -> None:
        """Note why this rank cannot go on with ``step``; the first cause noted is the one all ranks are told."""
        self._told += 1
        if self._add_to_causes(1) == 1:
            self._set("first_cause", f"rank {self._rank} failed in step {step}: {cause}")

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
            cause = self._get("first_cause")
            if cause:
                return cause, True
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

    def _add_to_causes(self, count: int) -> int:
        if self._store is None:
            return 0
        try:
            return int(self._store.add("causes", count))
        except RuntimeError:
            self._store = None
            return 0

    def _set(self, key: str, value: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(key, value)
        except RuntimeError:  # the store went with its host; the collective's own error is still to come
            self._store = None

    def _get(self, key: str) -> str | None:
        if self._store is None:
            return None
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            self._store = None
            return None
