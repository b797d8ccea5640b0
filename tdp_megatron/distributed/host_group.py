"""``HostGroup``: ranks that swap host data, with a deadline and a memory of who got how far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tdp_megatron.distributed.ordered_group import new_ordered_group
from tdp_megatron.distributed.progress import Progress
from tdp_megatron.errors import ExchangeError

__all__ = ["HostGroup"]


class HostGroup:
    """A gloo group of its own for the data runtime; its collectives run in step order from one thread.

    Token bytes are host data whatever the default backend is, and a background thread's collectives must never mix
    with the training loop's. All members make it with the same arguments, in the same order among their groups.

    Args:
        global_ranks: torch.distributed ranks in the group's order.
        timeout_s: deadline of each collective, seconds.
    """

    def __init__(self, global_ranks: Sequence[int], timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.global_ranks = tuple(global_ranks)
        self.rank = self.global_ranks.index(dist.get_rank())
        """This process's place in the group."""
        self.timeout_s = timeout_s
        self.group = new_ordered_group(self.global_ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        self.step = 0
        """Step the group is in, for messages."""
        self._progress = Progress(self.global_ranks, self.rank, self.group.group_name)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.global_ranks)

    def begin_step(self, step: int) -> None:
        """Note for the other ranks that this one has begun ``step``."""
        self.step = step
        self._progress.begin(step)

    def explain_failure(self) -> tuple[str, bool]:
        """Why a collective failed, which takes seconds, and whether that is a cause some rank has told."""
        return self._progress.explain(self.step)

    @contextmanager
    def telling_failures(self, step: int) -> Iterator[None]:
        """Let the other ranks, which will miss this one in their next collective, know why it left."""
        try:
            yield
        except ExchangeError:  # the others know
            raise
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._progress.tell_cause(step, f"{type(error).__name__}: {error}")
            raise
