"""``validate``: a plan keeps every hard constraint, or an error says which op breaks which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.execution import execution_order
from tdp_megatron.schedule.plan import Plan, padded_seqlens
from tdp_megatron.types import Int64Array

__all__ = ["validate"]


def validate(
    plan: Plan,
    *,
    equal_count: bool = False,
    microbatches_multiple: int = 1,
    max_sequences_per_microbatch: int = 0,
    together: npt.ArrayLike | None = None,
    apart: npt.ArrayLike | None = None,
) -> None:
    """Check that ``plan`` can be executed and loses nothing.

    Always: every sequence in exactly one microbatch and padded enough (H1), tokens per rank under the cap (H2), rank
    blocks aligned, of an allowed CP size and inside the layout (H3), an order without deadlock (H4), at least one
    microbatch on every rank.

    Args:
        plan: what to check.
        equal_count: every rank has the same number of microbatches (H5).
        microbatches_multiple: and that number is a multiple of this (H5).
        max_sequences_per_microbatch: most sequences in one microbatch, 0 for no limit (H6).
        together: integers [n], sequences with the same key from 0 up share a microbatch (H7).
        apart: integers [n], sequences with the same key from 0 up do not (H7).

    Raises:
        ScheduleError: the first constraint broken, with op, ranks, sequence, value and limit.
    """
    _check_blocks(plan)
    _check_sequences(plan)
    _check_tokens(plan, max_sequences_per_microbatch)
    _check_counts(plan, equal_count, microbatches_multiple)
    _check_keys(plan, together, apart)
    execution_order(plan.op_first_rank, plan.op_cp_size, [plan.rank_ops(rank) for rank in range(plan.layout.num_ranks)])


def _first(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
    found = np.flatnonzero(mask)
    return int(found[0]) if len(found) else -1


def _name(plan: Plan, op: int) -> str:
    first, size = int(plan.op_first_rank[op]), int(plan.op_cp_size[op])
    return f"op {op} (rank {first})" if size == 1 else f"op {op} (ranks {first} to {first + size - 1})"


def _check_blocks(plan: Plan) -> None:
    layout = plan.layout
    bad = _first(~np.isin(plan.op_cp_size, layout.cp_sizes))
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, bad)} has CP size {int(plan.op_cp_size[bad])}, allowed are {list(layout.cp_sizes)}"
        )
    bad = _first((plan.op_first_rank < 0) | (plan.op_first_rank + plan.op_cp_size > layout.num_ranks))
    if bad >= 0:
        raise ScheduleError(f"{_name(plan, bad)} lies outside the {layout.num_ranks} ranks of the layout")
    bad = _first(plan.op_first_rank % plan.op_cp_size != 0)
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, bad)} starts at rank {int(plan.op_first_rank[bad])}, which is no multiple of its CP size "
            f"{int(plan.op_cp_size[bad])}: no process group has these ranks"
        )
    bad = _first(plan.op_group[1:] < plan.op_group[:-1])
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, bad + 1)} is in barrier group {int(plan.op_group[bad + 1])} after group "
            f"{int(plan.op_group[bad])}"
        )


def _check_sequences(plan: Plan) -> None:
    n = len(plan.seqlens)
    op_of_entry = _op_of_entry(plan)
    bad = _first((plan.sample_ids < 0) | (plan.sample_ids >= n))
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, int(op_of_entry[bad]))} holds sequence {int(plan.sample_ids[bad])}, there are {n}"
        )
    counts = np.bincount(plan.sample_ids, minlength=n)
    bad = _first(counts != 1)
    if bad >= 0:
        where = np.flatnonzero(plan.sample_ids == bad)
        if len(where) == 0:
            raise ScheduleError(f"sequence {bad} ({int(plan.seqlens[bad])} tokens) is in no microbatch")
        names = " and ".join(_name(plan, int(op_of_entry[entry])) for entry in where[:3])
        raise ScheduleError(f"sequence {bad} is placed {len(where)} times: in {names}")
    least = padded_seqlens(plan.seqlens[plan.sample_ids], plan.op_cp_size[op_of_entry])
    multiple = np.where(plan.op_cp_size > 1, 2 * plan.op_cp_size, 1)[op_of_entry]
    bad = _first((plan.padded_lengths < least) | (plan.padded_lengths % multiple != 0))
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, int(op_of_entry[bad]))} pads sequence {int(plan.sample_ids[bad])} to "
            f"{int(plan.padded_lengths[bad])} tokens; it has {int(plan.seqlens[plan.sample_ids[bad]])} and needs a "
            f"multiple of {int(multiple[bad])}"
        )


def _check_tokens(plan: Plan, max_sequences: int) -> None:
    limit = plan.layout.tokens_per_rank_limit
    bad = _first(plan.op_tokens_per_rank > limit)
    if bad >= 0:
        raise ScheduleError(
            f"{_name(plan, bad)} holds {int(plan.op_tokens_per_rank[bad])} tokens per rank, the limit is {limit}"
        )
    if max_sequences:
        sizes = np.diff(plan.op_offsets)
        bad = _first(sizes > max_sequences)
        if bad >= 0:
            raise ScheduleError(f"{_name(plan, bad)} holds {int(sizes[bad])} sequences, the limit is {max_sequences}")


def _check_counts(plan: Plan, equal_count: bool, multiple: int) -> None:
    counts = plan.num_microbatches_per_rank
    bad = _first(counts == 0)
    if bad >= 0:
        raise ScheduleError(f"rank {bad} has no microbatch; an idle rank needs a dummy pack")
    bad = _first(counts != counts[0])
    if equal_count and bad >= 0:
        raise ScheduleError(
            f"rank {bad} has {int(counts[bad])} microbatches, rank 0 has {int(counts[0])}; they must be equal"
        )
    bad = _first(counts % multiple != 0)
    if bad >= 0:
        raise ScheduleError(f"rank {bad} has {int(counts[bad])} microbatches, which is no multiple of {multiple}")


def _check_keys(plan: Plan, together: npt.ArrayLike | None, apart: npt.ArrayLike | None) -> None:
    op_of_sample = np.empty(len(plan.seqlens), dtype=np.int64)
    op_of_sample[plan.sample_ids] = _op_of_entry(plan)
    for name, keys in (("together", together), ("apart", apart)):
        if keys is None:
            continue
        first_of: dict[tuple[int, int], int] = {}
        for sample_id, key in enumerate(np.asarray(keys).tolist()):
            if key < 0:
                continue
            op = int(op_of_sample[sample_id])
            first = first_of.setdefault((key, op if name == "apart" else -1), sample_id)
            if name == "together" and int(op_of_sample[first]) != op:
                raise ScheduleError(
                    f"sequences {first} and {sample_id} belong together (key {key}), but are in "
                    f"{_name(plan, int(op_of_sample[first]))} and {_name(plan, op)}"
                )
            if name == "apart" and first != sample_id:
                raise ScheduleError(
                    f"sequences {first} and {sample_id} must be apart (key {key}), but are both in {_name(plan, op)}"
                )


def _op_of_entry(plan: Plan) -> Int64Array:
    return np.repeat(np.arange(plan.num_ops, dtype=np.int64), np.diff(plan.op_offsets))
