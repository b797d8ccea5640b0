"""``Blend``: several sources mixed by weight, in Megatron's order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from tdp_megatron import _C
from tdp_megatron.datasets.blend import check_weights, normalise_weights
from tdp_megatron.errors import StateMismatchError, TdpError
from tdp_megatron.nodes.base import SampleSource, draw_block, leaf_count
from tdp_megatron.types import Int64Array, SampleBlock

__all__ = ["Blend"]

logger = logging.getLogger(__name__)


class Blend(SampleSource):
    """Draws each sample from the source that is furthest behind its share; a pure function of the sample number.

    The k-th draw from a source is that source's k-th sample. Samples get dataset ids in the order of the sources
    (a nested blend's sources are counted one by one).

    Args:
        sources: nodes of samples: ours, or any that yields ``Sample``s or mappings with ``tokens``.
        weights: one per source, normalised here; None for equal shares; ``"by_size"`` for shares in proportion to
            the samples of one epoch (our sources only). A source of weight 0 is never drawn from.
        num_samples: samples in all; None for as many as the sources have. With a number, a source that ends early
            is an error; with None it ends the blend.

    Raises:
        ValueError, TypeError: bad weights; the message names the source and the value.
    """

    SOURCES_KEY = "sources"
    COUNTS_KEY = "counts"

    def __init__(
        self,
        sources: Sequence[BaseNode[Any]],
        weights: Sequence[float] | Literal["by_size"] | None = None,
        *,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        self.sources = list(sources)
        if not self.sources:
            raise ValueError("a blend needs at least one source")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1 or None, got {num_samples}")
        if isinstance(weights, str):
            if weights != "by_size":
                raise ValueError(f"weights must be numbers, None or 'by_size', got {weights!r}")
            for i, source in enumerate(self.sources):
                if not hasattr(source, "samples_per_epoch"):
                    raise TypeError(f"weights='by_size' needs sources of known size; {self._name(i)} has none")
            self.weights: list[float] | None = None
        else:
            given = [1.0] * len(self.sources) if weights is None else list(weights)
            self.weights = check_weights(given, [self._name(i) for i in range(len(self.sources))])
        self.num_samples = num_samples
        self._offsets = np.cumsum([0] + [leaf_count(s) for s in self.sources])[:-1].tolist()

    def _name(self, index: int) -> str:
        source = self.sources[index]
        path = getattr(getattr(source, "source", source), "path_prefix", None)
        return f"{index} ({path or type(source).__name__})"

    @property
    def num_datasets(self) -> int:
        return sum(leaf_count(s) for s in self.sources)

    @property
    def counts(self) -> Int64Array:
        """Samples drawn from each source so far, int64 [k]."""
        counts = np.zeros(len(self.sources), dtype=np.int64)
        counts[self._active] = self._counts
        return counts

    def fingerprint(self) -> dict[str, Any]:
        return {"weights": self._resolved_weights(), "num_samples": self.num_samples, "sources": len(self.sources)}

    def _resolved_weights(self) -> list[float]:
        if self.weights is None:
            self.weights = check_weights(
                [float(getattr(s, "samples_per_epoch")) for s in self.sources],  # noqa: B009 - not in BaseNode's type
                [self._name(i) for i in range(len(self.sources))],
            )
        return self.weights

    def _open(self) -> None:
        weights = self._resolved_weights()
        # A source of weight 0 can tie with the others' deficits in the rule below, so it is not offered at all.
        self._active = np.flatnonzero(np.array(weights) > 0)
        skipped = [self._name(i) for i in range(len(weights)) if weights[i] == 0]
        if skipped:
            logger.warning("blend: no samples from sources of weight 0: %s", ", ".join(skipped))
        self._normalised: npt.NDArray[np.float64] = normalise_weights([weights[i] for i in self._active])

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        counts = np.zeros(len(self.sources), dtype=np.int64)
        if state is None:
            for source in self.sources:
                source.reset(None)
        else:
            states = state.get(self.SOURCES_KEY)
            saved = state.get(self.COUNTS_KEY)
            if not isinstance(states, list) or not isinstance(saved, list) or len(states) != len(self.sources):
                raise StateMismatchError(f"Blend: the saved state has no states of {len(self.sources)} sources")
            counts[:] = saved
            if int(counts.sum()) != position:
                raise StateMismatchError(f"Blend: the counts sum to {int(counts.sum())}, the position is {position}")
            for source, source_state in zip(self.sources, states, strict=True):
                source.reset(source_state)
        self._counts: Int64Array = np.ascontiguousarray(counts[self._active])

    def _source_state(self) -> dict[str, Any]:
        return {
            self.COUNTS_KEY: [int(c) for c in self.counts],
            self.SOURCES_KEY: [source.state_dict() for source in self.sources],
        }

    def _take(self, n: int) -> SampleBlock:
        if self.num_samples is not None:
            n = min(n, self.num_samples - self._position)
        if all(isinstance(self.sources[i], SampleSource) for i in self._active):
            return self._draw(n)
        # A user's node does not say how much it has left: one by one, nothing is drawn in vain.
        blocks = []
        for drawn in range(n):
            block = self._draw(1, ahead=drawn)
            if not len(block):
                break
            blocks.append(block)
        return SampleBlock.concatenate(blocks)

    def _draw(self, n: int, ahead: int = 0) -> SampleBlock:
        position = self._position + ahead
        before = self._counts.copy()
        choice, number = _C.blend_continue(self._normalised, self._counts, position, n)
        blocks: list[SampleBlock] = []
        places: list[Int64Array] = []
        end = n
        for k in range(len(self._active)):
            place = np.flatnonzero(choice == k)
            if not len(place):
                continue
            index = int(self._active[k])
            with self.stats.waiting():
                block = draw_block(self.sources[index], len(place), self._offsets[index], int(before[k]))
            if len(block) < len(place):
                self._complain(index, int(number[place[len(block)]]), position + int(place[len(block)]))
                end = min(end, int(place[len(block)]))
                place = place[: len(block)]
            blocks.append(self._numbered(block, index))
            places.append(place)
        joined = SampleBlock.concatenate(blocks)
        order = np.argsort(np.concatenate(places), kind="stable") if places else np.zeros(0, dtype=np.int64)
        if end < n:
            # The blend ends where the first source has nothing left; what the others gave beyond is not used.
            self._counts[:] = before + np.bincount(choice[:end], minlength=len(before))
            order = order[:end]
        return joined.select(order)

    def _complain(self, index: int, drawn: int, position: int) -> None:
        if self.num_samples is not None:
            raise TdpError(
                f"source {self._name(index)} ended after {drawn} samples, at sample {position} of the "
                f"{self.num_samples} the blend was asked for; let it repeat (num_epochs=None, or a larger "
                "num_samples) or ask the blend for less"
            )

    def _numbered(self, block: SampleBlock, index: int) -> SampleBlock:
        offset = self._offsets[index]
        if not offset or not isinstance(self.sources[index], SampleSource):
            return block
        refs = block.refs.copy()
        refs[:, 0] += offset
        return SampleBlock(
            block.readers, block.reader_index, block.sample_ids, block.seqlens, block.num_loss_tokens, refs
        )
