"""What the adapters read from a training loop's configuration object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tdp_megatron.arguments import checked_int
from tdp_megatron.ranges import NumberRanges
from tdp_megatron.reading import PackingKeys

__all__ = ["LoopConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The fields of a Megatron configuration that decide packing; any object with some of these names will do.

    Each data iterator is taken to its place by the configuration it is first given with, one for validation too: where
    training sets ``consumed_samples`` or ``skip_samples``, validation needs a configuration of its own, with both at
    their defaults.
    """

    max_seqlen_per_dp_cp_rank: int
    """Most tokens, padding included, that one rank holds in one microbatch."""
    sequence_packing_scheduler: str = "dp_balanced"
    """Name of a scheduling algorithm."""
    sequence_parallel: bool = False
    """Whether TP ranks split the sequence, so that a pack's tokens must divide by the TP size."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks per pipeline rank."""
    microbatch_group_size_per_vp_stage: int | None = None
    """With virtual pipelining, the number of microbatches is a multiple of this; None for that of the stages."""
    token_keys: tuple[str, ...] = ()
    """User keys with one entry per token, packed like ``tokens``; other user keys go with their sample."""
    together_key: str | None = None
    """User key with an int per sample: the samples of a global batch with the same one from 0 up share a microbatch."""
    apart_key: str | None = None
    """User key with an int per sample: samples with the same one from 0 up are in different microbatches."""
    check_plans: bool = False
    """Whether every plan is validated, limits and keys included."""
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``tdp_megatron.schedule.schedule``."""
    data_timeout_s: float = 600.0
    """Deadline of each collective of the data runtime, seconds."""
    read_ahead: bool = True
    """Whether the next step is read, planned and exchanged in a background thread."""
    consumed_samples: int = 0
    """Number of the first item when there is no saved state; items are counted over all data-parallel ranks."""
    skip_samples: Sequence[tuple[int, int]] = ()
    """Ranges (begin, end) of items to leave out, such as a stretch that made the loss spike; see ``PackingSession``."""

    def __post_init__(self) -> None:
        # What is wrong shows here, not at the first step.
        _ = self.keys
        checked_int("consumed_samples", self.consumed_samples, least=0)
        NumberRanges("skip_samples", self.skip_samples)

    @property
    def keys(self) -> PackingKeys:
        """What the samples say about sharing a microbatch."""
        return PackingKeys(self.together_key, self.apart_key)

    @staticmethod
    def of(config: Any) -> LoopConfig:
        """The fields of ``config`` that are set.

        Raises:
            ValueError: ``max_seqlen_per_dp_cp_rank`` is missing or not positive, or a number or range is negative.
            TypeError: a key is no name, or a number no integer.
        """
        if isinstance(config, LoopConfig):
            return config
        limit = getattr(config, "max_seqlen_per_dp_cp_rank", None)
        if limit is None or isinstance(limit, bool) or int(limit) < 1:
            raise ValueError(f"config.max_seqlen_per_dp_cp_rank must be a positive number of tokens, got {limit!r}")
        found: dict[str, Any] = {"max_seqlen_per_dp_cp_rank": int(limit)}
        for name in LoopConfig.__dataclass_fields__:
            value = getattr(config, name, None)
            if value is not None:
                found[name] = value
        return LoopConfig(**found)
