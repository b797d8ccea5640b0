"""Per-token outputs sent back to the ranks their samples came from: log-probabilities, values, rewards of RL."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from tdp_megatron import _C
from tdp_megatron.distributed.collectives import all_to_all_bytes, gather_texts
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.parcels import GlobalSamples
from tdp_megatron.errors import ExchangeError
from tdp_megatron.ops import build_rank_spans
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.schedule.scatter_back import RankOutputs, common_shapes
from tdp_megatron.types import Int64Array

__all__ = ["OutputsReport", "PlacedOutputs", "SampleReaders", "agree_on_outputs", "scatter_back", "send_outputs"]


def scatter_back(
    host: HostGroup, plan: Plan, samples: GlobalSamples, outputs: torch.Tensor | Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs of the samples this rank has read, in the order it read them; all ranks call it together.

    Args:
        host: the exchange's group (``exchange.host``).
        plan: of the global batch.
        samples: of the global batch (``GlobalBatch.samples``).
        outputs: [T, ...] or [1, T, ...] of this rank's microbatches one after the other, or a list of them, one per
            microbatch; any dtype; the same on all ranks but for T.

    Returns:
        Per sample [seqlen, ...], on the CPU; pads are left out.

    Raises:
        TypeError, ValueError: outputs that are no tensors, or do not fit what the plan gives this rank.
        ExchangeError: that has happened on another rank, or a rank is gone or late.
    """
    who, what = f"rank {host.rank}", f"step {host.step}: sending outputs back"
    report, placed, error = look_at_outputs(who, "", lambda: PlacedOutputs.of(plan, host.rank, outputs, who))
    report = agree_on_outputs(host, report, what)
    raise_problem(report, error, what)
    readers = SampleReaders(samples.owner, samples.local_index)
    joined, seqlens = send_outputs(host, plan, readers, placed, report, what)
    return list(torch.split(joined, seqlens.tolist()))


@dataclass(frozen=True, slots=True)
class SampleReaders:
    """Which ranks have read each sample of a global batch, and in which order."""

    first_rank: Int64Array
    """int64 [N], the first of the neighbouring ranks that have read it."""
    order: Int64Array
    """int64 [N], rises with the order in which a rank has read its samples."""
    num_ranks: int = 1
    """How many neighbouring ranks read the same samples."""

    def of_rank(self, rank: int) -> Int64Array:
        """Numbers of the samples that ``rank`` has read, in its order."""
        mine = np.flatnonzero(self.reads(rank, self.first_rank))
        return mine[np.argsort(self.order[mine], kind="stable")]

    def reads(self, rank: int, first_rank: Int64Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether ``rank`` is among the readers that begin at ``first_rank``, bool [n]."""
        return (first_rank <= rank) & (rank < first_rank + self.num_ranks)


@dataclass(frozen=True, slots=True)
class PlacedOutputs:
    """Outputs of one rank, and where in the buffer of its packs each part of them begins."""

    outputs: RankOutputs
    begins: Int64Array
    """int64 [parts], tokens."""

    @staticmethod
    def of(plan: Plan, rank: int, outputs: Any, who: str) -> PlacedOutputs:
        """Outputs of all microbatches of a rank, in one or one by one; see ``RankOutputs.of``."""
        of_rank = RankOutputs.of(outputs, plan.op_tokens_per_rank[plan.rank_ops(rank)].tolist(), who)
        return PlacedOutputs(of_rank, _begins(of_rank.lengths))

    def joined(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Int64Array]:
        """All parts as one tensor [T, *shape] on the CPU, and where in it each part begins."""
        parts = [torch.zeros((0, *shape), dtype=dtype), *(part.detach().cpu() for part in self.outputs.flat(shape))]
        return torch.cat(parts).contiguous(), _begins(self.outputs.lengths)


@dataclass(frozen=True, slots=True)
class OutputsReport:
    """What ranks tell each other of their outputs before these travel."""

    who: str
    """What messages call the rank."""
    step: str
    """Which step's outputs they are; empty where the rank does not know."""
    problem: str = ""
    """Why there are none."""
    dtype: str = ""
    """torch's name for their dtype; empty without outputs."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that one token's entry may have."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> OutputsReport:
        """Inverse of ``to_json``."""
        fields = json.loads(text)
        return OutputsReport(**{**fields, "shapes": tuple(map(tuple, fields["shapes"]))})


def look_at_outputs(
    who: str, step: str, look: Callable[[], PlacedOutputs | None]
) -> tuple[OutputsReport, PlacedOutputs | None, Exception | None]:
    """This rank's report, its outputs if it has any, and what is wrong with them, which the others must hear first."""
    try:
        placed = look()
        parts = () if placed is None else placed.outputs.parts
        wrong = next((part for part in parts if not isinstance(part, torch.Tensor)), None)
        if wrong is not None:
            raise TypeError(f"outputs must be torch tensors, got {type(wrong).__name__}")
    except Exception as error:
        return OutputsReport(who, step, f"{who} failed: {type(error).__name__}: {error}"), None, error
    if placed is None or not parts:
        return OutputsReport(who, step), placed, None
    dtype = str(parts[0].dtype).removeprefix("torch.")
    return OutputsReport(who, step, dtype=dtype, shapes=placed.outputs.shapes), placed, None


def agree_on_outputs(host: HostGroup, report: OutputsReport, what: str) -> OutputsReport:
    """What holds for the outputs of all ranks of the group, the same on each of them but for ``who``.

    Raises:
        ExchangeError: a rank is gone or late.
    """
    reports = [OutputsReport.from_json(text) for text in gather_texts(host, report.to_json(), what)]
    problem = next((r.problem for r in reports if r.problem), "")
    steps = [r for r in reports if r.step]
    given = [r for r in reports if r.dtype]
    return replace(
        report,
        step=steps[0].step if steps else "",
        problem=problem or _difference(steps, given),
        dtype=given[0].dtype if given else "",
        shapes=common_shapes([r.shapes for r in given]),
    )


def _difference(steps: list[OutputsReport], given: list[OutputsReport]) -> str:
    other = next((r for r in steps if r.step != steps[0].step), None)
    if other is not None:
        return f"{steps[0].who} asks for the outputs of {steps[0].step}, {other.who} for those of {other.step}"
    shapes = given[0].shapes if given else ()
    for r in given:
        first = given[0]
        shapes = common_shapes([shapes, r.shapes])
        if r.dtype != first.dtype or not shapes:
            return (
                f"outputs of {first.who} are {first.dtype} and {list(first.shapes[0])} per token, those of {r.who} "
                f"{r.dtype} and {list(r.shapes[0])}; they must be the same"
            )
    return ""


def raise_problem(report: OutputsReport, error: Exception | None, what: str) -> None:
    """Raise this rank's own error, or that of another rank.

    Raises:
        ExchangeError: another rank has told of a problem.
    """
    if error is not None:
        raise error
    if report.problem:
        raise ExchangeError(f"{what}: {report.problem}")


def send_outputs(
    host: HostGroup,
    plan: Plan,
    readers: SampleReaders,
    placed: PlacedOutputs | None,
    agreed: OutputsReport,
    what: str,
) -> tuple[torch.Tensor, Int64Array]:
    """One all-to-all that brings every rank the outputs of the samples it has read.

    Args:
        host: who takes part.
        plan: of the global batch.
        readers: of its samples.
        placed: this rank's outputs; None where it has none, and the plan gives it no real token.
        agreed: dtype and shape of the outputs; without any, as of a global batch without samples, they are float32.
        what: how an error names this step.

    Returns:
        The outputs of all samples this rank has read, one after the other, on the CPU, and int64 [n] their lengths.

    Raises:
        ExchangeError: a rank is gone or late, or there are tokens and no rank has outputs.
    """
    me = host.rank
    if not agreed.dtype and plan.seqlens.any():
        raise ExchangeError(f"{what}: no rank has outputs, and the samples have {int(plan.seqlens.sum())} tokens")
    dtype: torch.dtype = getattr(torch, agreed.dtype or "float32")
    entry = agreed.shapes[0] if agreed.dtype else ()
    width = torch.empty(0, dtype=dtype).element_size() * int(np.prod(entry, dtype=np.int64))
    spans = build_rank_spans(plan)
    first_reader = readers.first_rank[spans.sample_ids]

    mine = np.flatnonzero(spans.rank == me)
    peers = (first_reader[mine] + np.arange(readers.num_ranks)[:, None]).reshape(-1)
    by_peer = np.argsort(peers, kind="stable")
    sent = np.tile(mine, readers.num_ranks)[by_peer]
    lengths = spans.lengths[sent]
    send = np.empty(int(lengths.sum()) * width, dtype=np.uint8)
    if len(send) and placed is not None:
        values, begins = placed.joined(entry, dtype)
        part = np.searchsorted(placed.begins, spans.destinations[sent], side="right") - 1
        places = spans.destinations[sent] - placed.begins[part] + begins[part]
        _C.copy_spans(_bytes_of(values), places * width, send, (np.cumsum(lengths) - lengths) * width, lengths * width)

    arriving = np.flatnonzero(readers.reads(me, first_reader))
    sizes = _bytes_per_rank(peers[by_peer], lengths, host.size, width)
    receive_sizes = _bytes_per_rank(spans.rank[arriving], spans.lengths[arriving], host.size, width)
    received = all_to_all_bytes(host, send, sizes, receive_sizes, what)

    read = readers.of_rank(me)
    seqlens = plan.seqlens[read]
    begin_of = np.zeros(len(plan.seqlens), dtype=np.int64)
    begin_of[read] = np.cumsum(seqlens) - seqlens
    joined = torch.zeros((int(seqlens.sum()), *entry), dtype=dtype)
    if len(received):
        lengths = spans.lengths[arriving]
        places = begin_of[spans.sample_ids[arriving]] + spans.starts[arriving]
        _C.copy_spans(
            received, (np.cumsum(lengths) - lengths) * width, _bytes_of(joined), places * width, lengths * width
        )
    return joined, seqlens


def _begins(lengths: Sequence[int]) -> Int64Array:
    widths = np.array(lengths, dtype=np.int64)
    begins: Int64Array = np.cumsum(widths) - widths
    return begins


def _bytes_of(values: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = values.reshape(-1).view(torch.uint8).numpy()
    return flat


def _bytes_per_rank(ranks: Int64Array, lengths: Int64Array, num_ranks: int, width: int) -> list[int]:
    """Sums of tokens by rank, in bytes; exact, since no sum of tokens reaches 2^53."""
    tokens = np.bincount(ranks, weights=lengths, minlength=num_ranks).astype(np.int64)
    sizes: list[int] = (tokens * width).tolist()
    return sizes
