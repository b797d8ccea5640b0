"""Data runtime for LLM training: Megatron's sample order, DP x CP packing, exact resume."""

from __future__ import annotations

__version__ = "0.1.0"
