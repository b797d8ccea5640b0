"""``Pack``: a global batch of samples becomes a plan of packed microbatches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int, checked_names
from tdp_megatron.distributed import Exchange, GlobalSamples
from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.nodes.base import BeyondEndError, Node, SampleSource, draw_block, require_node, skip_samples
from tdp_megatron.nodes.left_out import LeftOut
from tdp_megatron.nodes.shard import Shard
from tdp_megatron.ops import allocate_pack, build_pack_table, pack_raw_tokens, packed_batches
from tdp_megatron.reading import FlatSamples, PackingKeys, read_block, read_spans_by_reader, token_key_specs
from tdp_megatron.samples import MappingReader
from tdp_megatron.schedule import CostModel, Mode, Plan, imbalance, schedule, validate
from tdp_megatron.schedule.api import DEFAULT_COST
from tdp_megatron.types import Int64Array, PackedBatch, ParallelLayout, SampleBlock

__all__ = ["GlobalBatch", "Pack"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """One planned global batch. Nothing has been read yet unless samples are to be exchanged."""

    index: int
    """Number of the global batch, from 0."""
    plan: Plan
    seqlens: Int64Array
    """int64 [N], real lengths."""
    num_loss_tokens: Int64Array
    """int64 [N], -1 where only the content tells."""
    refs: Int64Array
    """int64 [N, 2], (dataset_id, sample_id)."""
    block: SampleBlock | None
    """All samples of the global batch, lazily; None when each rank has read its own."""
    exchange: Exchange | None = None
    samples: GlobalSamples | None = None
    """With an exchange: who has read what."""
    local: FlatSamples | None = None
    """With an exchange: what this rank has read."""

    def pack(
        self,
        rank: int,
        *,
        pad_id: int = 0,
        cp_group: Any = lambda first_rank, cp_size: None,
        device: torch.device | str | None = None,
    ) -> tuple[PackedBatch, ...]:
        """The microbatches of one rank: read (or exchange) just the tokens it trains on, and pack them.

        Args:
            rank: DP x CP rank; with an exchange it must be this process's.
            pad_id: token id at pads.
            cp_group: process group of a block (first_rank, cp_size).
            device: where the packs are wanted; None for host memory. On a GPU the packs of token files are made there,
                by one kernel; others are copied there.

        Raises:
            ValueError: with an exchange, another rank than this process's.
            ExchangeError: with an exchange, another rank that fails or is late.
        """
        where = torch.device("cpu" if device is None else device)
        if where.type != "cpu":
            if self.block is not None:
                table = build_pack_table(self.plan, rank)
                packed = pack_raw_tokens(self.plan, table, self.block, pad_id=pad_id, cp_group=cp_group, device=where)
                if packed is not None:
                    return packed
            batches = self.pack(rank, pad_id=pad_id, cp_group=cp_group)
            return tuple(batch.to(where, non_blocking=True) for batch in batches)
        if self.block is None:
            if self.exchange is None or self.samples is None or self.local is None:
                raise ValueError("a global batch without a block needs an exchange and its samples")
            host = self.exchange.host
            if rank != host.rank:
                raise ValueError(f"rank {rank} is not this process's rank {host.rank}")
            values: Mapping[int, Mapping[str, Any]]
            with host.telling_failures(self.index):
                table, buffers, values = self.exchange.run(
                    self.index, self.plan, self.samples, self.local, pad_id=pad_id
                )
                return packed_batches(self.plan, table, buffers, self.refs, values=values, cp_group=cp_group)
        table = build_pack_table(self.plan, rank)
        specs = token_key_specs(self.block.readers)
        buffers = allocate_pack(table, specs, pad_id=pad_id)
        wanted = {key: buffers.arrays[key] for key in specs}
        read_spans_by_reader(self.block, table.sample_ids, table.starts, table.lengths, table.destinations, wanted)
        readers, ids = self.block.reader_index, self.block.sample_ids
        values = {i: self.block.readers[int(readers[i])].sample_values(int(ids[i])) for i in table.held.tolist()}
        return packed_batches(self.plan, table, buffers, self.refs, values=values, cp_group=cp_group)


class Pack(Node[GlobalBatch]):
    """Collects global batches and plans them; reads no token of lazy samples.

    Without ``exchange`` the source must give the same global order on every rank: each rank plans the whole global
    batch from lengths alone and reads only its own share. With ``exchange`` the source gives each rank its own
    samples, ``global_batch_size / R`` per step, whose lengths are gathered.

    Args:
        source: samples.
        layout: DP, CP, and the cap on tokens per rank.
        global_batch_size: samples per global batch.
        algorithm: name of a scheduling algorithm, see ``tdp_megatron.schedule.algorithms``.
        cost: cost model; None for the default.
        mode: execution mode the plan is made for.
        exchange: how ranks swap the samples they read. Keys that are not per token must then be tensors, arrays, plain
            Python values, or lists, tuples, sets and dicts of them; they arrive as what they were, others are an error.
        drop_last: whether a last, smaller global batch is left out.
        token_keys: user keys that have one entry per token and are packed like ``tokens``.
        together_key: user key with an int per sample, such as a conversation's number: the samples of a global batch
            with the same one from 0 up share a microbatch, -1 is none.
        apart_key: user key with an int per sample: those with the same one from 0 up are in different microbatches.
        check_plans: validate every plan, the limits, the keys and what the mode asks for included.
        consumed_samples: where to begin when there is no saved state, such as Megatron's ``consumed_samples``; whole
            global batches.
        skip: global batches (begin, end) to leave out, such as a stretch that made the loss spike; nothing of them is
            read, and the others keep their numbers.
        **limits: further arguments of ``schedule``, such as ``equal_count``.

    Raises:
        ValueError, TypeError: a bad argument.
        ScheduleError: at a step, a sample that fits no rank; the message names its place in the data.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        layout: ParallelLayout,
        *,
        global_batch_size: int,
        algorithm: str = "auto",
        cost: CostModel | None = None,
        mode: str = "free",
        exchange: Exchange | None = None,
        drop_last: bool = True,
        token_keys: Sequence[str] = (),
        together_key: str | None = None,
        apart_key: str | None = None,
        check_plans: bool = False,
        consumed_samples: int = 0,
        skip: Sequence[tuple[int, int]] = (),
        **limits: Any,
    ) -> None:
        super().__init__()
        require_node(source)
        global_batch_size = checked_int("global_batch_size", global_batch_size, least=1)
        consumed_samples = checked_int("consumed_samples", consumed_samples)
        if exchange is not None and not isinstance(exchange, Exchange):
            raise TypeError(f"exchange must be an Exchange, got {type(exchange).__name__}")
        if exchange is not None:
            ranks = exchange.num_ranks
            if ranks != layout.num_ranks:
                raise ValueError(f"the exchange has {ranks} ranks, the layout {layout.num_ranks}")
            if global_batch_size % ranks:
                lower = global_batch_size // ranks * ranks
                nearest = [str(size) for size in (lower, lower + ranks) if size]
                raise ValueError(
                    f"global_batch_size {global_batch_size} is not divisible by the {ranks} ranks that read it; "
                    f"nearest valid sizes: {', '.join(nearest)}"
                )
        if consumed_samples < 0 or consumed_samples % global_batch_size:
            lower = max(consumed_samples, 0) // global_batch_size * global_batch_size
            raise ValueError(
                f"consumed_samples {consumed_samples} is not a multiple of global_batch_size {global_batch_size}; "
                f"nearest: {lower}, {lower + global_batch_size}"
            )
        left_out = LeftOut("skip", skip)
        self.source = source
        self.layout = layout
        self.consumed_samples = consumed_samples
        self.skip = left_out.ranges
        self.left_out = left_out
        self._begins_at = consumed_samples // global_batch_size
        self.global_batch_size = global_batch_size
        self.algorithm = algorithm
        self.cost = cost
        self.mode = mode
        self.exchange = exchange
        self.drop_last = drop_last
        self.token_keys = checked_names("token_keys", token_keys)
        self.keys = PackingKeys(together_key, apart_key)
        self.check_plans = check_plans
        self.limits = limits
        names = ("equal_count", "microbatches_multiple", "max_sequences_per_microbatch")
        self._checked_limits = {name: limits[name] for name in names if name in limits}
        if Mode.parse(mode).needs_equal_count:
            self._checked_limits["equal_count"] = True
        # Wrong names and types show here, not at the first step.
        self._plan(np.zeros(0, dtype=np.int64), np.zeros((0, len(self.keys.names)), dtype=np.int64))

    def fingerprint(self) -> dict[str, Any]:
        return {"global_batch_size": self.global_batch_size}

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        self._ended = False
        self._is_spent = state is not None and self._ends_in_stretch(position, state[self.SOURCE_KEY])
        self.source.reset(None if state is None else state[self.SOURCE_KEY])
        if state is None:
            skip_samples(self.source, position * self._share)

    def _ends_in_stretch(self, position: int, state: Any) -> bool:
        """Whether the data ended in a stretch that is left out: then nothing of that has been passed over.

        Raises:
            StateMismatchError: the source is from another moment; only a last, smaller batch makes it differ.
        """
        # A shard counts the samples of all ranks; what other sources of an exchange count depends on the ranks.
        counts_all = isinstance(self.source, Shard) or (self.exchange is None and isinstance(self.source, SampleSource))
        drawn = state.get(self.POSITION_KEY) if counts_all and isinstance(state, Mapping) else None
        expected = position * self.global_batch_size
        if not isinstance(drawn, int):
            return False
        if drawn < expected and any(end == position for _, end in self.skip):
            return True
        if abs(drawn - expected) >= self.global_batch_size:
            raise StateMismatchError(
                f"Pack: the saved state says {position} global batches, that is {expected} samples, but its source "
                f"({type(self.source).__name__}) has handed out {drawn}: they are from different moments. Load a state "
                "as it was saved, and leave out samples with skip or skip_to of Pack, not of its source"
            )
        return False

    _source_state_keys = ("source",)

    def _source_state(self) -> dict[str, Any]:
        return {self.SOURCE_KEY: self.source.state_dict()}

    @property
    def _share(self) -> int:
        """Samples of a global batch that this rank's source gives."""
        return self.global_batch_size // (1 if self.exchange is None else self.exchange.num_ranks)

    def skip_to(self, step: int) -> None:
        """Go on with global batch ``step``; nothing is read.

        Raises:
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        step = checked_int("step", step)
        if not self._is_open:
            self.reset(None)
        if step < self._position:
            raise ValueError(f"Pack: cannot go back from global batch {self._position} to {step}; reset first")
        skip_samples(self.source, (step - self._position) * self._share)
        self._position = step

    def _plan(self, seqlens: Int64Array, keys: Int64Array, refs: Int64Array | None = None) -> Plan:
        keyed = self.keys.arguments(keys)
        try:
            plan = schedule(seqlens, self.layout, self.cost, self.mode, self.algorithm, **keyed, **self.limits)
            if self.check_plans:
                validate(plan, **keyed, **self._checked_limits)
        except ScheduleError as error:
            where = ""
            if refs is not None and len(refs):
                longest = int(np.argmax(seqlens))
                dataset, sample = refs[longest].tolist()
                where = f" (the longest, sequence {longest}, is sample {sample} of dataset {dataset})"
            raise ScheduleError(f"global batch {self._position}: {error}{where}") from error
        return plan

    def _next(self) -> GlobalBatch:
        if self._ended:
            raise StopIteration
        end, _ = self.left_out.next_run(self._position)
        if end > self._position:
            self._leave_out(end)
        batch = self._drawn() if self.exchange is None else self._exchanged(self.exchange)
        self._position += 1
        self.stats.observe("imbalance", imbalance(batch.plan, self.cost or DEFAULT_COST))
        self.stats.items += 1
        self.stats.tokens += int(batch.seqlens.sum())
        return batch

    def _leave_out(self, end: int) -> None:
        try:
            self.skip_to(end)
        except BeyondEndError:  # the data ends inside the stretch
            self._is_spent = True
            self._position = end

    def _draw(self, n: int) -> SampleBlock:
        if self._is_spent:
            return SampleBlock.concatenate([])
        if self.exchange is None:
            return draw_block(self.source, n, 0, self._position * n)
        # Ranks take turns, so that no two samples of the job have one number.
        ranks = self.exchange.num_ranks
        return draw_block(self.source, n, 0, self._position * n * ranks + self.exchange.host.rank, ranks)

    def _finish(self, count: int) -> None:
        if count < self.global_batch_size:
            self._ended = True
            if count and self.drop_last and not self._position:
                logger.warning(
                    "the data holds %d samples, fewer than one global batch of %d; with drop_last there is no step",
                    count,
                    self.global_batch_size,
                )
            if not count or self.drop_last:
                raise StopIteration

    def _drawn(self) -> GlobalBatch:
        with self.stats.waiting():
            block = self._draw(self.global_batch_size)
            declare_token_keys(block, self.token_keys)
            keys = self.keys.read(block)
        self._finish(len(block))
        with self.stats.working():
            return GlobalBatch(
                index=self._position,
                plan=self._plan(block.seqlens, keys, block.refs),
                seqlens=block.seqlens,
                num_loss_tokens=block.num_loss_tokens,
                refs=block.refs,
                block=block,
            )

    def _exchanged(self, exchange: Exchange) -> GlobalBatch:
        share = self._share
        error: Exception | None = None
        local: FlatSamples | None = None
        keys: Int64Array | None = None
        with self.stats.waiting():
            try:
                block = self._draw(share)
                declare_token_keys(block, self.token_keys)
                keys = self.keys.read(block)
                local = read_block(block)
            except Exception as failure:  # told to all ranks, then raised on all of them
                error = failure
            samples = exchange.gather(
                self._position,
                local,
                0 if local is None else share - len(local.block),
                facts=keys,
                num_facts=len(self.keys.names),
                error=error,
                has_more=lambda: len(self._draw(1)) > 0,
                place=f"global batch {self._position} of {self.global_batch_size} samples without {list(self.skip)}",
                planned_by={"algorithm": self.algorithm, "layout": self.layout, "mode": self.mode, "cost": self.cost}
                | self.limits,
            )
        self._finish(len(samples))
        with self.stats.working(), exchange.host.telling_failures(self._position):
            return GlobalBatch(
                index=self._position,
                plan=self._plan(samples.seqlens, samples.facts, samples.refs),
                seqlens=samples.seqlens,
                num_loss_tokens=samples.num_loss_tokens,
                refs=samples.refs,
                block=None,
                exchange=exchange,
                samples=samples,
                local=local,
            )


def declare_token_keys(block: SampleBlock, token_keys: tuple[str, ...]) -> None:
    """Treat user keys of a block's samples as per token.

    Raises:
        ValueError: some samples do not carry them.
    """
    if not token_keys:
        return
    for reader in block.readers:
        if not isinstance(reader, MappingReader):
            raise ValueError(f"token_keys {token_keys} need samples that carry them; token files do not")
        reader.declare_token_keys(token_keys)
