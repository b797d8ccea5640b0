"""Whether the job's store is gone, or only one connection to it."""

from __future__ import annotations

import os
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["lost_store"]

_CONNECT_SECONDS = 5.0


def lost_store(store: Store) -> str | None:
    """Say who is gone with the store; None where it still takes connections, or is held by no process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    try:
        with socket.create_connection((store.host, store.port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as error:
        holder = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "the process of rank 0"
        return f"the job's store at {store.host}:{store.port} is gone, and with it {holder} ({error})"
