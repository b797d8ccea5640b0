"""The way back in a loop: outputs of microbatches, to all ranks of the data-parallel rank that read the samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tdp_megatron.distributed import HostGroup
from tdp_megatron.distributed.collectives import broadcast_bytes
from tdp_megatron.distributed.scatter_back import (
    OutputsReport,
    PlacedOutputs,
    SampleReaders,
    agree_on_outputs,
    look_at_outputs,
    raise_problem,
    send_outputs,
)
from tdp_megatron.distributed.values import decode_values, encode_values
from tdp_megatron.loops.groups import LoopGroups
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array

__all__ = ["ReturnGroups", "readers_of", "scatter_back"]


class ReturnGroups:
    """Process groups for outputs alone: the next step may be read and exchanged in the background meanwhile.

    All ranks make them at the first call for outputs; loops that never ask have none.
    """

    def __init__(self, groups: LoopGroups) -> None:
        data = groups.dp_cp.data
        self.dp_cp = HostGroup(data.global_ranks, data.timeout_s)
        self.tp = None if groups.tp is None else HostGroup(groups.tp.global_ranks, data.timeout_s)
        self.pp = None if groups.pp is None else HostGroup(groups.pp.global_ranks, data.timeout_s)

    @staticmethod
    def of(groups: LoopGroups) -> ReturnGroups:
        """Those of ``groups``, made at the first call."""
        if groups.returns is None:
            groups.returns = ReturnGroups(groups)
        return groups.returns


def readers_of(refs: Int64Array, groups: LoopGroups) -> SampleReaders:
    """Who has read the samples of a step: all CP ranks of a data-parallel rank.

    Args:
        refs: int64 [N, 2], (dp_rank that read the sample, its number there).
        groups: this process's place.
    """
    cp = groups.layout.cp
    return SampleReaders(refs[:, 0] * cp, refs[:, 1], num_ranks=cp)


def scatter_back(
    groups: LoopGroups,
    step: int | None,
    plan: Plan | None,
    readers: SampleReaders | None,
    look: Callable[[str], PlacedOutputs | None],
    *,
    source: int = 0,
) -> list[torch.Tensor]:
    """Outputs of the samples that this process's data-parallel rank has read, on all processes of that rank.

    Args:
        groups: this process's place.
        step: which global batch; None where this process does not know.
        plan: of the global batch; needed on TP rank 0 of the last pipeline stage, as are ``readers``.
        readers: of its samples.
        look: gives the outputs of this process, which is called what its argument says; asked for on the last pipeline
            stage alone. The outputs of TP ranks other than 0 are only compared.
        source: number of the data iterator.

    Returns:
        Per sample [seqlen, ...], in the order read, on the CPU.

    Raises:
        TypeError, ValueError: this process's outputs do not fit.
        ExchangeError: another process's do not, they ask for different steps, or one is gone or late.
    """
    own = ReturnGroups.of(groups)
    for host in (own.dp_cp, own.tp, own.pp):
        if host is not None:
            host.note_step(0 if step is None else step)
    label = "" if step is None else f"step {step}" + (f" of data iterator {source}" if source else "")
    what = f"{label or 'the last step'}: sending outputs back"
    who = f"rank {groups.rank}"
    who += f" of pipeline stage {groups.pp_rank}" if groups.pp_size > 1 else ""
    who += f" (tensor-parallel rank {groups.tp_rank})" if groups.tp_size > 1 else ""
    report, placed, error = look_at_outputs(who, label, lambda: look(who) if groups.is_last_stage else None)
    # From the TP ranks to TP rank 0, among those of one stage, then of all stages: so each hears of any failure.
    over_tp, over_pp = f"{what}, among the tensor-parallel ranks", f"{what}, among the pipeline stages"
    for host, where in ((own.tp, over_tp), (own.dp_cp, what), (own.pp, over_pp)):
        if host is not None and (host is own.tp or groups.tp_rank == 0):
            report = agree_on_outputs(host, report, where)
    data: bytes | None = None
    if groups.tp_rank == 0 and not report.problem:
        if groups.is_last_stage:
            assert plan is not None
            assert readers is not None
            joined, seqlens = send_outputs(own.dp_cp, plan, readers, placed, report, what)
            data = encode_values({"outputs": joined, "seqlens": seqlens})
        if own.pp is not None:
            data = broadcast_bytes(own.pp, data, own.pp.size - 1, over_pp)
    if own.tp is not None:
        # TP ranks other than 0 have heard of their own group's problems only.
        told = encode_values({"report": report.to_json()}) if data is None else data
        data = broadcast_bytes(own.tp, told, 0, over_tp)
    values = decode_values(data or b"")
    if "report" in values:
        report = OutputsReport.from_json(values["report"])
    raise_problem(report, error, what)
    return list(torch.split(values["outputs"], np.asarray(values["seqlens"]).tolist()))
