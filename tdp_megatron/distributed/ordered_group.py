"""Process groups that their members alone make, whatever other groups each of them belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tdp_megatron.distributed.restarts import attempt_name
from tdp_megatron.errors import ExchangeError

__all__ = ["default_store", "new_ordered_group"]

#: Per job (its default group), how often this process has made a group of the same ranks.
_MADE: WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = WeakKeyDictionary()
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def new_ordered_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A process group whose i-th rank is ``ranks[i]``; only its members call this, each in the same order.

    Args:
        ranks: torch.distributed ranks in any order.
        **options: of ``torch.distributed.new_group``.

    Raises:
        ExchangeError: some of them have not called this within the time-out; the message names them.
    """
    if list(ranks) != sorted(ranks):
        options["sort_ranks"] = False  # torch sorts by default, which would renumber the members
    with _one_name(tuple(ranks), options.get("timeout") or _DEFAULT_TIMEOUT):
        group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def default_store() -> Store | None:
    """The job's key-value store, with keys of this start of the job; None where torch does not show it."""
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    store = None if get_store is None else get_store()
    return None if store is None else PrefixStore(f"tdp_megatron/{attempt_name()}", store)


@contextmanager
def _one_name(ranks: tuple[int, ...], timeout: timedelta) -> Iterator[None]:
    """Make torch find the same name for the next group of ``ranks`` on all of them.

    torch 2.13 names a group that its members alone make after their ranks and after the number of groups each process
    has. Members that belong to different numbers of groups, as the stages of a pipeline do, would wait for each other
    under different names. Those with fewer make groups of their own until all have as many.
    """
    store = default_store()
    names = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None)
    if store is None or names is None or len(ranks) == 1:
        yield
        return
    made = _MADE.setdefault(dist.group.WORLD, {})
    made[ranks] = made.get(ranks, 0) + 1
    me = dist.get_rank()
    store = PrefixStore(f"groups/{'_'.join(map(str, ranks))}/{made[ranks]}", store)
    store.set(str(me), str(len(names)))
    if me == ranks[0]:
        # One member reads them all: as many reads by every member would be too much for a store of a thousand ranks.
        keys = [str(rank) for rank in ranks]
        _await(store, keys, timeout, ranks)
        store.set("most", str(max(int(count) for count in store.multi_get(keys))))
    _await(store, ["most"], timeout, ranks)
    fillers = [
        dist.new_group([me], use_local_synchronization=True, backend="gloo")
        for _ in range(int(store.get("most")) - len(names))
    ]
    try:
        yield
    finally:
        for filler in fillers:
            dist.destroy_process_group(filler)


def _await(store: Store, keys: list[str], timeout: timedelta, ranks: tuple[int, ...]) -> None:
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        absent = [rank for rank in ranks if not store.check([str(rank)])]
        if not absent:
            raise
        raise ExchangeError(
            f"making a process group of the ranks {list(ranks)}: ranks {absent} did not come within "
            f"{timeout.total_seconds():g} s. Look at their own first errors"
        ) from error
