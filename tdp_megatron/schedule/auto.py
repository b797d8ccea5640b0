"""``auto``: every algorithm that suits the mode, simulated; the shortest step wins."""

from __future__ import annotations

from collections.abc import Callable

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.buddy import buddy
from tdp_megatron.schedule.dp_balanced import dp_balanced
from tdp_megatron.schedule.dynamic_cp import default_dynamic_cp
from tdp_megatron.schedule.lpt import kk, lpt
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem
from tdp_megatron.schedule.simulate import step_seconds
from tdp_megatron.schedule.waves import waves

__all__ = ["auto"]

#: A plan this close to the lower bound is not worth another candidate.
_GOOD_ENOUGH = 1.005
#: The same for large batches, where a candidate takes long and luck plays no part.
_GOOD_ENOUGH_LARGE = 1.03
_LARGE = 16384
#: Differencing keeps a list per rank and pays off only for few sequences.
_MOST_SEQUENCES_FOR_KK = 512


def auto(problem: Problem) -> Plan:
    """The best of the algorithms for the mode by simulated step; never worse than ``dp_balanced``.

    Candidates that cannot hold the batch, such as static CP with a sequence too long for it, are passed over.
    """
    static = len(problem.layout.cp_sizes) == 1
    equal = problem.equal_count
    candidates: list[Callable[[Problem], Plan]] = [dp_balanced]
    if not equal and not static:
        candidates.append(buddy)
    candidates.append(waves if equal else lpt)
    if len(problem.seqlens) <= _MOST_SEQUENCES_FOR_KK:
        candidates.append(kk)
    candidates.append(lpt if equal else waves)
    candidates.append(default_dynamic_cp)
    if problem.mode.name == "pipeline" and len(problem.seqlens) >= _LARGE:
        # The lower bound knows nothing of bubbles and ends no search here; what is left out is far behind waves.
        candidates = candidates[:2]
    close = _GOOD_ENOUGH if len(problem.seqlens) < _LARGE else _GOOD_ENOUGH_LARGE
    good_enough = lower_bound(problem.seqlens, problem.layout, problem.cost) * close
    best, best_seconds, reason = None, float("inf"), None
    for candidate in candidates:
        try:
            plan = candidate(problem)
            seconds = step_seconds(plan, problem.cost, problem.mode)
        except ScheduleError as error:
            reason = error
            continue
        if seconds < best_seconds:
            best, best_seconds = plan, seconds
        if best_seconds <= good_enough and candidate is not dp_balanced:
            break
    if best is None:
        raise ScheduleError(f"no algorithm can place this batch: {reason}") from reason
    return best
