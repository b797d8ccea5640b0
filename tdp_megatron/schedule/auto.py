"""``auto``: every algorithm that suits the mode, simulated; the shortest step wins."""

from __future__ import annotations

import math
from collections.abc import Callable

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.buddy import buddy
from tdp_megatron.schedule.dp_balanced import dp_balanced
from tdp_megatron.schedule.dynamic_cp import dynamic_cp_within
from tdp_megatron.schedule.hybrid_cp import balanced_hybrid_cp
from tdp_megatron.schedule.lpt import kk, lpt
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.problem import Problem
from tdp_megatron.schedule.simulate import step_seconds
from tdp_megatron.schedule.waves import waves

__all__ = ["auto"]

#: A plan this close to the lower bound is not worth another candidate.
_GOOD_ENOUGH = 1.005
#: The same for large batches, where a candidate takes long and luck plays no part: from so many sequences on, and where
#: ranks have equal numbers of microbatches, for which ``waves`` is ahead of all others.
_GOOD_ENOUGH_LARGE = ((16384, 1.03, False), (4096, 1.01, True))
#: Differencing pays off, if ever, only for few sequences, and so does hybrid CP, which is plain Python.
_FEW_SEQUENCES = 512
#: From so many on static CP in equal numbers of microbatches has no chance against ``waves``.
_MANY_SEQUENCES = 4096

#: A plan of the problem; None where it is certain to take longer than so many seconds.
Candidate = Callable[[Problem, float], Plan | None]


def auto(problem: Problem) -> Plan:
    """The best of the algorithms for the mode by simulated step; never worse than ``dp_balanced``.

    Where ranks run free: ``dp_balanced``, ``buddy``, ``lpt``, ``waves``, ``default_dynamic_cp``; where they must have
    equal numbers of microbatches: ``dp_balanced``, ``waves``, ``lpt`` with static CP or below 4,096 sequences, then
    ``default_dynamic_cp``. Up to 512 sequences also ``kk``, and ``balanced_hybrid_cp`` where numbers may differ. The
    search ends with the first plan within 0.5 % of the lower bound; 1 % from 4,096 sequences on where numbers are
    equal, 3 % from 16,384 on. ``best_fit`` knows nothing of time and ``stream`` works on a part of the batch at a time:
    neither is tried. Candidates that cannot hold the
    batch, such as static CP with a sequence too long for it, are passed over.
    """
    static = len(problem.layout.cp_sizes) == 1
    few = len(problem.seqlens) <= _FEW_SEQUENCES
    candidates = [_whole(dp_balanced)]
    if problem.equal_count:
        candidates.append(_whole(waves))
    else:
        candidates += [_whole(lpt)] if static else [_whole(buddy), _whole(lpt)]
    if few:
        candidates.append(_whole(kk))
    if not problem.equal_count:
        candidates.append(_whole(waves))
    elif static or len(problem.seqlens) < _MANY_SEQUENCES:
        candidates.append(_whole(lpt))
    if few and not problem.equal_count and not static:
        candidates.append(_whole(balanced_hybrid_cp))
    candidates.append(dynamic_cp_within)
    close = _GOOD_ENOUGH
    for least, factor, only_equal in _GOOD_ENOUGH_LARGE:
        if len(problem.seqlens) >= least and (problem.equal_count or not only_equal):
            close = max(close, factor)
    good_enough = lower_bound(problem.seqlens, problem.layout, problem.cost) * close
    best, best_seconds, reason = None, math.inf, None
    for number, candidate in enumerate(candidates):
        try:
            plan = candidate(problem, best_seconds)
            seconds = math.inf if plan is None else step_seconds(plan, problem.cost, problem.mode)
        except ScheduleError as error:
            reason = error
            continue
        if seconds < best_seconds:
            best, best_seconds = plan, seconds
        if best_seconds <= good_enough and number > 0:
            break
    if best is None:
        raise ScheduleError(f"no algorithm can place this batch: {reason}") from reason
    return best


def _whole(algorithm: Callable[[Problem], Plan]) -> Candidate:
    """``algorithm`` as a candidate that always makes its plan."""
    return lambda problem, _: algorithm(problem)
