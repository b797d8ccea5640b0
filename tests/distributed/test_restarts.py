"""What one start of a job has left in the store does not reach the next one."""

from __future__ import annotations

import itertools
import socket

import pytest

from tdp_megatron.distributed import rank_order, restart_store
from tdp_megatron.distributed.progress import Progress
from tdp_megatron.distributed.rank_order import run_in_rank_order
from tdp_megatron.errors import ExchangeError
from tdp_megatron.testing import run_ranks


def fail() -> None:
    raise OSError("disk gone")


@pytest.mark.distributed
def test_failures_of_an_earlier_start_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the store over restarts: here two starts with one store, in the processes' own eyes."""

    def body(rank: int, world: int) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        with pytest.raises((OSError, ExchangeError)):
            run_in_rank_order(fail, takes_part=True, what="the build")
        before = Progress([0, 1], rank, "group")
        before.begin(5)
        before.tell_cause(5, "disk gone")
        before.note_beat("1 5")
        before.explain(5)

        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        rank_order._calls = itertools.count()
        assert run_in_rank_order(lambda: "built", takes_part=True, what="the build") == "built"
        now = Progress([0, 1], rank, "group")
        if rank == 1:
            return ""
        assert before.read_beat(0) == "1 5"
        assert now.read_beat(0) is None
        return now.explain(2)[0]

    first, _ = run_ranks(body, 2)
    assert first == "rank 1 never began a step"


def test_each_restart_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE not set"):
        restart_store()
    monkeypatch.setenv("WORLD_SIZE", "1")
    first = restart_store()
    first.set("key", "old")
    assert restart_store().check(["key"])  # another store of the same start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not restart_store().check(["key"])
