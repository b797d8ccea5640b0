"""From lengths to a plan: packing algorithms, cost model, validation. Pure: no torch, no collectives, no files."""

from __future__ import annotations

from tdp_megatron.schedule.api import algorithms, register, schedule
from tdp_megatron.schedule.bounds import lower_bound
from tdp_megatron.schedule.cost import CostModel, imbalance, padding, rank_costs
from tdp_megatron.schedule.plan import Plan, PlanOp
from tdp_megatron.schedule.presets import PRESETS, cost_from_dimensions, fit_cost, preset
from tdp_megatron.schedule.problem import Limits, Mode, Problem
from tdp_megatron.schedule.simulate import Simulation, simulate
from tdp_megatron.schedule.stream import StreamScheduler, StreamWave
from tdp_megatron.schedule.validation import validate

__all__ = [
    "PRESETS",
    "CostModel",
    "Limits",
    "Mode",
    "Plan",
    "PlanOp",
    "Problem",
    "Simulation",
    "StreamScheduler",
    "StreamWave",
    "algorithms",
    "cost_from_dimensions",
    "fit_cost",
    "imbalance",
    "lower_bound",
    "padding",
    "preset",
    "rank_costs",
    "register",
    "schedule",
    "simulate",
    "validate",
]
