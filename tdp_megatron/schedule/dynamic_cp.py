"""``default_dynamic_cp``: the packing scheduler of Megatron's development branch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tdp_megatron import _C
from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.native import native_input
from tdp_megatron.schedule.packs import PlacedOp, plan_of_ops, plan_of_placed_ops
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem

__all__ = ["default_dynamic_cp", "default_dynamic_cp_reference", "dynamic_cp_within"]

#: No group gets more work than this times what a group full of sequences as long as the tallest would have.
_WORK_SLACK = 1.05


@dataclass(slots=True)
class _Group:
    cp_size: int
    tokens: int = 0
    work: float = 0.0
    members: list[int] = field(default_factory=list)


def default_dynamic_cp(problem: Problem, *, pad: str = "after", strict: bool = False) -> Plan:
    """One microbatch of all ranks after the other, each led by the tallest sequence left.

    The work of a sequence is ``s^2 / cp`` and nothing else. The tallest takes the smallest CP size that holds it; every
    other goes, longest first, where the work of the busiest group stays least: by rising CP size the oldest group with
    room, or a new one, under the token cap and 1.05 times the work of a group full of tallest sequences. Ranks that
    stay empty are given away by widening the narrowest groups, oldest first; where that leaves some, and all ranks
    are a CP size, everything that fits runs on all of them. Microbatches are halved, last first, until their number is
    a multiple of ``microbatches_multiple``.

    With ``pad="before"`` and lengths in whole multiples these are the groups of Megatron's development branch as of
    Aug 2026, rank by rank.

    Args:
        problem: what to schedule; the cost model plays no part.
        pad: ``"after"`` the CP size is known (2 * cp), or ``"before"``, as Megatron does (2 * ranks * sp).
        strict: raise where Megatron fails: ranks that no group can be widened to, or a number of microbatches that no
            halving makes a multiple. Otherwise dummy packs fill in.

    Raises:
        ScheduleError: padding before scheduling makes a sequence too long; or as ``strict`` says.
    """
    unit = _unit(problem, pad)
    first_rank, cp_size, offsets, sample_ids = _C.schedule_dynamic_cp(native_input(problem), unit)
    plan = plan_of_ops(problem, first_rank, cp_size, offsets, sample_ids, "default_dynamic_cp")
    return _finished(problem, plan, len(first_rank), unit, strict)


def dynamic_cp_within(problem: Problem, seconds: float) -> Plan | None:
    """The plan of ``default_dynamic_cp``, or None as soon as it is certain that its step takes longer than ``seconds``.

    For comparisons: most microbatches need not be made to see that another plan is better.
    """
    mode = problem.mode
    ops = _C.schedule_dynamic_cp_within(
        native_input(problem),
        seconds,
        mode.name == "lockstep",
        mode.name == "pipeline",
        (mode.stages - 1) / mode.virtual_stages,
    )
    return None if ops is None else plan_of_ops(problem, *ops, "default_dynamic_cp")


def default_dynamic_cp_reference(problem: Problem, *, pad: str = "after", strict: bool = False) -> Plan:
    """``default_dynamic_cp`` in plain Python; the native core gives the same plan."""
    layout = problem.layout
    unit = _unit(problem, pad)
    microbatches = _Microbatches(problem, (-(-problem.seqlens // unit) * unit).tolist()).all()
    ops: list[PlacedOp] = []
    for groups in microbatches:
        first = 0
        for group in groups:
            ops.append((first, group.cp_size, group.members))
            first += group.cp_size
        smallest = layout.cp_sizes[0]
        ops.extend((rank, smallest, []) for rank in range(first, layout.num_ranks, smallest))
    return _finished(problem, plan_of_placed_ops(problem, ops, "default_dynamic_cp"), len(ops), unit, strict)


def _unit(problem: Problem, pad: str) -> int:
    """Tokens to whose multiple sequences are padded before scheduling; refuses a sequence that then fits nowhere."""
    if pad not in ("after", "before"):
        raise ValueError(f"pad must be 'after' or 'before', got {pad!r}")
    layout = problem.layout
    unit = 2 * layout.num_ranks * layout.sp if pad == "before" else 1
    limit = layout.tokens_per_rank_limit * max(layout.cp_sizes)
    padded = -(-problem.seqlens // unit) * unit
    if pad == "before" and len(padded) and int(padded.max()) > limit:
        sample_id = int(np.argmax(padded))
        raise ScheduleError(
            f"sequence {sample_id} has {int(problem.seqlens[sample_id])} tokens, {int(padded[sample_id])} when padded "
            f"to a multiple of {unit}; the limit is {limit}: use pad='after'"
        )
    return unit


def _finished(problem: Problem, plan: Plan, num_ops: int, unit: int, strict: bool) -> Plan:
    """``plan``, of which the first ``num_ops`` ops were made by the algorithm, with its padding and checked."""
    if strict and len(problem.seqlens):
        idle = np.flatnonzero(np.diff(plan.op_offsets[: num_ops + 1]) == 0)
        if len(idle):
            raise ScheduleError(
                f"rank {int(plan.op_first_rank[idle[0]])} has nothing to do in a microbatch, and no group can be "
                f"widened to it (CP sizes are {list(problem.layout.cp_sizes)}, there are {problem.layout.num_ranks} "
                "ranks); strict=False adds a dummy pack"
            )
        if plan.num_ops > num_ops:
            raise ScheduleError(
                f"the number of microbatches cannot be made a multiple of {problem.limits.microbatches_multiple}: none "
                "has two groups that can be parted; strict=False adds dummy packs"
            )
    if unit == 1:
        return plan
    padded = (-(-plan.seqlens // unit) * unit)[plan.sample_ids]
    return Plan(
        plan.layout,
        plan.seqlens,
        plan.op_first_rank,
        plan.op_cp_size,
        plan.op_offsets,
        plan.sample_ids,
        padded,
        algorithm=plan.algorithm,
    )


class _Microbatches:
    """The groups of every microbatch, in each by falling CP size."""

    def __init__(self, problem: Problem, lengths: list[int]) -> None:
        layout = problem.layout
        self.layout = layout
        self.lengths = lengths
        self.limit = layout.tokens_per_rank_limit
        self.max_sequences = problem.max_sequences
        self.multiple = problem.limits.microbatches_multiple

    def all(self) -> list[list[_Group]]:
        alive = sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i))
        made = []
        while alive:
            groups, left = self._filled(alive)
            if not self._spread(groups) and self.layout.num_ranks in self.layout.cp_sizes:
                whole, others = self._on_all_ranks(alive)
                if whole.members:
                    groups, left = [whole], others
            made.append(groups)
            alive = left
        self._part(made)
        return made

    def _filled(self, alive: list[int]) -> tuple[list[_Group], list[int]]:
        free = self.layout.num_ranks
        cap, busiest = math.inf, 0.0
        groups: list[_Group] = []
        left: list[int] = []
        for i in alive:
            best_work, best_size, best_group = math.inf, 0, -1
            for k in self.layout.cp_sizes:
                tokens = self._padded([i], k)
                if tokens > self.limit * k:
                    continue
                added = float(self.lengths[i]) * self.lengths[i] / k
                for number, group in enumerate(groups):
                    fits = group.tokens + tokens <= self.limit * k and len(group.members) < self.max_sequences
                    if group.cp_size == k and fits:
                        work = max(busiest, group.work + added)
                        if work <= cap and work < best_work:
                            best_work, best_size, best_group = work, k, number
                work = max(busiest, added)
                if free >= k and work <= cap and work < best_work:
                    best_work, best_size, best_group = work, k, -1
                if not groups and best_size:
                    cap = float(self.lengths[i]) * float(self.limit) * _WORK_SLACK
                    break
            if best_size == 0:
                left.append(i)
                continue
            if best_group < 0:
                best_group = len(groups)
                groups.append(_Group(best_size))
                free -= best_size
            group = groups[best_group]
            group.tokens += self._padded([i], best_size)
            group.work += float(self.lengths[i]) * self.lengths[i] / best_size
            group.members.append(i)
            busiest = max(busiest, group.work)
        return groups, left

    def _spread(self, groups: list[_Group]) -> bool:
        """Widen groups until they have all ranks; whether they do."""
        sizes = self.layout.cp_sizes
        free = self.layout.num_ranks - sum(group.cp_size for group in groups)
        while free and groups:
            narrowest = groups[-1].cp_size
            wider = next((k for k in sizes if k > narrowest), narrowest + free + 1)
            first = next(at for at, group in enumerate(groups) if group.cp_size == narrowest)
            for at in range(first, len(groups)):
                if wider - narrowest <= free and self._padded(groups[at].members, wider) <= self.limit * wider:
                    break
            else:
                break
            # Falling sizes are aligned ones.
            group = groups.pop(at)
            group.cp_size = wider
            groups.insert(first, group)
            free -= wider - narrowest
        return free == 0

    def _on_all_ranks(self, alive: list[int]) -> tuple[_Group, list[int]]:
        k = self.layout.num_ranks
        whole = _Group(k)
        left = []
        for i in alive:
            tokens = self._padded([i], k)
            if whole.tokens + tokens <= self.limit * k and len(whole.members) < self.max_sequences:
                whole.tokens += tokens
                whole.members.append(i)
            else:
                left.append(i)
        return whole, left

    def _part(self, made: list[list[_Group]]) -> None:
        """Halve microbatches, from the last to the first and again, until their number is a multiple."""
        missing = -len(made) % self.multiple
        at, failed = len(made) - 1, 0
        while missing and failed < len(made):
            halves = self._halves(made[at])
            if halves is None:
                failed += 1
            else:
                made.append(halves[0])
                made[at] = halves[1]
                missing -= 1
                failed = 0
            at = (at if at > 0 else len(made)) - 1

    def _halves(self, groups: list[_Group]) -> tuple[list[_Group], list[_Group]] | None:
        ranks, num_ranks = 0, self.layout.num_ranks
        if len(groups) < 2 or sum(group.cp_size for group in groups) < num_ranks:
            return None
        cut = 0
        while ranks < num_ranks // 2:
            ranks += groups[cut].cp_size
            cut += 1
        first, second = (
            [_Group(group.cp_size, members=group.members) for group in part] for part in (groups[:cut], groups[cut:])
        )
        return (first, second) if self._spread(first) and self._spread(second) else None

    def _padded(self, members: list[int], k: int) -> int:
        return sum(self.layout.padded_seqlen(self.lengths[i], k) for i in members)
