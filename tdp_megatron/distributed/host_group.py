"""``HostGroup``: ranks that swap host data, with a deadline and a memory of who got how far."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tdp_megatron.distributed.beats import Reached
from tdp_megatron.distributed.liveness import early_end
from tdp_megatron.distributed.ordered_group import new_ordered_group
from tdp_megatron.distributed.progress import Progress
from tdp_megatron.distributed.watch import Watch
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
        self._reached = Reached()
        self._watch: Watch | None = None
        self._is_closed = False

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.global_ranks)

    def begin_step(self, step: int) -> None:
        """Note for the other ranks that this one has begun ``step``, and watch for their failures."""
        self.note_step(step)
        self.watch("")

    def note_step(self, step: int) -> None:
        """Note for the other ranks that this one has begun ``step``."""
        self.step = self._reached.begun = step
        self._progress.begin(step)

    def explain_failure(self) -> tuple[str, bool]:
        """Why a collective failed, which takes seconds, and whether that is a cause some rank has told."""
        return self._progress.explain(self.step)

    def watch(self, teller: str) -> None:
        """See to it that this rank learns of the others' failures also where it meets them in no collective of ours.

        Nothing happens where there is no store to tell them through.

        Args:
            teller: who goes on; a cause it has told before is over.
        """
        self._progress.take_back(teller)
        alone = self.size == 1 or self._is_closed or not self._progress.has_store
        if not alone and (self._watch is None or not self._watch.is_running):
            self._watch = Watch(self._progress, self.rank, self.global_ranks, self.timeout_s, self._reached)
            # At the end of the interpreter it is told of errors, too.
            weakref.finalize(self, self._watch.stop).atexit = False
        self.note_use()

    def close(self) -> None:
        """Tell the other ranks that this one ends of its own accord, and look after them no more.

        The end of the interpreter and of the default process group say it as well; ``os._exit`` says nothing.
        """
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()

    def note_use(self, pipeline: str = "", step: int | None = None) -> None:
        """Note that the training loop has taken another step, and so is not stuck.

        Args:
            pipeline: what decides the order of its steps; empty where only messages need the step.
            step: which, where it is known.
        """
        if step is not None and pipeline:
            self._reached.come(pipeline, step)
        elif step is not None:
            self._reached.step = step
        if self._watch is not None:
            self._watch.came()

    def note_end(self, pipeline: str, step: int, teller: str = "") -> None:
        """Note that the data of a pipeline has no global batch ``step``, which holds for all ranks.

        The ranks do not wait for each other: who comes to the end first has nothing to compare with. See ``watch``.

        Args:
            pipeline: as for ``note_use``.
            step: number of the global batch.
            teller: who takes back that it ended too early; see ``watch``.

        Raises:
            ExchangeError: on another rank it ended earlier or later.
        """
        rank, at = self._progress.note_end(pipeline, self._reached.end(pipeline, step), step)
        if at == step:
            return
        (short, shorter), (_, longer) = sorted([(step, self.rank), (at, rank)])
        text = early_end(shorter, short, longer)
        self._progress.accuse(shorter, short, text, teller=teller)
        first = self._progress.read_cause()  # what the other ranks are told, or have told
        raise ExchangeError(text if first is None else first.text)

    def raise_if_told(self, step: int) -> None:
        """Raise when a rank has told that it cannot make ``step`` or an earlier one; costs nothing. See ``watch``.

        Raises:
            ExchangeError: with the first cause and the rank.
        """
        if self._watch is not None:
            self._watch.raise_if_told(step)

    @contextmanager
    def telling_failures(self, step: int, teller: str = "") -> Iterator[None]:
        """Let the other ranks, which will miss this one in their next collective, know why it left.

        Args:
            step: number of the global batch.
            teller: who fails, for ``watch``; the next ``begin_step`` takes back what nobody in particular has told.
        """
        try:
            yield
        except ExchangeError:  # the others know
            raise
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._progress.tell_cause(step, f"{type(error).__name__}: {error}", teller)
                if self._watch is not None:
                    self._watch.say_farewell()
            raise
