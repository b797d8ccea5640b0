"""``schedule``: the one entry to all algorithms, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy.typing as npt

from tdp_megatron.schedule.auto import auto
from tdp_megatron.schedule.buddy import buddy
from tdp_megatron.schedule.cost import CostModel
from tdp_megatron.schedule.dp_balanced import dp_balanced
from tdp_megatron.schedule.dynamic_cp import default_dynamic_cp
from tdp_megatron.schedule.hybrid_cp import balanced_hybrid_cp
from tdp_megatron.schedule.keys import check_keys, schedule_with_keys
from tdp_megatron.schedule.lpt import best_fit, kk, lpt
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.presets import preset
from tdp_megatron.schedule.problem import Limits, Mode, Problem, check_fits, check_seqlens
from tdp_megatron.schedule.stream import stream
from tdp_megatron.schedule.waves import waves
from tdp_megatron.types import ParallelLayout

__all__ = ["algorithms", "register", "schedule"]

#: Makes a plan from a checked problem; further keyword arguments are the algorithm's own options.
Algorithm = Callable[..., Plan]

_REGISTRY: dict[str, Algorithm] = {}
_LIMITS = frozenset(f.name for f in fields(Limits))

DEFAULT_COST = preset("llama-8b")


def register(name: str, algorithm: Algorithm) -> None:
    """Make ``schedule(..., algorithm=name)`` call ``algorithm(problem, **options) -> Plan``.

    Raises:
        ValueError: the name is taken.
        TypeError: wrong types.
    """
    if not isinstance(name, str) or not callable(algorithm):
        raise TypeError(f"register needs a name and a callable, got {name!r} and {algorithm!r}")
    if name in _REGISTRY or name == "auto":
        raise ValueError(f"algorithm {name!r} exists already; choose another name")
    _REGISTRY[name] = algorithm


def algorithms() -> tuple[str, ...]:
    """Names that ``schedule`` knows, sorted."""
    return tuple(sorted(_REGISTRY))


def schedule(
    seqlens: npt.ArrayLike,
    layout: ParallelLayout,
    cost: CostModel | None = None,
    mode: str | Mode = "free",
    algorithm: str = "auto",
    *,
    together: npt.ArrayLike | None = None,
    apart: npt.ArrayLike | None = None,
    **limits: Any,
) -> Plan:
    """Pack one global batch and place it on ranks; a pure function, the same bits on every rank.

    Args:
        seqlens: integers [n], real lengths, tokens; zero is allowed.
        layout: how the ranks are arranged, and the cap.
        cost: what a microbatch costs; the default is an 8B model on H100.
        mode: ``"free"``, ``"lockstep"``, ``"barrier"``, ``"pipeline(stages[, virtual])"`` or a ``Mode``.
        algorithm: a name from ``algorithms()``, or ``"auto"``.
        together: integers [n]; sequences with the same key share a microbatch, -1 for no key.
        apart: integers [n]; sequences with the same key do not share a microbatch, -1 for no key.
        limits: fields of ``Limits`` (``equal_count``, ``microbatches_multiple``,
            ``max_sequences_per_microbatch``), and options of the algorithm (``strict`` of Megatron's).

    Returns:
        A plan with at least one microbatch on every rank.

    Raises:
        TypeError: wrong types, or an option the algorithm does not have.
        ValueError: bad lengths, an unknown mode or algorithm.
        ScheduleError: no plan exists; the message names the sequence, its length and the limit.
    """
    if not isinstance(layout, ParallelLayout):
        raise TypeError(f"layout must be a ParallelLayout, got {type(layout).__name__}")
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"cost must be a CostModel, got {type(cost).__name__}")
    problem = Problem(
        check_seqlens(seqlens),
        layout,
        DEFAULT_COST if cost is None else cost,
        Mode.parse(mode),
        Limits(**{name: value for name, value in limits.items() if name in _LIMITS}),
    )
    check_fits(problem.seqlens, layout, layout.cp_sizes)
    options = {name: value for name, value in limits.items() if name not in _LIMITS}
    if algorithm == "auto" and options:
        raise TypeError(f"auto has no options, got {', '.join(sorted(options))}")
    if algorithm != "auto" and algorithm not in _REGISTRY:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are auto, {', '.join(algorithms())}")
    make_plan = auto if algorithm == "auto" else functools.partial(_REGISTRY[algorithm], **options)
    if together is None and apart is None:
        return make_plan(problem)
    n = len(problem.seqlens)
    return schedule_with_keys(problem, make_plan, check_keys("together", together, n), check_keys("apart", apart, n))


for _name, _algorithm in (
    ("balanced_hybrid_cp", balanced_hybrid_cp),
    ("best_fit", best_fit),
    ("buddy", buddy),
    ("default_dynamic_cp", default_dynamic_cp),
    ("dp_balanced", dp_balanced),
    ("kk", kk),
    ("lpt", lpt),
    ("stream", stream),
    ("waves", waves),
):
    register(_name, _algorithm)
