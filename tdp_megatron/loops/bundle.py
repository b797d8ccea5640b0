"""One step's packs as bytes, for the ranks that do not read: plan, buffers and per-sample values."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tdp_megatron.distributed.exchange import digest_of
from tdp_megatron.distributed.values import decode_values, encode_values
from tdp_megatron.ops import PackBuffers, PackTable, allocate_pack, build_pack_table
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.torch_dtypes import array_of, tensor_of
from tdp_megatron.types import IGNORE_LABEL, Int64Array, ParallelLayout

__all__ = ["StepBundle"]

_PLAN_ARRAYS = (
    "seqlens",
    "op_first_rank",
    "op_cp_size",
    "op_offsets",
    "sample_ids",
    "padded_lengths",
    "op_group",
)


@dataclasses.dataclass(frozen=True, slots=True)
class StepBundle:
    """What one DP x CP rank of one pipeline stage knows of a step."""

    plan: Plan
    refs: Int64Array
    """int64 [N, 2], (dp_rank that read the sample, its number there)."""
    buffers: PackBuffers | None = None
    """This rank's packs; None on a middle pipeline stage."""
    values: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    place: tuple[int, int, int] = (0, 0, 0)
    """Number of the item behind the step, that at which the data iterators stand in the state for there, and moves."""

    def to_bytes(self, *, with_tokens: bool) -> bytes:
        """Encoded form; without tokens it is what a middle pipeline stage needs."""
        plan = self.plan
        out: dict[str, Any] = {f"plan/{name}": getattr(plan, name) for name in _PLAN_ARRAYS}
        out["layout"] = json.dumps(dataclasses.asdict(plan.layout))
        out["algorithm"] = plan.algorithm
        out["refs"] = self.refs
        out["place"] = np.array(self.place, dtype=np.int64)
        if with_tokens and self.buffers is not None:
            out.update({f"array/{key}": tensor_of(array) for key, array in self.buffers.arrays.items()})
            out.update({f"value/{i}": encode_values(values) for i, values in self.values.items()})
        return encode_values(out)

    def content_digest(self) -> int:
        """A number that tells two pipeline stages whether they hold the same plan and the same tokens."""
        tokens = 0 if self.buffers is None else zlib.crc32(np.ascontiguousarray(self.buffers.arrays["tokens"]).data)
        return digest_of(f"{self.plan.digest()} {tokens}")

    def buffers_over(self, table: PackTable) -> PackBuffers:
        """The buffers, or what a middle pipeline stage has: where the sequences lie, and no token to learn from."""
        if self.buffers is not None:
            return self.buffers
        empty = allocate_pack(table, {})
        for key, value in (("tokens", 0), ("labels", IGNORE_LABEL), ("loss_mask", 0)):
            empty.arrays[key][:] = value
        return empty

    @staticmethod
    def from_bytes(data: bytes, rank: int) -> StepBundle:
        """Inverse of ``to_bytes`` on DP x CP rank ``rank``."""
        entries = decode_values(data)
        layout = json.loads(entries["layout"])
        layout["cp_sizes"] = tuple(layout["cp_sizes"])
        arrays_of_plan = {name: entries[f"plan/{name}"] for name in _PLAN_ARRAYS}
        plan = Plan(layout=ParallelLayout(**layout), algorithm=entries["algorithm"], **arrays_of_plan)
        arrays = {k.removeprefix("array/"): array_of(v) for k, v in entries.items() if k.startswith("array/")}
        buffers: PackBuffers | None = None
        if arrays:
            # Masks follow from the plan; only what was read is sent.
            empty = allocate_pack(build_pack_table(plan, rank), {})
            buffers = PackBuffers(arrays, empty.padding_mask, empty.document_id)
        values = {int(k.removeprefix("value/")): decode_values(v) for k, v in entries.items() if k.startswith("value/")}
        refs: Int64Array = np.asarray(entries["refs"])
        end, data_at, moves = entries["place"].tolist()
        return StepBundle(plan, refs, buffers, values, (end, data_at, moves))
