"""The few collectives the data runtime needs, with a deadline and errors that say which step broke."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.errors import ExchangeError
from tdp_megatron.ops.buffer_pool import BufferPool
from tdp_megatron.types import Int64Array

__all__ = ["all_gather_rows", "all_to_all_bytes", "broadcast_bytes", "gather_texts", "require_equal", "sum_int64"]

_POOL = BufferPool(8)


@contextmanager
def _named(host: HostGroup, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        late = "imed out" in str(error)
        how = f"did not complete within {host.timeout_s:g} s" if late else "was cut off"
        reason, is_cause = host.explain_failure()
        if is_cause:
            raise ExchangeError(f"{what} {how}: {reason}") from error
        remedy = "Raise timeout_s if a rank is only slow" if late else "Look at that rank's own first error"
        raise ExchangeError(
            f"{what} {how}: {reason}. {remedy}. Cause seen by rank {host.rank}: {str(error).splitlines()[0]}"
        ) from error


def all_gather_rows(host: HostGroup, row: npt.NDArray[np.int64], what: str) -> Int64Array:
    """Rows of equal size from all ranks, int64 [R, *row.shape].

    Raises:
        ExchangeError: a rank is gone or late.
    """
    gathered: Int64Array = _all_gather(host, np.ascontiguousarray(row), what)
    return gathered


def _all_gather(host: HostGroup, mine: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    # gloo's all-gather hands the rows on round a ring, and every hop wakes two threads; here all are sent at once.
    everywhere = torch.from_numpy(np.repeat(mine[None], host.size, axis=0))
    out = torch.empty_like(everywhere)
    with _named(host, what):
        dist.all_to_all_single(out, everywhere, group=host.group)
    return out.numpy()


def gather_texts(host: HostGroup, text: str, what: str) -> list[str]:
    """One text from every rank, by rank. For rare events: errors, a new schema."""
    data = text.encode()
    sizes = all_gather_rows(host, np.array([len(data)], dtype=np.int64), f"{what} (sizes)")[:, 0]
    longest = int(sizes.max())
    if not longest:
        return [""] * host.size
    rows = _all_gather(host, np.frombuffer(data.ljust(longest, b"\0"), dtype=np.uint8), what)
    return [rows[r, :size].tobytes().decode() for r, size in enumerate(sizes.tolist())]


def all_to_all_bytes(
    host: HostGroup, send: npt.NDArray[np.uint8], send_sizes: list[int], receive_sizes: list[int], what: str
) -> npt.NDArray[np.uint8]:
    """One all-to-all of uneven byte runs.

    Args:
        host: who takes part.
        send: uint8 [sum of send_sizes], the runs for rank 0, 1, ... one after the other.
        send_sizes: bytes for each rank.
        receive_sizes: bytes from each rank.
        what: how an error names this step.

    Returns:
        uint8 [sum of receive_sizes], by sending rank.

    Raises:
        ExchangeError: a rank is gone or late.
    """
    out: npt.NDArray[np.uint8] = _POOL.empty(sum(receive_sizes), np.uint8)
    received = torch.from_numpy(out)
    with _named(host, what):
        dist.all_to_all_single(received, torch.from_numpy(send), receive_sizes, send_sizes, group=host.group)
    return out


def broadcast_bytes(host: HostGroup, data: bytes | None, source: int, what: str) -> bytes:
    """The bytes that rank ``source`` of the group gives, on every rank.

    Args:
        host: who takes part.
        data: what to send; ignored on other ranks.
        source: the sender's place in the group.
        what: how an error names this step.

    Raises:
        ExchangeError: a rank is gone or late.
    """
    sends = host.rank == source
    if sends and data is None:
        raise ValueError("the source of a broadcast needs data")
    root = host.global_ranks[source]
    size = torch.tensor([len(data) if sends and data is not None else 0], dtype=torch.int64)
    with _named(host, what):
        dist.broadcast(size, root, group=host.group)
    if not int(size):
        return b""
    if sends and data is not None:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    with _named(host, what):
        dist.broadcast(buffer, root, group=host.group)
    return buffer.numpy().tobytes()


def sum_int64(host: HostGroup, value: int, what: str) -> int:
    """Sum of one integer over all ranks."""
    total = torch.tensor([value], dtype=torch.int64)
    with _named(host, what):
        dist.all_reduce(total, group=host.group)
    return int(total)


def require_equal(host: HostGroup, digest: str, what: str, configuration: Mapping[str, str] | None = None) -> None:
    """Compare a hexadecimal digest over all ranks.

    Args:
        host: who takes part.
        digest: of what the ranks must have alike; empty where this rank's data has ended.
        what: how an error names it.
        configuration: what the digest was made of, by name, as far as an error should tell in what the ranks differ;
            sent only then.

    Raises:
        ExchangeError: some rank has another digest, or its data has ended; the message names those ranks.
    """
    row = np.frombuffer(bytes.fromhex(digest)[:32].ljust(32, b"\0"), dtype=np.int64).copy()
    rows = all_gather_rows(host, row, f"comparing {what}")
    ended = [r for r in range(len(rows)) if not rows[r].any()]
    if 0 < len(ended) < len(rows):
        more = [r for r in range(len(rows)) if r not in ended]
        raise ExchangeError(
            f"comparing {what}: the data of ranks {ended} has ended, ranks {more} have more; give all ranks the same "
            "files, seed and number of samples"
        )
    different = [r for r in range(len(rows)) if not np.array_equal(rows[r], rows[0])]
    if different:
        shown = _different_configuration(host, configuration or {}, f"comparing {what}")
        raise ExchangeError(
            f"{what} differs between ranks: ranks {different} disagree with rank 0{shown}. All ranks need the same "
            "files, seed, weights and library version"
        )


def _different_configuration(host: HostGroup, mine: Mapping[str, str], what: str) -> str:
    """In what the first rank that differs from rank 0 does so; all ranks call it."""
    first = json.loads(broadcast_bytes(host, json.dumps(dict(mine)).encode(), 0, what))
    names = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
    shown = [f"{name} {mine.get(name, 'missing')} (rank 0: {first.get(name, 'missing')})" for name in names[:4]]
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more")
    texts = gather_texts(host, "; ".join(text[:200] for text in shown), what)
    rank = next((r for r, text in enumerate(texts) if text), None)
    return "" if rank is None else f"; rank {rank} has {texts[rank]}"
