"""``HybridCPDataLoaderWrapper``: whole sequences moved to the ranks that hybrid context parallelism runs them on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tdp_megatron.arguments import checked_int
from tdp_megatron.distributed import Exchange
from tdp_megatron.distributed.scatter_back import PlacedOutputs, SampleReaders
from tdp_megatron.loops.checks import check_goes_on, check_reader, check_share, check_state, naming_the_longest
from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.loops.cursor import ItemCursor, LeftOutItems
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.loops.loop_stats import LoopStats
from tdp_megatron.loops.microbatch import LocalSamples, read_microbatches
from tdp_megatron.loops.scatter_back import readers_of, scatter_back
from tdp_megatron.ops import RankSpans
from tdp_megatron.schedule import schedule, validate
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.scatter_back import RankOutputs
from tdp_megatron.torch_dtypes import tensor_of
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["HybridCPDataLoaderWrapper"]


class HybridCPDataLoaderWrapper:
    """Gives each DP x CP rank its sequences of a global batch, and everybody the schedule.

    Args:
        data_iterator: yields lists of packed samples (with ``cu_seqlens``) or of plain ones; the same on the CP
            ranks of a data-parallel rank. A ``Shard`` below our ``Loader`` must deal out to the data-parallel ranks.
            None on TP ranks other than 0, which get (None, None).
        config: an object with ``max_seqlen_per_dp_cp_rank``.
        pg_collection: process groups ``dp_cp``, ``dp``, ``tp``, ``cp``, a ``DeviceMesh``, or None.
        algorithm: name of a scheduling algorithm that knows dynamic CP.
        first_step: number of the first global batch when there is no saved state. A data iterator with
            ``skip_items(n)``, as that of our ``Loader``, is taken there from its beginning; another must stand there,
            as one made from Megatron's ``consumed_samples`` does.
        skip: global batches (begin, end) to leave out, such as a stretch that made the loss spike; the others keep
            their numbers. Nothing of them is read where the data iterator has ``skip_items``.
    """

    VERSION = 2

    def __init__(
        self,
        data_iterator: Iterator[Any] | None,
        config: Any,
        pg_collection: Any = None,
        *,
        algorithm: str = "balanced_hybrid_cp",
        first_step: int = 0,
        skip: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.data_iterator = data_iterator
        self.config = config
        loop_config = LoopConfig.of(config)
        if loop_config.keys.names:
            raise ValueError(
                "HybridCPDataLoaderWrapper runs each sample by itself; together_key and apart_key are for "
                "wrap_data_iterator"
            )
        if loop_config.consumed_samples or loop_config.skip_samples:
            raise ValueError(
                "HybridCPDataLoaderWrapper counts global batches, one item of each data iterator; give it first_step "
                "and skip instead of consumed_samples and skip_samples in the config"
            )
        self._check_plans = loop_config.check_plans
        self.groups = LoopGroups.of(
            pg_collection,
            max_seqlen_per_dp_cp_rank=loop_config.max_seqlen_per_dp_cp_rank,
            sequence_parallel=loop_config.sequence_parallel,
            timeout_s=loop_config.data_timeout_s,
        )
        self.algorithm = algorithm
        ranks = self.groups.layout.num_ranks
        self._layout = ParallelLayout(
            dp=ranks,
            cp=1,
            max_seqlen_per_dp_cp_rank=loop_config.max_seqlen_per_dp_cp_rank,
            cp_sizes=tuple(1 << i for i in range(ranks.bit_length()) if ranks % (1 << i) == 0),
            tail_multiple=1,
        )
        self._exchange = Exchange(self.groups.dp_cp)
        self._left_out = LeftOutItems("skip", skip)
        # An item of every rank is one global batch: items are numbered like steps.
        self._cursor = ItemCursor(data_iterator, 0, 1, self._left_out, checked_int("first_step", first_step, least=0))
        self._stats = LoopStats(type(self).__name__)
        self._last: int | None = None  # number of the last global batch
        self._given: tuple[Plan, SampleReaders] | None = None  # of the last global batch
        self._failure: Exception | None = None

    def __iter__(self) -> HybridCPDataLoaderWrapper:
        return self

    def __next__(self) -> tuple[dict[int, dict[str, Any]] | None, list[list[list[int]]] | None]:
        """The next global batch.

        Returns:
            This rank's samples by their number in the global batch, and per group of the schedule the numbers that
            each DP x CP rank runs. Numbers count the data-parallel ranks' samples one rank after the other.

        Raises:
            StopIteration: the data has ended, on all ranks.
            ExchangeError: a rank failed, is late, or its data ended early.
        """
        if self._failure is not None:
            raise self._failure
        cursor = self._cursor
        end = cursor.end_of(1)
        result: tuple[dict[int, dict[str, Any]] | None, list[list[list[int]]] | None] = None, None
        if self.data_iterator is not None or self.groups.reads:
            try:
                result = self._next(cursor, end)
            except Exception as error:
                self._failure = error
                raise
        elif end is None:
            raise StopIteration
        assert end is not None
        self._last = end - 1
        cursor.move(end, data_at=end)
        return result

    def _next(self, cursor: ItemCursor, end: int | None) -> tuple[dict[int, dict[str, Any]], list[list[list[int]]]]:
        error: Exception | None = None
        local: LocalSamples | None = None
        missing = 1
        step = cursor.begin if end is None else end - 1
        with self._stats.made.waiting():
            try:
                items: list[Any] = []
                check_reader(self.data_iterator, self.groups)
                check_share(self.data_iterator, self.groups)
                if end is not None:
                    items, missing = cursor.read(end)
                local = read_microbatches(items, self.groups)
            except Exception as failure:  # told to all ranks, then raised on all of them
                error = failure
            samples = self._exchange.gather(
                step,
                None if local is None else local.flat,
                missing,
                order=None if local is None else local.order,
                error=error,
                has_more=lambda: True,  # it has just given an item
                place=f"steps {cursor.describe(end)}",
                shared=(self.groups.layout.cp, 0 if local is None else local.shared),
                planned_by={"algorithm": self.algorithm, "layout": self._layout},
            )
        if samples.ended or local is None:
            raise StopIteration
        with self._exchange.host.telling_failures(step), self._stats.made.working():
            with naming_the_longest(step, samples.seqlens, samples.refs):
                plan = schedule(samples.seqlens, self._layout, algorithm=self.algorithm)
            self._given = plan, readers_of(samples.refs, self.groups)
            if not len(samples):  # no rank could say which keys there are
                return {}, _groups_of(plan)
            if self._check_plans:
                validate(plan)
            wanted = [_samples_of_rank(plan, r) for r in range(self._exchange.num_ranks)]
            mine = wanted[self.groups.rank]
            lengths = samples.seqlens[mine]
            self._stats.count(plan, int(lengths.sum()))
            out = {
                key: np.zeros((int(lengths.sum()), *shape), dtype=dtype)
                for key, (dtype, shape) in self._exchange.token_keys.items()
            }
            if "position_ids" in out:
                out["position_ids"][:] = np.arange(int(lengths.sum())) - np.repeat(
                    np.cumsum(lengths) - lengths, lengths
                )
            spans = RankSpans.whole(wanted, samples.seqlens)
            values = self._exchange.transfer(step, spans, samples, local.flat, out)
            tensors = {key: tensor_of(array) for key, array in out.items()}
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
            if device is not None:
                tensors = {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
            begins = (np.cumsum(lengths) - lengths).tolist()
            mapped: dict[int, dict[str, Any]] = {}
            for i, begin, length in zip(mine.tolist(), begins, lengths.tolist(), strict=True):
                mapped[i] = {key: tensor[begin : begin + length] for key, tensor in tensors.items()}
                mapped[i].update(values[i])
            return mapped, _groups_of(plan)

    def scatter_back(self, outputs: Mapping[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What the model computed per token of the last global batch, back at the samples; all ranks call it.

        Args:
            outputs: by number, those of this rank's samples: [n, ...] or [1, n, ...] of the whole sample where it runs
                on one rank, else of this rank's slice of it, which was padded to a multiple of 2 * cp_size tokens; any
                dtype. None on TP ranks other than 0.

        Returns:
            On all ranks of a data-parallel rank, one tensor [seqlen, ...] per sample that its data iterator gave, in
            that order, on the CPU.

        Raises:
            RuntimeError: there was no global batch yet.
            TypeError, ValueError: outputs that are no tensors, or do not fit this rank's samples.
            ExchangeError: that has happened on another rank, or a rank is gone or late.
        """
        given, rank = self._given, self.groups.rank

        def look(who: str) -> PlacedOutputs | None:
            if self.data_iterator is None:
                return None
            if given is None:
                raise RuntimeError("there was no global batch yet whose outputs could be sent back")
            return _placed(given[0], rank, {} if outputs is None else outputs, who)

        step = None if given is None else self._last
        plan, readers = (None, None) if given is None else given
        return scatter_back(self.groups, step, plan, readers, look)

    def stats(self) -> dict[str, Any]:
        """What this rank's data runtime has done since it was made, in the form of ``Loader.stats``.

        Returns:
            ``"HybridCPDataLoaderWrapper"``, and the nodes of the data iterator where it is a loader's.
        """
        return self._stats.as_dict(self.data_iterator)

    def skip_to(self, step: int) -> None:
        """Go on with global batch ``step``. All ranks call it; beyond the end of the data, the next one is an error.

        Raises:
            TypeError: it is no integer.
            ValueError: it lies behind the present position.
        """
        check_goes_on(self._failure)
        self._cursor.skip_to(step)

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out further global batches (begin, end). All ranks call it; they are in the state until passed.

        Raises:
            TypeError: something else than pairs of ints.
            ValueError: a pair without 0 <= begin <= end.
        """
        check_goes_on(self._failure)
        self._left_out.add(ranges)

    def state_dict(self) -> dict[str, Any]:
        """Number of the next global batch, and the data iterator's own state, if it has one."""
        self._cursor.stand_at_next()
        return {"version": self.VERSION, **self._cursor.state_dict(self._cursor.begin)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; an iterator without ``load_state_dict`` must stand there already.

        Raises:
            StateMismatchError: it is no saved state, or of another version.
        """
        check_state(state, self.VERSION, ItemCursor.STATE_COUNTS)
        self._cursor.load_state_dict(state)
        self._given = self._last = self._failure = None


def _samples_of_rank(plan: Plan, rank: int) -> Int64Array:
    """Numbers of all samples a rank runs, rising."""
    parts = [plan.sample_ids[plan.op_offsets[op] : plan.op_offsets[op + 1]] for op in plan.rank_ops(rank).tolist()]
    return np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)


def _groups_of(plan: Plan) -> list[list[list[int]]]:
    """Per barrier group, per rank, the samples in order."""
    groups: list[list[list[int]]] = [
        [[] for _ in range(plan.layout.num_ranks)] for _ in range(int(plan.op_group.max(initial=-1)) + 1)
    ]
    for op, group in zip(plan.ops, plan.op_group.tolist(), strict=True):
        for rank in op.ranks:
            groups[group][rank].extend(op.sample_ids)
    return groups


def _placed(plan: Plan, rank: int, outputs: Mapping[int, torch.Tensor], who: str) -> PlacedOutputs:
    """A rank's outputs by sample, each at its place in the rank's packs."""
    lengths: dict[int, int] = {}
    begins: list[int] = []
    end = 0
    for number in plan.rank_ops(rank).tolist():
        op, at = plan.ops[number], end
        for i, padded in zip(op.sample_ids, op.padded_lengths, strict=True):
            lengths[i] = padded // op.cp_size
            begins.append(at)
            at += lengths[i]
        end += int(plan.op_tokens_per_rank[number])
    if outputs.keys() != lengths.keys():
        raise ValueError(
            f"{who} has outputs of the samples {sorted(outputs)[:8]}, the plan gives it {sorted(lengths)[:8]}: "
            f"missing {sorted(lengths.keys() - outputs.keys())[:8]}, "
            f"not its own {sorted(outputs.keys() - lengths.keys())[:8]}"
        )
    of_rank = RankOutputs.of_parts([outputs[i] for i in lengths], list(lengths.values()), who)
    return PlacedOutputs(of_rank, np.array(begins, dtype=np.int64))
