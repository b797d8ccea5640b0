"""Helpers for tests of nodes and of what runs on several ranks."""

from __future__ import annotations

from tdp_megatron.testing.fork import RankFailure, RanksFailedError, run_ranks

__all__ = ["RankFailure", "RanksFailedError", "run_ranks"]
