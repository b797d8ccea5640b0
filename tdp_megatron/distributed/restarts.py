"""torchrun's restarts: one store serves them all, so what one start wrote must not be read by the next."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

__all__ = ["attempt_name", "restart_store"]


def attempt_name() -> str:
    """Names this start of the job among the restarts that share a store; the same on all its ranks."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    return "-".join(os.environ.get(name, "0") for name in names)


def restart_store(timeout_s: float = 600.0) -> Store:
    """The store to give to ``init_process_group``, with keys of its own for every restart.

    torch 2.13 keeps the store from one restart to the next. Process groups then find the addresses of ranks that are
    gone, and connecting to them fails now and then, or takes minutes.

    Args:
        timeout_s: how long reading a key waits for it, seconds.

    Returns:
        For ``init_process_group(..., store=store, rank=..., world_size=...)`` under torchrun.

    Raises:
        ValueError: torchrun has not set RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set in the environment; start with torchrun")
    timeout = timedelta(seconds=timeout_s)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(attempt_name(), store)
