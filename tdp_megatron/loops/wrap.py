"""``wrap_data_iterator`` and ``get_batch_on_this_rank_for_sequence_packing``: packing in a loop that exists already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from tdp_megatron.distributed.collectives import all_gather_rows
from tdp_megatron.distributed.scatter_back import PlacedOutputs
from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops.checks import MOVED, check_reader, check_share
from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.loops.cursor import ItemCursor
from tdp_megatron.loops.groups import LoopGroups, membership
from tdp_megatron.loops.loop_step import LoopStep
from tdp_megatron.loops.scatter_back import readers_of, scatter_back
from tdp_megatron.loops.session import PackingSession, settle_all
from tdp_megatron.types import Int64Array, PackedBatch

__all__ = ["PackedIterator", "get_batch_on_this_rank_for_sequence_packing", "packing_session", "wrap_data_iterator"]

#: Per job (its default group), the groups of its loops by their members and what else they depend on.
_GROUPS: WeakKeyDictionary[Any, dict[Any, LoopGroups]] = WeakKeyDictionary()


class PackedIterator(Iterator[PackedBatch]):
    """The microbatches of one step, as ``wrap_data_iterator`` returns them."""

    def __init__(self, step: LoopStep, session: PackingSession) -> None:
        self.session = session
        self.step = step
        self._next = 0

    def __next__(self) -> PackedBatch:
        if self._next >= len(self.step.batches):
            raise StopIteration
        self._next += 1
        return self.step.batches[self._next - 1]

    def __len__(self) -> int:
        return len(self.step.batches)

    def scatter_back(self, outputs: torch.Tensor | Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What the model computed per token in this step, back at the samples, pads left out; all ranks call it.

        The next step may be in the making meanwhile, and later ones may have been handed out.

        Args:
            outputs: on the last pipeline stage, [T, ...] or [1, T, ...] of this rank's microbatches one after the
                other, or a list of them, one per microbatch; any dtype. With CP each rank gives its slice, as the
                microbatch was cut. TP ranks have the same outputs, and those other than 0 may give None, which they
                compare with nothing. Other pipeline stages' are not looked at.

        Returns:
            On all ranks of a data-parallel rank, those of other TP ranks and pipeline stages included, one tensor
            [seqlen, ...] per sample its data iterator gave for this step, in that order, on the CPU.

        Raises:
            TypeError, ValueError: outputs that are no tensors, or do not fit this rank's microbatches.
            ExchangeError: that has happened on another rank, ranks ask for different steps, or a rank is gone or late.
        """
        step, groups = self.step, self.session.groups
        may_miss = outputs is None and groups.tp_rank > 0
        return scatter_back(
            groups,
            step.number,
            step.plan,
            readers_of(step.refs, groups),
            lambda who: None if may_miss else PlacedOutputs.of(step.plan, groups.rank, outputs, who),
            source=groups.sessions.index(self.session),
        )

    def skip_to(self, consumed_samples: int) -> None:
        """Have the next ``wrap_data_iterator`` go on with that item; see ``PackingSession.skip_to``."""
        self.session.skip_to(consumed_samples)

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out further ranges (begin, end) of items; see ``PackingSession.skip``."""
        self.session.skip(ranges)

    def state_dict(self) -> dict[str, Any]:
        """State of the session: the position after the last step handed out."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the session to a saved position; the next ``wrap_data_iterator`` goes on from there."""
        self.session.load_state_dict(state)


def packing_session(data_iterator: Any, config: Any, pg_collection: Any = None) -> PackingSession:
    """The session behind a data iterator, made at the first call; for its ``state_dict`` and ``close``.

    All ranks call it together: those that read no data learn which iterator is meant. A loop may have several, such
    as one for training and one for validation.

    Args:
        data_iterator: as for ``wrap_data_iterator``.
        config: as for ``wrap_data_iterator``.
        pg_collection: as for ``wrap_data_iterator``.

    Raises:
        ValueError, TypeError: a rank that reads has no data iterator, or what is none, or a Shard for other ranks.
        ExchangeError: that has happened on the rank whose data this one receives, or a rank is gone or late. The other
            data-parallel ranks get it at their step.
    """
    if isinstance(data_iterator, PackingSession):
        return data_iterator
    loop_config = LoopConfig.of(config)
    groups = _groups_of(loop_config, pg_collection)
    source = data_iterator
    if isinstance(data_iterator, Sequence):  # one iterator per virtual pipeline stage
        source = next((it for it in data_iterator if it is not None), None)
    settle_all(groups)
    number = len(groups.sessions)
    problem: Exception | None = None
    begin = int(loop_config.consumed_samples)
    origin = ItemCursor.origin_of(source, begin)
    if groups.reads:
        number = next((i for i, s in enumerate(groups.sessions) if s.reads(source)), number)
        try:
            check_reader(source, groups)
            check_share(source, groups)
        except (TypeError, ValueError) as error:
            number, problem = _NONE, error
    moves = sum(session.moves for session in groups.sessions)
    (agreed, begin, origin, _), (last, *_) = _agreed_rows(groups, [number, begin, origin, moves])
    if problem is None and _MOVED in (agreed, last):
        problem = ValueError(MOVED)
    if problem is None and _NONE in (agreed, last):
        raise ExchangeError("the rank that reads the data for this one has no data iterator; see its own error")
    if problem is None and agreed != last:
        problem = ValueError(
            f"the last pipeline stage reads data iterator {last}, the first one {agreed} (counted as they were first "
            "used); give both the same"
        )
    if problem is not None:
        # The other data-parallel ranks may find nothing wrong, and begin a step.
        host = groups.dp_cp.data
        with host.telling_failures(host.step):
            raise problem
    if agreed == len(groups.sessions):
        return PackingSession(source, loop_config, groups, (begin, origin))
    return groups.sessions[agreed]


_NONE, _MOVED = -1, -2


def _groups_of(config: LoopConfig, pg_collection: Any) -> LoopGroups:
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group first; a single process may, too")
    known = _GROUPS.setdefault(dist.group.WORLD, {})
    key = (
        membership(pg_collection),
        config.max_seqlen_per_dp_cp_rank,
        config.sequence_parallel,
        config.data_timeout_s,
    )
    if key not in known:
        known[key] = LoopGroups.of(
            pg_collection,
            max_seqlen_per_dp_cp_rank=config.max_seqlen_per_dp_cp_rank,
            sequence_parallel=config.sequence_parallel,
            timeout_s=config.data_timeout_s,
        )
    return known[key]


def _agreed_rows(groups: LoopGroups, row: list[int]) -> list[list[int]]:
    """Facts of a session, as TP rank 0 of the first and of the last pipeline stage know them, on all receivers."""
    what = "choosing the data iterator"
    rows = np.array([row, row], dtype=np.int64)
    try:
        if groups.tp_rank == 0 and groups.pp is not None:
            rows = _with_moves(all_gather_rows(groups.pp, rows, what)[:, 0])[[0, -1]]
        if groups.tp is not None:
            rows = _with_moves(all_gather_rows(groups.tp, rows, what))[0]
    except ExchangeError as error:
        # A rank is gone; the first error that said so says most.
        failures = [session.failure for session in groups.sessions]
        raise next((failure for failure in failures if isinstance(failure, ExchangeError)), error) from None
    agreed: list[list[int]] = rows.tolist()
    return agreed


def _with_moves(rows: Int64Array) -> Int64Array:
    """Facts of several ranks; they have moved where the last one is not the same for all."""
    if (rows[..., -1] != rows[..., -1].flat[0]).any():
        rows[..., 0] = _MOVED
    return rows


def wrap_data_iterator(
    data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None
) -> tuple[PackedIterator | list[PackedIterator], int, int, int]:
    """Pack the next global batch of a loop's own data iterator and spread it over the ranks. Call it once per step.

    Only TP rank 0 of the first and of the last pipeline stage read; the others may pass None. The next step is read,
    planned and exchanged in the background while this one trains.

    Args:
        data_iterator: yields samples (mappings with ``tokens`` [S], and ``labels``, ``loss_mask``,
            ``position_ids``, ``original_seq_len``, ``padded_seq_len`` and user keys as there are), lists of them,
            batches or packed samples; the same items on the CP ranks of a data-parallel rank. A list with virtual
            pipelining.
        config: an object with ``max_seqlen_per_dp_cp_rank`` and other fields of ``LoopConfig``, such as
            Megatron's ``TransformerConfig``.
        num_microbatches: items to draw per data-parallel rank.
        pg_collection: Megatron's process group collection, a ``DeviceMesh`` with axes named ``dp``, ``cp``, ``tp``,
            ``pp``, or None for Megatron's own groups where they are set up, else for data parallelism alone.

    Returns:
        An iterator over packed microbatches (a list of them with virtual pipelining), their number, the sum of real
        lengths over the global batch and the sum of their squares, tokens.

    Raises:
        StopIteration: the data has ended, on all ranks.
        ExchangeError: a rank failed, is late, or its data ended early; all ranks raise it.
    """
    session = packing_session(data_iterator, config, pg_collection)
    step = session.next_step(num_microbatches)
    virtual = session.config.virtual_pipeline_model_parallel_size
    iterators: PackedIterator | list[PackedIterator] = PackedIterator(step, session)
    if virtual is not None and virtual > 1:
        iterators = [PackedIterator(step, session) for _ in range(virtual)]
    return iterators, len(step.batches), step.seqlen_sum, step.seqlen_squared_sum


def get_batch_on_this_rank_for_sequence_packing(
    data_iterator: PackedIterator,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: Any = None,
) -> tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    None,
    torch.Tensor | None,
    Any,
    torch.Tensor,
]:
    """The next microbatch as Megatron's forward step takes it, cut for this CP rank, on the current device.

    Args:
        data_iterator: from ``wrap_data_iterator``.
        vpp_size: virtual pipeline size, or None.
        mtp_on_this_rank: whether multi-token prediction runs here, which needs tokens on the last stage.
        vp_stage: this model chunk's number.
        pg_collection: not needed; the iterator knows its groups.

    Returns:
        tokens, labels, loss_mask, None (no attention mask), position_ids, PackedSeqParams, padding_mask. Tensors are
        [1, T]; tokens and positions only where the first layers run, labels and loss mask only where the last do.
        Pads hold zeros everywhere, and the padding mask is True there.
    """
    if not isinstance(data_iterator, PackedIterator):
        raise TypeError(f"data_iterator must come from wrap_data_iterator, got {type(data_iterator).__name__}")
    groups = data_iterator.session.groups
    batch = next(data_iterator)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    batch = batch.to(device, non_blocking=True)
    virtual = vpp_size is not None and vpp_size > 1
    if virtual and vp_stage is None:
        raise ValueError(f"with vpp_size {vpp_size} the number of the model chunk is needed: vp_stage")
    first = groups.is_first_stage and (not virtual or vp_stage == 0)
    last = groups.is_last_stage and (not virtual or vp_stage == (vpp_size or 1) - 1)
    inputs = first or (mtp_on_this_rank and last)
    pads = batch.padding_mask

    def row(values: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        return values.masked_fill(pads, 0).unsqueeze(0) if wanted and data_iterator.step.has_tokens else None

    return (
        row(batch.tokens, inputs),
        row(batch.labels, last),
        row(batch.loss_mask, last),
        None,
        row(batch.position_ids, inputs),
        batch.to_megatron(lengths="padded"),
        pads.unsqueeze(0),
    )
