"""``wrap_data_iterator`` and ``get_batch_on_this_rank_for_sequence_packing``: packing in a loop that exists already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tdp_megatron.loops.config import LoopConfig
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.loops.session import LoopStep, PackingSession
from tdp_megatron.types import PackedBatch

__all__ = ["PackedIterator", "get_batch_on_this_rank_for_sequence_packing", "packing_session", "wrap_data_iterator"]

#: Sessions by the iterator they read; the iterator is kept alive so that its id stays its own.
_SESSIONS: dict[tuple[int, int], tuple[Any, Any, PackingSession]] = {}


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

    def state_dict(self) -> dict[str, Any]:
        """State of the session: the position after this step."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the session to a saved position; the next ``wrap_data_iterator`` goes on from there."""
        self.session.load_state_dict(state)


def packing_session(data_iterator: Any, config: Any, pg_collection: Any = None) -> PackingSession:
    """The session behind a data iterator, made at the first call; for its ``state_dict`` and ``close``.

    Args:
        data_iterator: as for ``wrap_data_iterator``.
        config: as for ``wrap_data_iterator``.
        pg_collection: as for ``wrap_data_iterator``.
    """
    if isinstance(data_iterator, PackingSession):
        return data_iterator
    loop_config = LoopConfig.of(config)
    source = data_iterator
    if isinstance(data_iterator, Sequence):  # one iterator per virtual pipeline stage
        source = next((it for it in data_iterator if it is not None), None)
    # Ranks that do not read have no iterator to be known by; their configuration is.
    key = (id(config) if source is None else id(source), id(pg_collection))
    if key not in _SESSIONS:
        groups = LoopGroups.of(
            pg_collection,
            max_seqlen_per_dp_cp_rank=loop_config.max_seqlen_per_dp_cp_rank,
            sequence_parallel=loop_config.sequence_parallel,
            timeout_s=loop_config.data_timeout_s,
        )
        session = PackingSession(source, loop_config, groups)
        _SESSIONS[key] = (config if source is None else source, pg_collection, session)
    return _SESSIONS[key][2]


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
            ``pp``, or None for data parallelism alone.

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
