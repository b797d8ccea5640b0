"""What the adapters refuse: ranks that cannot read or stand elsewhere, and states that are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tdp_megatron.distributed import Exchange
from tdp_megatron.errors import ExchangeError, ScheduleError, StateMismatchError, TdpError
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.types import Int64Array

__all__ = [
    "MOVED",
    "SAME_PLACE",
    "check_goes_on",
    "check_handed",
    "check_moves",
    "check_reader",
    "check_share",
    "check_state",
    "different_content",
    "naming_the_longest",
]

MOVED = "all ranks must call skip_to, skip and load_state_dict alike; one that was handed its data has not"
SAME_PLACE = "give all ranks the same num_microbatches, consumed_samples, skip_samples, skip_to and skip"


def check_reader(data_iterator: Any, groups: LoopGroups) -> None:
    """Refuse what a rank that reads cannot read from.

    Raises:
        ValueError: it has no data iterator.
        TypeError: it has something that is no iterator.
    """
    if not groups.reads:
        return
    if data_iterator is None:
        raise ValueError(
            f"TP rank {groups.tp_rank} of pipeline stage {groups.pp_rank} reads data; its data_iterator is None"
        )
    if not hasattr(data_iterator, "__next__"):
        raise TypeError(
            f"data_iterator must be an iterator, got {type(data_iterator).__name__}; give iter() of it, made once, "
            "since every iter() begins anew"
        )


def check_goes_on(failure: Exception | None) -> None:
    """Refuse to move where there is no next step.

    Raises:
        ValueError: the data has ended.
        Exception: the failure that has ended the steps.
    """
    if isinstance(failure, StopIteration):
        raise ValueError("the data has ended; to go on, load a saved state")
    if failure is not None:
        raise failure


def check_moves(step: int, moves_there: int, moves_here: int) -> None:
    """Refuse what a rank hands on that was moved another number of times.

    Raises:
        ExchangeError: this rank would be some steps before or behind.
    """
    if moves_there != moves_here:
        raise ExchangeError(f"step {step}: {MOVED}")


def check_handed(step: int, end_there: int, end_here: int | None, num_microbatches: int, groups: LoopGroups) -> None:
    """Refuse a global batch that ends elsewhere than this rank, which is handed it, expects.

    Raises:
        ExchangeError: ranks were given another number of microbatches.
    """
    if end_there != end_here:
        raise ExchangeError(
            f"step {step}: the rank that reads the data takes samples up to {end_there}; TP rank "
            f"{groups.tp_rank} of pipeline stage {groups.pp_rank} expects {end_here}, with num_microbatches "
            f"{num_microbatches}; {SAME_PLACE}"
        )


def check_share(data_iterator: Any, groups: LoopGroups) -> None:
    """Refuse a graph of our nodes that deals its order out to another number of ranks than read it.

    Raises:
        ValueError: some samples would be read by nobody, or by several.
    """
    node, shares = getattr(data_iterator, "root", None), 1
    while groups.reads and node is not None:
        # By name: this package's nodes are not loaded for loops that use none.
        is_shard = type(node).__name__ == "Shard" and type(node).__module__.startswith("tdp_megatron.")
        shares *= node.num_ranks if is_shard else 1
        node = getattr(node, "source", None)
    if shares not in (1, groups.layout.dp):
        raise ValueError(
            f"the Shard of the data iterator deals samples out to {shares} ranks, but {groups.layout.dp} data-parallel "
            f"ranks read them; give it num_ranks={groups.layout.dp} and the data-parallel rank"
        )


def check_state(state: Any, version: int, counts: tuple[str, ...]) -> None:
    """Refuse what is no saved state.

    Raises:
        StateMismatchError: it is no mapping, of another version, or one of ``counts`` is missing or no count.
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(f"a saved state is a mapping, found {type(state).__name__}")
    if state.get("version") != version:
        raise StateMismatchError(f"saved state has version {state.get('version')!r}, expected {version}")
    for name in counts:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StateMismatchError(f"saved state: {name} must be a number from 0 up, found {value!r}")


@contextmanager
def naming_the_longest(step: int, seqlens: Int64Array, refs: Int64Array) -> Iterator[None]:
    """Say in a ``ScheduleError`` whose sample the longest sequence is: its number in the plan helps nobody to find it.

    Args:
        step: number of the global batch.
        seqlens: int64 [N], tokens.
        refs: int64 [N, 2], (dp_rank that read the sample, its number there).
    """
    try:
        yield
    except ScheduleError as error:
        where = ""
        if len(seqlens):
            longest = int(np.argmax(seqlens))
            dp_rank, number = refs[longest].tolist()
            where = (
                f" (the longest, sequence {longest}, is sample {number} of this step on data-parallel rank {dp_rank})"
            )
        raise ScheduleError(f"step {step}: {error}{where}") from error


def different_content(step: int, exchange: Exchange | None) -> TdpError:
    """The error of pipeline stages that have read different samples, told to the data-parallel ranks of this stage.

    Args:
        step: number of the global batch.
        exchange: of a stage that reads.
    """
    error = TdpError(
        f"step {step}: the first and the last pipeline stage read samples of other lengths or tokens, and labels would "
        "not belong to their tokens; give both the same data in the same order, with the same seed"
    )
    if exchange is not None:
        # They may find nothing wrong in what they hold themselves.
        with suppress(TdpError), exchange.host.telling_failures(step):
            raise error
    return error
