"""All that a gather of packs needs to know besides the tokens: made on the host, copied to a device once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tdp_megatron.ops.buffers import cu_seqlens_of
from tdp_megatron.schedule.pack_table import PackTable
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array

__all__ = ["LossSpans", "PackMetadata"]

#: Lines of ``PackMetadata.rows``.
DESTINATION, SOURCE, LENGTH, START, TARGETS, ENTRY, FIRST_EDGE, LAST_EDGE = range(8)


@dataclass(frozen=True, slots=True)
class LossSpans:
    """Which tokens of each sample are learned, such as the assistant's turns of a conversation.

    A span [begin, end) counts tokens from the start of the sample. The loss of a token lies at the position before it,
    whose label it is; the first token of a sample is nobody's label.
    """

    offsets: Int64Array
    """int64 [N + 1], where the edges of each sample begin."""
    edges: Int64Array
    """int64, begin and end of every span in turn, never decreasing inside a sample."""

    @staticmethod
    def of(spans: Sequence[Sequence[tuple[int, int]]]) -> LossSpans:
        """Spans per sample, in order.

        Raises:
            ValueError: a span that begins before 0, ends before it begins, or begins before the last one ended.
        """
        counts = np.array([2 * len(of_sample) for of_sample in spans], dtype=np.int64)
        edges = np.array([edge for of_sample in spans for span in of_sample for edge in span], dtype=np.int64)
        result = LossSpans(np.append(0, np.cumsum(counts)).astype(np.int64), edges)
        result.check()
        return result

    def check(self) -> None:
        """Raise ValueError unless the arrays are what they should be; the message names the first bad sample."""
        offsets, edges = self.offsets, self.edges
        if offsets.dtype != np.int64 or edges.dtype != np.int64 or offsets.ndim != 1 or edges.ndim != 1:
            raise ValueError("loss spans need one-dimensional int64 arrays of offsets and edges")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(edges) or (np.diff(offsets) < 0).any():
            raise ValueError(f"loss span offsets must rise from 0 to the {len(edges)} edges, got {offsets.tolist()}")
        if (offsets % 2).any():
            raise ValueError("loss spans need a begin and an end each; a sample has an odd number of edges")
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        wrong = np.flatnonzero(edges < 0)
        if not len(wrong):
            wrong = np.flatnonzero((np.diff(edges) < 0) & (np.diff(owner) == 0))
        if len(wrong):
            sample = int(owner[wrong[0]])
            of_sample = edges[offsets[sample] : offsets[sample + 1]].reshape(-1, 2).tolist()
            raise ValueError(f"loss spans of sample {sample} must not be negative or overlap, got {of_sample}")


@dataclass(frozen=True, slots=True)
class PackMetadata:
    """The spans of a rank's microbatches and their cu_seqlens, as tensors that share one storage."""

    num_tokens: int
    """Tokens of all packs together, T."""
    num_rows: int
    """Spans, pads at the end of packs included."""
    storage: torch.Tensor
    """int64, all of the following; pinned when it is on its way to a device."""
    rows: torch.Tensor
    """int64 [8, capacity]: first place in the packs, first place in the sources, real tokens, position of the first
    token, tokens that have a label in the source, number of the sequence in its pack, and which loss edges are its.
    Unused columns begin at ``num_tokens``, so that a search never ends in one."""
    loss_edges: torch.Tensor | None
    """int64, of ``LossSpans``."""
    cu_seqlens: tuple[tuple[torch.Tensor, torch.Tensor, int], ...]
    """Per microbatch: cu_seqlens, cu_seqlens_padded (one object when nothing is padded between sequences) and the
    longest padded length."""
    end_of_sources: int
    """How many tokens the sources must have."""
    end_of_labels: int
    """How many of them when labels are the tokens behind."""

    @staticmethod
    def build(
        plan: Plan,
        table: PackTable,
        sources: Int64Array,
        *,
        extra_token: bool = False,
        targets: Int64Array | None = None,
        loss_spans: LossSpans | None = None,
        row_capacity: int = 0,
        edge_capacity: int = 0,
        pin_memory: bool = False,
    ) -> PackMetadata:
        """Metadata of one rank's packs of one step.

        Args:
            plan: the plan the table was made from.
            table: the rank's spans.
            sources: int64 [n], where the first token of each span lies in the source; of spans without real tokens
                it does not matter.
            extra_token: every sample has one token more than its length, the label of its last position.
            targets: int64 [n], tokens of each span that have a label in the source, where samples differ in that;
                None for what ``extra_token`` says.
            loss_spans: learned tokens of all samples of the global batch; None for all that have a label.
            row_capacity: columns of ``rows``; more than needed keeps shapes the same from step to step, as CUDA graphs
                want it. 0 for what is needed.
            edge_capacity: the same for ``loss_edges``.
            pin_memory: put ``storage`` in page-locked memory.

        Raises:
            ValueError: a capacity is too small, a source is negative, or an argument has the wrong size.
        """
        n = len(table.widths)
        if sources.shape != (n,):
            raise ValueError(f"sources have shape {sources.shape}; the table has {n} spans")
        real = table.lengths > 0
        if (sources[real] < 0).any():
            raise ValueError(f"sources must not be negative, got {int(sources[real].min())}")
        seqlens = np.where(real, plan.seqlens[np.where(real, table.sample_ids, 0)], 0) if real.any() else table.lengths
        known = seqlens if extra_token else seqlens - 1  # labels a sample has
        capacity = _capacity("row_capacity", row_capacity, n, "spans")
        edges, num_edges = np.zeros(0, dtype=np.int64), 0
        if loss_spans is not None:
            loss_spans.check()
            if len(loss_spans.offsets) != len(plan.seqlens) + 1:
                raise ValueError(
                    f"loss spans of {len(loss_spans.offsets) - 1} samples for a plan of {len(plan.seqlens)} samples"
                )
            edges = loss_spans.edges
            num_edges = _capacity("edge_capacity", edge_capacity, len(edges), "loss edges")
        cumulative = [cu_seqlens_of(plan, op) for op in table.ops.tolist()]
        parts = [t for cu, padded, _ in cumulative for t in ((cu,) if cu is padded else (cu, padded))]
        # Every part begins at a multiple of 16 bytes, as some attention kernels want it.
        places = np.append(0, np.cumsum([-(-len(t) // 4) * 4 for t in parts])).astype(np.int64)
        first = -(-(8 * capacity + num_edges) // 2) * 2

        storage = torch.zeros(first + int(places[-1]) // 2, dtype=torch.int64, pin_memory=pin_memory)
        flat = storage.numpy()
        rows = flat[: 8 * capacity].reshape(8, capacity)
        rows[DESTINATION, n:] = table.num_tokens
        rows[DESTINATION, :n] = table.destinations
        rows[SOURCE, :n] = np.where(real, sources, 0)
        rows[LENGTH, :n] = table.lengths
        rows[START, :n] = table.starts
        rows[TARGETS, :n] = np.clip(known - table.starts if targets is None else targets, 0, table.lengths)
        rows[ENTRY, :n] = table.entries
        if loss_spans is not None:
            ids = table.sample_ids[real]
            rows[FIRST_EDGE, :n][real] = loss_spans.offsets[ids]
            rows[LAST_EDGE, :n][real] = loss_spans.offsets[ids + 1]
            flat[8 * capacity : 8 * capacity + len(edges)] = edges
        small = flat[first:].view(np.int32)
        for part, place in zip(parts, places.tolist(), strict=False):
            small[place : place + len(part)] = part.numpy()
        end = rows[SOURCE] + rows[LENGTH]
        label_end = np.where(rows[TARGETS] > 0, np.maximum(end, rows[SOURCE] + rows[TARGETS] + 1), end)
        return PackMetadata._over(
            storage,
            num_tokens=table.num_tokens,
            num_rows=n,
            capacity=capacity,
            num_edges=num_edges if loss_spans is not None else -1,
            sizes=[(len(cu), cu is padded, longest) for cu, padded, longest in cumulative],
            end_of_sources=int(end.max(initial=0)),
            end_of_labels=int(label_end.max(initial=0)),
        )

    @staticmethod
    def _over(
        storage: torch.Tensor,
        *,
        num_tokens: int,
        num_rows: int,
        capacity: int,
        num_edges: int,
        sizes: list[tuple[int, bool, int]],
        end_of_sources: int,
        end_of_labels: int,
    ) -> PackMetadata:
        used = 8 * capacity + max(num_edges, 0)
        small = storage[-(-used // 2) * 2 :].view(torch.int32)
        place = 0
        cumulative: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for size, same, longest in sizes:
            views = []
            for _ in range(1 if same else 2):
                views.append(small[place : place + size])
                place += -(-size // 4) * 4
            cumulative.append((views[0], views[-1], longest))
        return PackMetadata(
            num_tokens=num_tokens,
            num_rows=num_rows,
            storage=storage,
            rows=storage[: 8 * capacity].view(8, capacity),
            loss_edges=storage[8 * capacity : used] if num_edges >= 0 else None,
            cu_seqlens=tuple(cumulative),
            end_of_sources=end_of_sources,
            end_of_labels=end_of_labels,
        )

    def to(self, device: torch.device | str) -> PackMetadata:
        """The same on a device: one copy, which the host does not wait for when ``storage`` is pinned."""
        if self.storage.device == torch.device(device):
            return self
        return PackMetadata._over(
            self.storage.to(device, non_blocking=True),
            num_tokens=self.num_tokens,
            num_rows=self.num_rows,
            capacity=self.rows.shape[1],
            num_edges=-1 if self.loss_edges is None else len(self.loss_edges),
            sizes=[(len(cu), cu is padded, longest) for cu, padded, longest in self.cu_seqlens],
            end_of_sources=self.end_of_sources,
            end_of_labels=self.end_of_labels,
        )

    def update_(self, step: PackMetadata) -> None:
        """Take the spans and loss edges of another step in place, so that a captured CUDA graph sees them.

        Args:
            step: of the same number of tokens and the same capacities. Its cu_seqlens are not taken: their shapes
                differ from step to step.

        Raises:
            ValueError: the shapes differ.
        """
        mine = (self.num_tokens, self.rows.shape[1], -1 if self.loss_edges is None else len(self.loss_edges))
        other = (step.num_tokens, step.rows.shape[1], -1 if step.loss_edges is None else len(step.loss_edges))
        if mine != other:
            raise ValueError(
                f"tokens, row capacity and edge capacity are {other}, the captured ones {mine}; "
                "build both with the same capacities"
            )
        fixed = 8 * mine[1] + max(mine[2], 0)
        self.storage[:fixed].copy_(step.storage[:fixed], non_blocking=True)


def _capacity(name: str, wanted: int, needed: int, what: str) -> int:
    if wanted and wanted < needed:
        raise ValueError(f"{name} {wanted} is too small for {needed} {what}")
    return max(wanted, needed, 1)
