"""Helpers for tests of nodes and of what runs on several ranks."""

from __future__ import annotations

from tdp_megatron.testing.conformance import check_resume_at_every_step
from tdp_megatron.testing.corpora import write_corpus
from tdp_megatron.testing.fork import RankFailure, RanksFailedError, run_ranks

__all__ = ["RankFailure", "RanksFailedError", "check_resume_at_every_step", "run_ranks", "write_corpus"]
