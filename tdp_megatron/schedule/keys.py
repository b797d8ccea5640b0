"""Sequences that must, or must not, share a microbatch (constraint H7), for any algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.packs import PlacedOp, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Limits, Problem, pack_token_cap
from tdp_megatron.types import Int64Array, ParallelLayout

__all__ = ["bundles_of", "check_keys", "merged_length", "schedule_with_keys"]


def check_keys(name: str, keys: npt.ArrayLike | None, n: int) -> Int64Array | None:
    """Keys as int64 [n]; equal ones from 0 up belong together, -1 is no key."""
    if keys is None:
        return None
    array = np.asarray(keys)
    if array.size == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.shape != (n,):
        raise ValueError(f"{name} must have one key per sequence ({n}), got shape {array.shape}")
    if n and int(array.min()) < -1:
        raise ValueError(f"{name} keys are -1 for none, or from 0 up, got {int(array.min())}")
    return array.astype(np.int64)


def schedule_with_keys(
    problem: Problem,
    make_plan: Callable[[Problem], Plan],
    together: Int64Array | None,
    apart: Int64Array | None,
) -> Plan:
    """A plan in which sequences of one ``together`` key share a microbatch and those of one ``apart`` key do not.

    Those that belong together are scheduled as one sequence as long as all of them padded, which overstates their
    attention; those that must be apart are moved afterwards, into a microbatch with room or one of their own.

    Args:
        problem: what to schedule.
        make_plan: the algorithm.
        together, apart: int64 [n], -1 for none.

    Raises:
        ScheduleError: what belongs together does not fit into one microbatch, or must also be apart.
    """
    bundles = bundles_of(together, len(problem.seqlens))
    if together is not None and apart is not None:
        _check_not_both(bundles, together, apart)
    lengths = problem.seqlens.tolist()
    merged = np.array([merged_length(problem.layout, [lengths[i] for i in b]) for b in bundles], dtype=np.int64)
    _check_bundles_fit(problem, bundles, merged)
    largest = max(bundles, key=len, default=[0])
    longest = len(largest)
    limit = problem.limits.max_sequences_per_microbatch
    if limit and longest > limit:
        raise ScheduleError(
            f"sequences {largest[:8]} belong together, {longest} of them, and at most {limit} may share a microbatch; "
            "use fewer, or raise max_sequences_per_microbatch"
        )
    # A bundle counts as one sequence to the algorithm, so it gets the limit for the largest bundle.
    limits = Limits(problem.limits.equal_count, problem.limits.microbatches_multiple, limit // longest if limit else 0)
    inner = dataclasses.replace(problem, seqlens=merged, limits=limits)
    plan = make_plan(inner)
    ops = [(op.first_rank, op.cp_size, [bundles[i] for i in op.sample_ids]) for op in plan.ops]
    if apart is not None:
        ops = _separate(problem, ops, apart)
    placed: list[PlacedOp] = [(first, k, [i for bundle in packs for i in bundle]) for first, k, packs in ops]
    return plan_of_placed_ops(problem, placed, plan.algorithm, plan.op_group)


_BundleOp = tuple[int, int, list[list[int]]]


def bundles_of(together: Int64Array | None, n: int) -> list[list[int]]:
    """The n sequences by key, in the order of their first; those without key alone."""
    if together is None:
        return [[i] for i in range(n)]
    bundles: dict[int, list[int]] = {}
    for i, key in enumerate(together.tolist()):
        bundles.setdefault(key if key >= 0 else -2 - i, []).append(i)
    return list(bundles.values())


def merged_length(layout: ParallelLayout, seqlens: list[int]) -> int:
    """Tokens of sequences that are scheduled as one: as many as fit wherever that one fits."""
    if len(seqlens) == 1:
        return seqlens[0]
    return sum(layout.padded_seqlen(seqlen, layout.cp_sizes[-1]) for seqlen in seqlens)


def _check_bundles_fit(problem: Problem, bundles: list[list[int]], merged: Int64Array) -> None:
    longest = max(pack_token_cap(problem.layout, k) for k in problem.layout.cp_sizes)
    for bundle, length in zip(bundles, merged.tolist(), strict=True):
        if length > longest:
            raise ScheduleError(
                f"sequences {bundle[:8]} belong together and have {length} tokens when padded, the limit of a "
                f"microbatch is {longest}; use fewer, or raise max_seqlen_per_dp_cp_rank or the CP size"
            )


def _check_not_both(bundles: list[list[int]], together: Int64Array, apart: Int64Array) -> None:
    for bundle in bundles:
        keys = [key for key in apart[bundle].tolist() if key >= 0]
        if len(set(keys)) < len(keys):
            raise ScheduleError(
                f"sequences {bundle[:8]} belong together (key {int(together[bundle[0]])}), and two of them apart"
            )


def _separate(problem: Problem, ops: list[_BundleOp], apart: Int64Array) -> list[_BundleOp]:
    """Move what meets its own key: to the emptiest op that can take it, or to an op of its own at the end."""
    layout = problem.layout

    def tokens(packs: list[list[int]], k: int) -> int:
        return sum(layout.padded_seqlen(int(problem.seqlens[i]), k) for bundle in packs for i in bundle)

    def keys(bundle: list[int]) -> set[int]:
        return {key for key in apart[bundle].tolist() if key >= 0}

    kept: list[_BundleOp] = []
    moved: list[list[int]] = []
    present: list[set[int]] = []
    for first, k, packs in ops:
        met: set[int] = set()
        stay = []
        for bundle in packs:
            if keys(bundle) & met:
                moved.append(bundle)
            else:
                met |= keys(bundle)
                stay.append(bundle)
        kept.append((first, k, stay))
        present.append(met)
    held = [tokens(packs, k) for _, k, packs in kept]
    counts = [sum(map(len, packs)) for _, _, packs in kept]
    for bundle in moved:
        wanted = keys(bundle)
        best, best_share = -1, float("inf")
        for number, (_, k, _) in enumerate(kept):
            cap = pack_token_cap(layout, k)
            fits = held[number] + tokens([bundle], k) <= cap and counts[number] + len(bundle) <= problem.max_sequences
            if fits and not wanted & present[number] and held[number] / cap < best_share:
                best, best_share = number, held[number] / cap
        if best < 0:
            k = next(k for k in layout.cp_sizes if tokens([bundle], k) <= pack_token_cap(layout, k))
            best = len(kept)
            kept.append((0, k, []))
            present.append(set())
            held.append(0)
            counts.append(0)
        kept[best][2].append(bundle)
        present[best] |= wanted
        held[best] += tokens([bundle], kept[best][1])
        counts[best] += len(bundle)
    # Wide ones first and one block after the other, so that they fill whole waves and lockstep stays possible.
    first = 0
    added = []
    for _, k, packs in sorted(kept[len(ops) :], key=lambda op: -op[1]):
        added.append((first, k, packs))
        first = (first + k) % layout.num_ranks
    return kept[: len(ops)] + added
