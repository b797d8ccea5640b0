"""What a scheduler is given: lengths, layout, cost model, execution mode and limits, all checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["Limits", "Mode", "Problem", "check_fits", "check_seqlens", "pack_token_cap"]

_MODE_NAMES = ("free", "lockstep", "barrier", "pipeline")
_MODE = re.compile(r"(\w+)(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?")
#: What a bare "pipeline" means: the smallest depth at which bubbles matter.
_DEFAULT_STAGES = 4


@dataclass(frozen=True, slots=True)
class Mode:
    """How ranks wait for each other, which decides what a step costs."""

    name: str
    """``free``: only ranks of one microbatch wait for each other. ``lockstep``: all ranks wait at every microbatch
    (expert parallelism, FSDP). ``barrier``: all wait at the end of each group of microbatches. ``pipeline``: each
    rank is the head of a pipeline."""
    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Virtual stages per rank (interleaved schedule)."""

    def __post_init__(self) -> None:
        if self.name not in _MODE_NAMES:
            raise ValueError(f"mode must be one of {', '.join(_MODE_NAMES)}, got {self.name!r}")
        for name in ("stages", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def needs_equal_count(self) -> bool:
        """Whether a rank with fewer microbatches than another would hang the others."""
        return self.name in ("lockstep", "pipeline")

    @staticmethod
    def parse(mode: str | Mode) -> Mode:
        """``"free"``, ``"lockstep"``, ``"barrier"``, ``"pipeline(stages)"`` or ``"pipeline(stages, virtual)"``.

        A bare ``"pipeline"`` has 4 stages.
        """
        if isinstance(mode, Mode):
            return mode
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a str or Mode, got {type(mode).__name__}")
        match = _MODE.fullmatch(mode.strip())
        if match is None or (match[2] is not None and match[1] != "pipeline"):
            raise ValueError(
                f"mode must be one of {', '.join(_MODE_NAMES)}, or pipeline(stages[, virtual]), got {mode!r}"
            )
        stages = int(match[2]) if match[2] else (_DEFAULT_STAGES if match[1] == "pipeline" else 1)
        return Mode(match[1], stages, int(match[3] or 1))


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints on a plan beyond the token cap."""

    equal_count: bool = False
    """The same number of microbatches on every rank; dummy packs fill up."""
    microbatches_multiple: int = 1
    """Microbatches of every rank are a multiple of this (virtual pipeline groups)."""
    max_sequences_per_microbatch: int = 0
    """Most sequences in one microbatch; 0 means no limit."""

    def __post_init__(self) -> None:
        if not isinstance(self.equal_count, (bool, np.bool_)):
            raise TypeError(f"equal_count must be a bool, got {type(self.equal_count).__name__}")
        for name, least in (("microbatches_multiple", 1), ("max_sequences_per_microbatch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One global batch to schedule."""

    seqlens: Int64Array
    """int64 [n], real lengths, tokens."""
    layout: ParallelLayout
    """How the ranks are arranged."""
    cost: CostModel
    """What a microbatch costs."""
    mode: Mode
    """How ranks wait for each other."""
    limits: Limits
    """Further constraints."""

    @property
    def equal_count(self) -> bool:
        """Whether every rank must get the same number of microbatches."""
        return bool(self.limits.equal_count) or self.mode.needs_equal_count

    @property
    def max_sequences(self) -> int:
        """Most sequences in one microbatch, as a number that is always usable."""
        return self.limits.max_sequences_per_microbatch or max(len(self.seqlens), 1)


def pack_token_cap(layout: ParallelLayout, cp_size: int) -> int:
    """Most padded tokens of a whole pack on ``cp_size`` ranks: what fits under the cap of every rank."""
    limit = layout.tokens_per_rank_limit
    return limit * cp_size // layout.pad_multiple(cp_size) * layout.pad_multiple(cp_size)


def check_seqlens(seqlens: npt.ArrayLike) -> Int64Array:
    """``seqlens`` as int64 [n].

    Raises:
        TypeError: they are not integers.
        ValueError: wrong shape, negative, NaN or too large for int64.
    """
    try:
        array = np.asarray(seqlens)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"seqlens must be one flat array of integers: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"seqlens must have one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if np.issubdtype(array.dtype, np.floating) and bool(np.any(np.isnan(array))):
        raise ValueError(f"seqlens[{int(np.flatnonzero(np.isnan(array))[0])}] is NaN; lengths are whole tokens")
    if array.dtype == np.object_:
        for index, value in enumerate(array.tolist()):
            if isinstance(value, int) and abs(value) > np.iinfo(np.int64).max:
                raise ValueError(f"seqlens[{index}] is {value}, which int64 cannot hold")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"seqlens must be integers, got dtype {array.dtype}")
    if int(array.min()) < 0:
        index = int(np.argmin(array))
        raise ValueError(f"seqlens[{index}] is {int(array[index])}; a length cannot be negative")
    if int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"seqlens[{int(np.argmax(array))}] is {int(array.max())}, which int64 cannot hold")
    return np.ascontiguousarray(array, dtype=np.int64)


def check_fits(seqlens: Int64Array, layout: ParallelLayout, cp_sizes: tuple[int, ...]) -> None:
    """Refuse the first sequence that none of ``cp_sizes`` can hold.

    Raises:
        ScheduleError: names the sequence, its length and the limit.
    """
    longest, cp_size = max((pack_token_cap(layout, k), k) for k in cp_sizes)
    too_long = np.flatnonzero(seqlens > longest)
    if len(too_long):
        first = int(too_long[0])
        raise ScheduleError(
            f"sequence {first} has {int(seqlens[first])} tokens, the limit is {longest} "
            f"({layout.tokens_per_rank_limit} per rank x cp {cp_size}); {len(too_long)} sequence(s) are too long: "
            "truncate or split them, or raise max_seqlen_per_dp_cp_rank or the CP size"
        )
