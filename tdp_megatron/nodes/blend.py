"""``Blend``: several sources mixed by weight, in Megatron's order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from tdp_megatron import _C
from tdp_megatron.arguments import checked_int
from tdp_megatron.datasets.blend import check_weights, normalise_weights
from tdp_megatron.datasets.instant import InstantBlend
from tdp_megatron.datasets.weights import WeightSchedule
from tdp_megatron.errors import StateMismatchError, TdpError
from tdp_megatron.nodes.base import (
    ENDLESS,
    BeyondEndError,
    SampleSource,
    draw_block,
    leaf_count,
    require_node,
    skip_samples,
)
from tdp_megatron.nodes.source_states import SourceStates
from tdp_megatron.types import Int64Array, SampleBlock

__all__ = ["Blend", "SourceReport", "Stop"]

logger = logging.getLogger(__name__)

#: What happens when a source has nothing left.
Stop = Literal["first_exhausted", "all_exhausted", "cycle"]

# Draws looked through at once while samples are passed over: at first, and at most; and drawn where a source may end.
_FIRST_CHUNK, _LAST_CHUNK = 1 << 12, 1 << 18
_SKIP_DRAWS = 1 << 10


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one source has given to a blend."""

    name: str
    requested: float
    """Its share by weight, 0 to 1: that of the next sample, where weights change."""
    actual: float
    """Its share of the samples drawn so far; 0 before the first."""
    drawn: int
    """Samples drawn."""
    epochs: float | None
    """How often its data has been used, where its size is known."""


class Blend(SampleSource):
    """Draws each sample from the source that is furthest behind its share; a pure function of the sample number.

    The k-th draw from a source is that source's k-th sample: when weights change, each source goes on where it was.
    Samples get dataset ids in the order of the sources (a nested blend's sources are counted one by one).

    Args:
        sources: nodes of samples: ours, or any that yields ``Sample``s or mappings with ``tokens``.
        weights: one per source, normalised here; None for equal shares; ``"by_size"`` for shares in proportion to
            the samples of one epoch (of sources with ``samples_per_epoch``: ``GPTSample``, ``DocumentSample``); or a
            ``WeightSchedule`` for weights that change over training. A source of weight 0 is not drawn from.
        num_samples: samples in all, at most; None for as many as the sources have.
        stop: when a source has nothing left, end (``first_exhausted``; an error if ``num_samples`` asks for more), go
            on with the others (``all_exhausted``), or begin it again (``cycle``).
        order: ``"megatron"``, or ``"instant"``: an order of our own in which every source is within one sample of its
            share at every moment, and any position is there at once. Shares are rounded to multiples of 1/720,720.

    Raises:
        ValueError, TypeError: a bad argument; for weights the message names the source and the value.
        TdpError: at a draw, a source that ended before ``num_samples`` under ``first_exhausted``, that gave fewer
            samples than it said, or that is empty under ``cycle``.
    """

    VERSION = 2
    READS_VERSIONS = (1,)
    SOURCES_KEY = "sources"
    COUNTS_KEY = "counts"
    EXHAUSTED_KEY = "exhausted"
    TARGETS_KEY = "targets"

    def __init__(
        self,
        sources: Sequence[BaseNode[Any]],
        weights: Sequence[float] | Literal["by_size"] | WeightSchedule | None = None,
        *,
        num_samples: int | None = None,
        stop: Stop = "first_exhausted",
        order: Literal["megatron", "instant"] = "megatron",
    ) -> None:
        super().__init__()
        if order not in ("megatron", "instant"):
            raise ValueError(f"order must be 'megatron' or 'instant', got {order!r}")
        if order == "instant" and (stop != "first_exhausted" or isinstance(weights, WeightSchedule)):
            raise ValueError("order='instant' goes with fixed weights and stop='first_exhausted' only")
        self.order = order
        self._instant: InstantBlend | None = None
        self.sources = list(sources)
        if not self.sources:
            raise ValueError("a blend needs at least one source")
        for source in self.sources:
            require_node(source)
        if len({id(source) for source in self.sources}) < len(self.sources):
            raise ValueError("two sources of the blend are one node: each draw would move both; make a node for each")
        if num_samples is not None:
            num_samples = checked_int("num_samples", num_samples, least=1)
        if stop not in get_args(Stop):
            raise ValueError(f"stop must be one of {', '.join(get_args(Stop))}, got {stop!r}")
        self.schedule = weights if isinstance(weights, WeightSchedule) else None
        self.weights: list[float] | None = None
        if isinstance(weights, WeightSchedule):
            if weights.num_sources != len(self.sources):
                raise ValueError(f"{weights.num_sources} weights for {len(self.sources)} sources; give one per source")
        elif isinstance(weights, str):
            if weights != "by_size":
                raise ValueError(f"weights must be numbers, None or 'by_size', got {weights!r}")
            for i, source in enumerate(self.sources):
                if not hasattr(source, "samples_per_epoch"):
                    raise TypeError(f"weights='by_size' needs sources of known size; {self._name(i)} has none")
        else:
            if isinstance(weights, Mapping):
                raise TypeError("weights must be a sequence, one per source in their order, got a mapping")
            given = [1.0] * len(self.sources) if weights is None else list(weights)
            self.weights = check_weights(given, [self._name(i) for i in range(len(self.sources))])
        self.num_samples = num_samples
        self.stop: Stop = stop
        # A source that is begun again is not where its count is.
        self._states = SourceStates(self.sources, positions_follow=stop != "cycle")
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
        """Samples drawn from each source so far, int64 [k]; a copy."""
        if not self._is_open:
            self.reset(None)
        return self._counts.copy()

    def report(self) -> list[SourceReport]:
        """Requested and actual shares, draws and epochs of every source."""
        if not self._is_open:
            self.reset(None)
        if self.schedule is not None:
            requested = self.schedule.weights(self._at, self._at + 1)[0].tolist()
        else:
            requested = normalise_weights(self._resolved_weights()).tolist()
        total = int(self._counts.sum())
        reports = []
        for i, source in enumerate(self.sources):
            drawn = int(self._counts[i])
            size = getattr(source, "samples_per_epoch", None)
            reports.append(
                SourceReport(
                    self._name(i), requested[i], drawn / total if total else 0.0, drawn, drawn / size if size else None
                )
            )
        return reports

    def fingerprint(self) -> dict[str, Any]:
        weights = self._resolved_weights() if self.schedule is None else self.schedule.fingerprint()
        facts = {"weights": weights, "num_samples": self.num_samples, "stop": self.stop, "sources": len(self.sources)}
        return facts if self.order == "megatron" else {**facts, "order": self.order}

    def _resolved_weights(self) -> list[float]:
        if self.weights is None:
            self.weights = check_weights(
                [float(getattr(s, "samples_per_epoch")) for s in self.sources],  # noqa: B009 - not in BaseNode's type
                [self._name(i) for i in range(len(self.sources))],
            )
        return self.weights

    def _open(self) -> None:
        self._normalised: npt.NDArray[np.float64] = np.zeros(0)
        if self.schedule is None:
            weights = self._resolved_weights()
            self._normalised = normalise_weights(weights)
            if self.order == "instant":
                self._instant = InstantBlend(weights)
            skipped = [self._name(i) for i in range(len(weights)) if weights[i] == 0]
            if skipped:
                logger.warning("blend: no samples from sources of weight 0: %s", ", ".join(skipped))

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        k = len(self.sources)
        self._at = position
        self._ended = False
        self._restarted: tuple[int, int] | None = None
        self._counts: Int64Array = np.zeros(k, dtype=np.int64)
        self._targets: npt.NDArray[np.float64] = np.zeros(k)
        self._exhausted: set[int] = set()
        self._states.reset()
        if state is None:
            for source in self.sources:
                source.reset(None)
        else:
            saved = state.get(self.COUNTS_KEY)
            if not isinstance(saved, list) or not all(type(count) is int and 0 <= count < 2**63 for count in saved):
                raise StateMismatchError(f"Blend: the saved counts are {saved}; expected {k} integers from 0 up")
            if len(saved) != k:
                raise StateMismatchError(f"Blend: there are {len(saved)} saved counts; expected {k} integers from 0 up")
            self._counts[:] = saved
            exhausted = state.get(self.EXHAUSTED_KEY) if self.stop == "all_exhausted" else []
            if not isinstance(exhausted, list) or not all(type(i) is int and 0 <= i < k for i in exhausted):
                raise StateMismatchError(f"Blend: the saved exhausted sources are {exhausted}, there are {k} sources")
            self._exhausted = set(exhausted)
            if self.schedule is not None:
                targets = state.get(self.TARGETS_KEY)
                if not isinstance(targets, list) or not all(type(t) is float and t >= 0 for t in targets):
                    raise StateMismatchError(f"Blend: the saved targets are {targets}; expected {k} numbers from 0 up")
                if len(targets) != k or not np.isclose(sum(targets), position, rtol=1e-6, atol=1e-6):
                    raise StateMismatchError(f"Blend: the saved targets {targets} are not those of {position} samples")
                self._targets[:] = targets
            total = sum(saved)
            if total != position:
                raise StateMismatchError(f"Blend: the counts sum to {total}, the position is {position}")
            sources_state = state.get(self.SOURCES_KEY)
            if state[self.VERSION_KEY] == 1 and isinstance(sources_state, Mapping):
                # Entries that a checkpoint loaded in place does not have are left as they were.
                raise StateMismatchError(
                    "Blend: the saved state is of version 1, but its sources are as version 2 writes them: it "
                    "was loaded in place, in part. Read it whole, with "
                    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and load the state in it"
                )
            states = self._states.load(sources_state, saved)
            for i, (source, source_state) in enumerate(zip(self.sources, states, strict=True)):
                source.reset(source_state)
                # One that has been begun again counts anew.
                if isinstance(source, SampleSource) and self.stop != "cycle" and source.position != saved[i]:
                    raise StateMismatchError(
                        f"Blend: the saved state of source {self._name(i)} is at sample {source.position}, but "
                        f"{saved[i]} samples were drawn from it; the state is damaged"
                    )
        self._set_active()

    def _set_active(self) -> None:
        # A source of weight 0 can tie with the others' deficits in the rule, so it is not offered at all.
        positive = np.ones(len(self.sources), bool) if self.schedule is not None else self._normalised > 0
        positive[list(self._exhausted)] = False
        self._active = np.flatnonzero(positive)

    def _source_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {self.COUNTS_KEY: self._counts.tolist(), self.SOURCES_KEY: self._states.save()}
        if self.stop == "all_exhausted":
            state[self.EXHAUSTED_KEY] = sorted(self._exhausted)
        if self.schedule is not None:
            state[self.TARGETS_KEY] = self._targets.tolist()
        return state

    def num_remaining(self) -> int | None:
        lengths = [self._length_of(i) for i in range(len(self.sources))]
        if self.stop == "all_exhausted":
            left = [lengths[i] for i in self._active]
            known = [length for length in left if length is not None]
            if len(known) < len(left):
                return None
            wanted = ENDLESS if self.num_samples is None else self.num_samples - self._at
            return min(wanted, ENDLESS if ENDLESS in known else sum(known))
        if self.num_samples is not None:
            return self.num_samples - self._at
        endless = all(lengths[i] == ENDLESS for i in self._active) or self.stop == "cycle"
        if endless and not self._ended and len(self._active):
            return ENDLESS
        return 0 if self._ended or not len(self._active) else None

    def _take(self, n: int) -> SampleBlock:
        if self.num_samples is not None:
            n = min(n, self.num_samples - self._at)
        blocks: list[SampleBlock] = []
        while n > 0 and not self._ended and len(self._active):
            block, spent = self._draw(n)
            n -= len(block)
            blocks.append(block)
            if spent is not None:
                self._source_ended(spent)
        return SampleBlock.concatenate(blocks)

    def _skip(self, n: int) -> None:
        while n > 0:
            n -= self._pass_over(n)
            if n:  # a source may end, or tells nothing: who gives which sample depends on it
                block = self._take(min(n, _SKIP_DRAWS))
                if not len(block):
                    raise BeyondEndError(f"the blend ends at sample {self._at}; {n} more were to be passed over")
                n -= len(block)

    def _pass_over(self, n: int) -> int:
        """Pass over up to n samples, as many as the sources are known to have; how many those were."""
        if self.num_samples is not None:
            n = min(n, self.num_samples - self._at)
        if self._ended or not len(self._active):
            return 0
        lengths = [self._length_of(i) for i in range(len(self.sources))]
        least = np.array([0 if length is None else length for length in lengths], dtype=np.int64)
        chunk = n if self._instant is not None else _FIRST_CHUNK
        at, end, counts, targets = self._at, self._at + n, self._counts, self._targets
        while at < end and chunk:
            part = min(chunk, end - at)
            if self._instant is None:
                _, _, counts_after, targets_after = self._choose(part, at, counts, targets)
            else:
                counts_after, targets_after = self._instant.counts(at + part), targets
            if (counts_after - self._counts <= least).all():
                at, counts, targets = at + part, counts_after, targets_after
                chunk = min(2 * chunk, _LAST_CHUNK)
            else:
                chunk = part // 4
        # The sources move last, so that nothing has changed when Ctrl-C ends the search, which may be long.
        passed, wanted = at - self._at, counts - self._counts
        for i in np.flatnonzero(wanted).tolist():
            skip_samples(self.sources[i], int(wanted[i]))
        self._at, self._counts, self._targets = at, counts, targets
        return passed

    def _choose(
        self, n: int, at: int, counts: Int64Array, targets: npt.NDArray[np.float64]
    ) -> tuple[Int64Array, Int64Array, Int64Array, npt.NDArray[np.float64]]:
        """Sources of the n samples from ``at`` on and their running numbers, and counts and targets after them."""
        active = self._active
        if self._instant is not None:
            chosen, number = self._instant.locate(np.arange(at, at + n, dtype=np.int64))
            return chosen, number, self._instant.counts(at + n), targets
        counts = counts.copy()
        if self.schedule is None:
            mine = np.ascontiguousarray(counts[active])
            choice, number = _C.blend_continue(np.ascontiguousarray(self._normalised[active]), mine, at, n)
            counts[active] = mine
            return active[choice], number, counts, targets
        targets = targets.copy()
        offered = np.isin(np.arange(len(self.sources)), active)
        choice, number = self.schedule.draw(at, n, targets, counts, offered)
        return choice.astype(np.int64), number, counts, targets

    def _draw(self, n: int) -> tuple[SampleBlock, int | None]:
        """The next samples up to n, and the source that has none left for the sample after them, if that is so."""
        before = (self._at, self._counts, self._targets)
        chosen, number, counts, targets = self._choose(n, *before)
        # Only sources that are drawn from are looked at: there may be thousands of others.
        places_of = dict(_places_of(chosen))
        lengths = {i: self._length_of(i) for i in places_of}
        spent: int | None = None
        end = n
        for i, places in places_of.items():
            length = lengths[i]
            if length is not None and len(places) > length and places[length] < end:
                end, spent = int(places[length]), i
        # Those that cannot say what they have left come first, in the order of their samples: where one ends, nothing
        # behind that place may have been drawn.
        untold = np.flatnonzero(np.isin(chosen, [i for i, length in lengths.items() if length is None]))
        runs = np.split(untold, np.flatnonzero(np.diff(chosen[untold])) + 1) if len(untold) else []
        blocks: list[SampleBlock] = []
        order: list[Int64Array] = []
        for run in runs:
            places = run[run < end]
            block = self._draw_places(int(chosen[run[0]]), places, number)
            blocks.append(block)
            order.append(places[: len(block)])
            if len(block) < len(places):
                end, spent = int(places[len(block)]), int(chosen[run[0]])
        for i, places in places_of.items():
            if lengths[i] is None:
                continue
            places = places[places < end]
            block = self._draw_places(i, places, number)
            if len(block) < len(places):
                raise TdpError(
                    f"source {self._name(i)} gave {len(block)} samples instead of {len(places)}, but its "
                    f"num_remaining said {lengths[i]}"
                )
            blocks.append(block)
            order.append(places)
        if end < n:
            _, _, counts, targets = self._choose(end, *before)
        self._counts, self._targets = counts, targets
        self._at += end
        joined = SampleBlock.concatenate(blocks)
        by_place = np.argsort(np.concatenate(order), kind="stable") if order else np.zeros(0, dtype=np.int64)
        return joined.select(by_place), spent

    def _draw_places(self, index: int, places: Int64Array, number: Int64Array) -> SampleBlock:
        """The samples of one source at these places; fewer where it ends."""
        if not len(places):
            return SampleBlock.concatenate([])
        with self.stats.waiting():
            block = draw_block(self.sources[index], len(places), self._offsets[index], int(number[places[0]]))
        return self._numbered(block, index)

    def _length_of(self, index: int) -> int | None:
        source = self.sources[index]
        return source.num_remaining() if isinstance(source, SampleSource) else None

    def _source_ended(self, index: int) -> None:
        if self.stop == "cycle":
            source = self.sources[index]
            source.reset(None)
            if isinstance(source, SampleSource) and source.num_remaining() == 0:
                raise TdpError(f"source {self._name(index)} is empty; it cannot be cycled")
            if self._restarted == (index, self._at):
                raise TdpError(f"source {self._name(index)} gave nothing after it was begun again")
            self._restarted = (index, self._at)
        elif self.stop == "all_exhausted":
            self._exhausted.add(index)
            self._set_active()
        elif self.num_samples is not None:
            raise TdpError(
                f"source {self._name(index)} ended after {int(self._counts[index])} samples, at sample {self._at} of "
                f"the {self.num_samples} the blend was asked for; let it repeat (num_epochs=None, a larger "
                "num_samples, or stop='cycle') or ask the blend for less"
            )
        else:
            self._ended = True

    def _numbered(self, block: SampleBlock, index: int) -> SampleBlock:
        offset = self._offsets[index]
        if not offset or not isinstance(self.sources[index], SampleSource):
            return block
        refs = block.refs.copy()
        refs[:, 0] += offset
        return SampleBlock(
            block.readers, block.reader_index, block.sample_ids, block.seqlens, block.num_loss_tokens, refs
        )


def _places_of(chosen: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """The sources in ``chosen``, rising, each with the places it has there."""
    order = np.argsort(chosen, kind="stable")
    sources, begins = np.unique(chosen[order], return_index=True)
    return zip(sources.tolist(), np.split(order, begins[1:]), strict=True) if len(chosen) else iter(())
