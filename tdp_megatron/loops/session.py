"""One training loop's data iterator, turned step by step into packed microbatches on every rank."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from tdp_megatron.arguments import checked_int
from tdp_megatron.distributed import Exchange, GlobalSamples, HostGroup
from tdp_megatron.distributed.collectives import all_gather_rows, broadcast_bytes, gather_texts
from tdp_megatron.distributed.exchange import digest_of
from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops.ahead import Ahead
from tdp_megatron.loops.bundle import StepBundle
from tdp_megatron.loops.checks import (
    SAME_PLACE,
    check_goes_on,
    check_handed,
    check_moves,
    check_reader,
    check_state,
    different_content,
    naming_the_longest,
)
from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.loops.cursor import ItemCursor, LeftOutItems
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.loops.loop_stats import LoopStats
from tdp_megatron.loops.loop_step import LoopStep
from tdp_megatron.loops.microbatch import LocalSamples, read_microbatches
from tdp_megatron.ops import build_pack_table, packed_batches
from tdp_megatron.schedule import Limits, Plan, schedule, validate
from tdp_megatron.types import Int64Array

__all__ = ["PackingSession", "settle_all"]

_OK, _END, _FAILED = b"O", b"S", b"E"
_CLOSED = "this packing session was closed; give a new data iterator, and load its state_dict to go on there"


def settle_all(groups: LoopGroups) -> None:
    """Wait for what the sessions of these groups make in the background: their collectives must not mix."""
    for session in groups.sessions:
        session.settle()


class PackingSession:
    """Reads, plans and exchanges step after step, one ahead in the background.

    Items of the data iterators, samples where each is one, are numbered over all data-parallel ranks, which take turns:
    item i of rank r of R is number i * R + r, as ``Shard`` and Megatron's samplers deal them out. Positions and ranges
    are such numbers, so that they and a state hold for any other number of ranks.

    A data iterator with ``skip_items(n)``, as that of our ``Loader``, passes items over without reading; of any other,
    those left out are read and dropped.

    Args:
        data_iterator: this rank's data; None on ranks that receive theirs. CP ranks of one data-parallel rank, and
            the first and the last pipeline stage, give the same items.
        config: what to pack and how, and where to begin.
        groups: this process's place.
        place: on ranks that receive their data, the ``begin`` and ``origin`` of ``ItemCursor`` on one that reads.
    """

    VERSION = 2

    def __init__(
        self,
        data_iterator: Iterator[Any] | None,
        config: LoopConfig,
        groups: LoopGroups,
        place: tuple[int, int] | None = None,
    ) -> None:
        check_reader(data_iterator, groups)
        self.config = config
        self.groups = groups
        self._exchange = Exchange(groups.dp_cp) if groups.reads else None
        self._step = 0
        self._stats = LoopStats(type(self).__name__, config.scheduler_options.get("cost"))
        self._left_out = LeftOutItems("skip_samples", config.skip_samples)
        source = data_iterator if groups.reads else None
        self._cursor = ItemCursor(
            source, groups.dp_rank, groups.layout.dp, self._left_out, int(config.consumed_samples)
        )
        if place is not None and source is None:
            self._cursor.start(*place, None)
        self._data_at = self._cursor.origin
        self.moves = 0
        """How often a step made ahead has been given up, which all ranks do alike."""
        self._ahead: Ahead[LoopStep] | None = None
        self._failure: Exception | None = None
        self._closed: Callable[[], Any] | None = None  # where a session was closed: gives its iterator while it lives
        self._limits: dict[str, Any] = {"equal_count": True}
        if (config.virtual_pipeline_model_parallel_size or 1) > 1:
            self._limits["microbatches_multiple"] = config.microbatch_group_size_per_vp_stage or groups.pp_size
        self._limits.update(config.scheduler_options)
        groups.sessions.append(self)

    def reads(self, source: Any) -> bool:
        """Whether ``source`` is this session's data iterator; no on ranks that receive their packs."""
        return source is not None and source is (self._cursor.source if self._closed is None else self._closed())

    def next_step(self, num_microbatches: int) -> LoopStep:
        """The next global batch, of ``num_microbatches`` items of every data-parallel rank's iterator.

        Raises:
            StopIteration: the data has ended, on all ranks.
            ExchangeError: a rank failed, is late or gone; every later call raises it again.
        """
        num_microbatches = checked_int("num_microbatches", num_microbatches, least=1)
        if self._closed is not None:
            raise RuntimeError(_CLOSED)  # a new one each time: its frames would keep the iterator
        if self._failure is not None:
            raise self._failure
        settle_all(self.groups)
        try:
            with self._stats.handed_out.waiting():
                step = self._take(num_microbatches)
        except Exception as error:
            self._failure = error
            raise
        self._step += 1
        self._stats.handed_out.items += 1
        self._data_at = step.data_at
        self._cursor.move(step.consumed_samples, data_at=step.data_at)
        for host in (self.groups.dp_cp.data, self.groups.tp, self.groups.pp):
            if host is not None:
                host.note_use("", step.number)  # what is made in the background is one further
        if self.config.read_ahead:
            self._ahead = Ahead(num_microbatches, lambda: self._produce(num_microbatches))
        return step

    @property
    def failure(self) -> Exception | None:
        """What has ended this session; every later step raises it again."""
        return self._failure

    def _take(self, num_microbatches: int) -> LoopStep:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.num_microbatches == num_microbatches:
                return ahead.result()
            # The batch size has changed, on all ranks alike: the items are kept, the plan is made again.
            with suppress(StopIteration):  # too few for the old size may be enough for the new one
                ahead.result()
        return self._produce(num_microbatches)

    def _produce(self, num_microbatches: int) -> LoopStep:
        groups = self.groups
        for host in (groups.tp, groups.pp):
            if host is not None:
                host.begin_step(self._step)
        bundle: StepBundle | None = None
        failure: Exception | None = None
        if groups.tp_rank == 0:
            try:
                if self._exchange is not None:
                    bundle = self._exchanged(self._exchange, num_microbatches)
                with self._stats.made.waiting():
                    bundle = self._over_stages(bundle, None)
            except (Exception, StopIteration) as error:
                failure = error
                if groups.pp is not None and not isinstance(error, _ToldStagesError):
                    failure = self._tell_stages(error)
        if groups.tp is not None:
            with self._stats.made.waiting():
                bundle, failure = self._over_tensor_ranks(groups.tp, bundle, failure)
        if failure is not None:
            raise failure.cause if isinstance(failure, _ToldStagesError) else failure
        assert bundle is not None
        check_moves(self._step, bundle.place[2], self.moves)
        if not groups.reads:
            end = self._cursor.end_of(num_microbatches * groups.layout.dp)
            check_handed(self._step, bundle.place[0], end, num_microbatches, groups)
        with self._stats.made.working():
            step = self._finish(bundle)
            self._stats.count(step.plan, sum(batch.num_tokens for batch in step.batches))
        return step

    def _exchanged(self, exchange: Exchange, num_microbatches: int) -> StepBundle:
        step, config, cursor = self._step, self.config, self._cursor
        end = cursor.end_of(num_microbatches * self.groups.layout.dp)
        error: Exception | None = None
        local: LocalSamples | None = None
        missing = 1
        with self._stats.made.waiting():
            try:
                items: list[Any] = []
                if end is not None:
                    items, missing = cursor.read(end)
                local = read_microbatches(items, self.groups, tuple(config.token_keys), config.keys)
            except Exception as failure:  # told to all ranks, then raised on all of them
                error = failure
            samples = exchange.gather(
                step,
                None if local is None else local.flat,
                missing,
                order=None if local is None else local.order,
                facts=None if local is None else local.facts,
                num_facts=1 + len(config.keys.names),
                error=error,
                has_more=lambda: end is not None and cursor.has_more(end),
                place=f"samples {cursor.describe(end)}",
                shared=(self.groups.layout.cp, 0 if local is None else local.shared),
                planned_by={"algorithm": config.sequence_packing_scheduler, "layout": self.groups.layout}
                | self._limits,
            )
        if samples.ended or local is None or end is None:
            cursor.note_end()
            raise StopIteration
        with exchange.host.telling_failures(step), self._stats.made.working():
            plan = self._plan(samples)
            _, buffers, values = exchange.run(step, plan, samples, local.flat)
        return StepBundle(plan, samples.refs, buffers, values, (end, cursor.data_at(end), self.moves))

    def _plan(self, samples: GlobalSamples) -> Plan:
        config = self.config
        keys = config.keys.arguments(samples.facts[:, 1:])
        algorithm = config.sequence_packing_scheduler
        padded = samples.facts[:, 0]
        with naming_the_longest(self._step, padded, samples.refs):
            plan = schedule(padded, self.groups.layout, mode="free", algorithm=algorithm, **keys, **self._limits)
        plan = dataclasses.replace(plan, seqlens=samples.seqlens)
        if config.check_plans:
            names = {field.name for field in dataclasses.fields(Limits)} & self._limits.keys()
            validate(plan, **keys, **{name: self._limits[name] for name in names})
        return plan

    def _over_stages(self, bundle: StepBundle | None, error: Exception | None) -> StepBundle | None:
        """Tell the pipeline stages how it went, and the middle ones what the plan is."""
        pp = self.groups.pp
        if pp is None:
            return bundle
        what = f"step {self._step}: telling the pipeline stages"
        kind = 0 if error is None else (1 if isinstance(error, StopIteration) else 2)
        place = content = 0
        if bundle is not None and self.groups.reads:
            place = digest_of(self._cursor.describe(bundle.place[0]))
            content = bundle.content_digest()
        rows = all_gather_rows(pp, np.array([kind, place, content]), what)
        kinds = rows[:, 0]
        if kinds.any():
            raise _ToldStagesError(self._stage_failure(pp, kinds, error, what))
        if rows[0, 1] != rows[-1, 1]:
            message = "the first and the last pipeline stage read different samples"
            raise _ToldStagesError(ExchangeError(f"step {self._step}: {message}; {SAME_PLACE}"))
        if rows[0, 2] != rows[-1, 2]:
            raise _ToldStagesError(different_content(self._step, self._exchange))
        if pp.size > 2:
            data = None
            if pp.rank == 0:
                assert bundle is not None
                data = bundle.to_bytes(with_tokens=False)
            received = broadcast_bytes(pp, data, 0, what)
            if bundle is None:
                bundle = StepBundle.from_bytes(received, self.groups.rank)
        return bundle

    def _stage_failure(self, pp: HostGroup, kinds: Int64Array, error: Exception | None, what: str) -> Exception:
        texts = gather_texts(pp, "" if error is None else str(error), what)
        if not (kinds == 2).any():
            if (kinds[[0, -1]] == 1).all():
                return StopIteration()
            return ExchangeError(
                f"step {self._step}: the data ended on one of the first and the last pipeline stage only; "
                "both must read the same data"
            )
        if error is not None and not isinstance(error, StopIteration):
            return error
        stage = int(np.flatnonzero(kinds == 2)[0])
        return ExchangeError(f"step {self._step}: pipeline stage {stage} failed: {texts[stage]}")

    def _tell_stages(self, error: Exception) -> Exception:
        try:
            self._over_stages(None, error)
        except _ToldStagesError as told:
            return told
        except ExchangeError:
            pass  # the stages are out of reach; the first error says more
        return error

    def _over_tensor_ranks(
        self, tp: HostGroup, bundle: StepBundle | None, failure: Exception | None
    ) -> tuple[StepBundle | None, Exception | None]:
        """TP rank 0 hands its bundle, or the reason why there is none, to the other TP ranks."""
        what = f"step {self._step}: handing the packs to the tensor-parallel ranks"
        if tp.rank == 0:
            cause = failure.cause if isinstance(failure, _ToldStagesError) else failure
            if cause is None:
                assert bundle is not None
                data = _OK + bundle.to_bytes(with_tokens=True)
            elif isinstance(cause, StopIteration):
                data = _END
            else:
                data = _FAILED + f"{type(cause).__name__}: {cause}".encode()
            try:
                broadcast_bytes(tp, data, 0, what)
            except ExchangeError as error:
                return bundle, failure or error
            return bundle, failure
        data = broadcast_bytes(tp, None, 0, what)
        if data[:1] == _OK:
            return StepBundle.from_bytes(data[1:], self.groups.rank), None
        if data[:1] == _END:
            return None, StopIteration()
        return None, ExchangeError(data[1:].decode())

    def _finish(self, bundle: StepBundle) -> LoopStep:
        groups = self.groups
        table = build_pack_table(bundle.plan, groups.rank)
        seqlens = bundle.plan.seqlens.tolist()
        return LoopStep(
            batches=packed_batches(
                bundle.plan,
                table,
                bundle.buffers_over(table),
                bundle.refs,
                values=bundle.values or None,
                cp_group=groups.cp_group,
            ),
            has_tokens=bundle.buffers is not None,
            seqlen_sum=sum(seqlens),
            seqlen_squared_sum=sum(s * s for s in seqlens),
            number=self._step,
            plan=bundle.plan,
            refs=bundle.refs,
            consumed_samples=bundle.place[0],
            data_at=bundle.place[1],
        )

    def stats(self) -> dict[str, Any]:
        """What this rank's data runtime has done since it was made.

        Returns:
            As ``Loader.stats``: ``"ReadAhead"`` (steps handed out, what the loop has waited for them, whether the last
            was ready), ``"PackingSession"`` (steps made), and the nodes of the data iterator where it is a loader's.
        """
        return self._stats.as_dict(self._cursor.source)

    @property
    def consumed_samples(self) -> int:
        """Number of the item behind the last step handed out: with Megatron's samples, their ``consumed_samples``."""
        return self._cursor.begin

    def skip_to(self, consumed_samples: int) -> None:
        """Go on with item ``consumed_samples``; the step read ahead is dropped. All ranks call it.

        Beyond the end of the data, the next step is an error.

        Raises:
            TypeError: it is no integer.
            ValueError: it lies behind the present position.
        """
        self._interrupt()
        self._cursor.skip_to(consumed_samples)

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out further ranges (begin, end) of items; the step read ahead is dropped. All ranks call it.

        Unlike those of the configuration, they are in the state, until they have been passed.

        Raises:
            TypeError: something else than pairs of ints.
            ValueError: a pair without 0 <= begin <= end.
        """
        self._interrupt()
        self._left_out.add(ranges)

    def _interrupt(self) -> None:
        """Drop the step read ahead; what has been read for it is kept."""
        if self._closed is not None:
            raise RuntimeError(_CLOSED)
        check_goes_on(self._failure)
        self.settle()
        self._ahead = None
        self.moves += 1

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step handed out, and the data iterator's own state there, if it has one."""
        self.settle()
        return {
            "version": self.VERSION,
            "step": self._step,
            **self._cursor.state_dict(self._data_at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        A data iterator with ``load_state_dict`` is taken there: to its own state, or with ``skip_items`` from its
        beginning where the state was saved on a rank that receives its data. Another must stand there already: at the
        number ``data_at`` where it was loaded from ``data``, else at ``consumed_samples``, as one made from Megatron's
        does.

        Raises:
            StateMismatchError: it is no saved state, of another version, or without what this data iterator needs.
        """
        check_state(state, self.VERSION, ("step", *ItemCursor.STATE_COUNTS))
        if self._closed is not None:
            raise RuntimeError(_CLOSED)
        self.settle()
        self._cursor.load_state_dict(state)
        self.moves += self._ahead is not None
        self._ahead = None
        self._failure = None
        # Alike on all ranks, whether they read or not: a distributed checkpoint takes each entry from one of them.
        self._step, self._data_at = state["step"], state["data_at"]

    def settle(self) -> None:
        """Wait for the background thread: until then the iterator is in its hands."""
        if self._ahead is not None:
            self._stats.wait_for(self._ahead)

    def close(self) -> None:
        """Wait for the step read ahead, drop it, and let go of the data iterator, so that its workers can end.

        Later steps are an error: what was read ahead is lost to them. ``state_dict`` still says where they would begin.
        """
        self.settle()
        self._ahead = None
        # The frames of a failure keep what they worked with.
        self._failure = ExchangeError(str(self._failure)) if isinstance(self._failure, ExchangeError) else None
        source = self._cursor.source
        self._cursor.release(self._data_at)
        if self._closed is None:
            try:
                self._closed = weakref.ref(source) if source is not None else lambda: None
            except TypeError:  # lists' iterators, for one; they hold no workers
                self._closed = lambda: source


class _ToldStagesError(Exception):
    """A failure that all pipeline stages know of already."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
