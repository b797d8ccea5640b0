"""Packs to be gathered and what must come out, built token by token in plain Python. Used on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tdp_megatron.ops.gather import Backend, pack
from tdp_megatron.ops.metadata import LossSpans
from tdp_megatron.ops.pads import DEFAULT_PADS, MEGATRON_PADS, PadRules
from tdp_megatron.schedule.plan import Plan, PlanOp
from tdp_megatron.types import IGNORE_LABEL, PackedBatch, ParallelLayout

Spans = list[list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Samples, how they are packed, and what their sources hold."""

    seqlens: list[int]
    packs: list[tuple[int, int, list[int]]]
    """Per microbatch: first rank, CP size, samples."""
    num_ranks: int
    tail_multiple: int = 4
    dtype: torch.dtype = torch.int64
    extra_token: bool = False
    given: tuple[str, ...] = ()
    """Which of labels, loss_mask and position_ids the sources have."""
    loss_spans: Spans | None = None
    extras: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    pads: PadRules = DEFAULT_PADS
    gap: int = 3
    """Tokens between two samples in the sources that belong to neither."""

    def plan(self) -> Plan:
        layout = ParallelLayout(self.num_ranks, 1, 1 << 20, cp_sizes=self._cp_sizes(), tail_multiple=self.tail_multiple)
        ops = [
            PlanOp(first, cp, tuple(ids), tuple(layout.padded_seqlen(self.seqlens[i], cp) for i in ids))
            for first, cp, ids in self.packs
        ]
        return Plan.from_ops(layout, np.array(self.seqlens, dtype=np.int64), ops)

    def _cp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({1, *(cp for _, cp, _ in self.packs)}))

    def sources(self) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """Flat tensors in reverse order of the samples, so that sources and packs are ordered differently."""
        stored = [n + self.extra_token for n in self.seqlens]
        offsets = np.zeros(len(stored), dtype=np.int64)
        at = self.gap
        for i in reversed(range(len(stored))):
            offsets[i] = at
            at += stored[i] + self.gap
        generator = torch.Generator().manual_seed(at)
        info = torch.iinfo(self.dtype)
        low, high = max(info.min, 0), min(info.max, 1 << 40)
        tokens = torch.randint(low, high, (at,), generator=generator, dtype=torch.int64)
        tokens[::5] = high  # what a signed reading of an unsigned type would get wrong
        sources = {"tokens": tokens.numpy().astype(str(self.dtype).removeprefix("torch."))}
        out = {"tokens": torch.from_numpy(sources["tokens"])}
        if "labels" in self.given:
            labels = torch.randint(0, 1000, (at,), generator=generator)
            labels[::4] = IGNORE_LABEL
            out["labels"] = labels
        if "loss_mask" in self.given:
            out["loss_mask"] = torch.rand(at, generator=generator)
        if "position_ids" in self.given:
            out["position_ids"] = torch.randint(0, 1000, (at,), generator=generator)
        for key, (dtype, shape) in self.extras.items():
            out[key] = (torch.randn((at, *shape), generator=generator) * 50).to(dtype)
        return out, offsets


def expected(case: Case, rank: int) -> list[dict[str, Any]]:
    """Per microbatch of ``rank`` and key, a list with one entry per token."""
    sources, offsets = case.sources()
    flat = {key: tensor.tolist() for key, tensor in sources.items()}
    results = []
    for first, cp, ids in case.packs:
        if not first <= rank < first + cp:
            continue
        pad_to = 2 * cp if cp > 1 else 1
        slices: list[dict[str, list[Any]]] = []
        for entry, i in enumerate(ids):
            n = case.seqlens[i]
            padded = -(-n // pad_to) * pad_to
            slices.append(_one_sequence(case, flat, int(offsets[i]), n, padded, entry, i))
        padded_total = sum(len(s["tokens"]) for s in slices)
        multiple = case.tail_multiple if cp == 1 else np.lcm(case.tail_multiple, 2)
        per_rank = max(-(-padded_total // cp // multiple), 1) * multiple
        while per_rank * cp < padded_total:
            per_rank += multiple
        slices.append(_one_sequence(case, flat, 0, 0, int(per_rank * cp - padded_total), len(ids), -1))
        joined: dict[str, list[Any]] = {key: [] for key in slices[0]}
        for s in slices:
            chunk = len(s["tokens"]) // (2 * cp)
            for key, entries in s.items():
                if cp == 1:
                    joined[key] += entries
                else:
                    for c in (rank - first, 2 * cp - 1 - (rank - first)):
                        joined[key] += entries[c * chunk : (c + 1) * chunk]
        results.append(joined)
    return results


def _one_sequence(
    case: Case, flat: dict[str, list[Any]], at: int, n: int, padded: int, entry: int, sample: int
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {
        key: [] for key in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask", "document_id")
    }
    for key in case.extras:
        out[key] = []
    for i in range(padded):
        real = i < n
        out["padding_mask"].append(not real)
        out["document_id"].append(entry)
        if not real:
            out["tokens"].append(case.pads.token)
            out["labels"].append(case.pads.label)
            out["loss_mask"].append(0.0)
            out["position_ids"].append(i if case.pads.positions == "run_on" else 0)
            for key, (dtype, shape) in case.extras.items():
                out[key].append(torch.zeros(shape, dtype=dtype).tolist())
            continue
        out["tokens"].append(flat["tokens"][at + i])
        if "labels" in case.given:
            label = flat["labels"][at + i]
        else:
            label = flat["tokens"][at + i + 1] if i + 1 < n + case.extra_token else IGNORE_LABEL
        has_label = label != IGNORE_LABEL
        out["labels"].append(label)
        if "loss_mask" in case.given:
            loss = flat["loss_mask"][at + i]
        elif case.loss_spans is not None:
            loss = float(has_label and any(b <= i + 1 < e for b, e in case.loss_spans[sample]))
        else:
            loss = float(has_label)
        out["loss_mask"].append(loss)
        out["position_ids"].append(flat["position_ids"][at + i] if "position_ids" in case.given else i)
        for key in case.extras:
            out[key].append(flat[key][at + i])
    return out


def gathered(
    case: Case, rank: int, device: str = "cpu", backend: Backend | None = None, **options: Any
) -> tuple[PackedBatch, ...]:
    sources, offsets = case.sources()
    spans = None if case.loss_spans is None else LossSpans.of(case.loss_spans)
    return pack(
        case.plan(),
        rank,
        {key: tensor.to(device) for key, tensor in sources.items()},
        offsets,
        extra_token=case.extra_token,
        loss_spans=spans,
        pads=case.pads,
        backend=backend,
        **options,
    )


DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "padding_mask": torch.bool,
    "document_id": torch.int32,
}


def check(case: Case, device: str = "cpu", backend: Backend | None = None) -> None:
    """Every rank's packs, bit for bit."""
    for rank in range(case.num_ranks):
        batches = gathered(case, rank, device, backend)
        wanted = expected(case, rank)
        assert len(batches) == len(wanted)
        for batch, want in zip(batches, wanted, strict=True):
            for key, entries in want.items():
                dtype = DTYPES[key] if key in DTYPES else case.extras[key][0]
                have = (getattr(batch, key) if key in DTYPES else batch.extras[key]).cpu()
                assert have.dtype == dtype, key
                exact = torch.tensor(entries, dtype=dtype).reshape(have.shape)
                assert torch.equal(have, exact), (key, rank, have, exact)
            assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32
            assert batch.cu_seqlens.device.type == batch.cu_seqlens_padded.device.type == device
            assert int(batch.cu_seqlens_padded[-1]) == batch.num_tokens * batch.local_cp_size
            identical = torch.equal(batch.cu_seqlens, batch.cu_seqlens_padded)
            assert (batch.cu_seqlens is batch.cu_seqlens_padded) == identical


def _mixed(**changes: Any) -> Case:
    """Static and dynamic CP in one step: sequences shorter than 2 * cp, of length 0, ending at chunk edges."""
    settings: dict[str, Any] = {
        "seqlens": [1, 5, 0, 8, 16, 3, 21, 2, 7, 33],
        "packs": [(0, 4, [9, 0, 2, 4]), (0, 2, [1, 3]), (2, 1, [5, 2, 8]), (3, 1, []), (2, 2, [6, 7])],
        "num_ranks": 4,
    }
    settings["packs"][2] = (2, 1, [5, 8])
    return Case(**{**settings, **changes})


def _turns(seqlens: list[int]) -> Spans:
    """Learned spans of all sorts: none, adjacent, empty, past the end, the first token."""
    kinds: list[Callable[[int], list[tuple[int, int]]]] = [
        lambda n: [],
        lambda n: [(0, n + 1)],
        lambda n: [(1, 2), (2, 4), (6, 6), (7, n + 9)],
        lambda n: [(n, n + 1)],
        lambda n: [(n // 2, n)],
    ]
    return [kinds[i % len(kinds)](n) for i, n in enumerate(seqlens)]


_SEQLENS = _mixed().seqlens
_EXTRAS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "advantage": (torch.float32, ()),
    "logprob": (torch.bfloat16, ()),
    "kept": (torch.bool, ()),
    "value": (torch.float64, ()),
    "pair": (torch.int64, (2,)),
    "hidden": (torch.bfloat16, (3, 5)),
    "nothing": (torch.float32, (0,)),
}

CASES: dict[str, Case] = {
    "one rank": Case(seqlens=[3, 2], packs=[(0, 1, [0, 1])], num_ranks=1, tail_multiple=1),
    "several packs, CP 1, 2 and 4, a dummy": _mixed(),
    "one token more than the length": _mixed(extra_token=True),
    "every sequence below 2 * cp": Case(
        seqlens=[1, 2, 3, 4, 5, 6, 7], packs=[(0, 4, [0, 1, 2, 3, 4, 5, 6])], num_ranks=4, tail_multiple=2
    ),
    "only a dummy": Case(seqlens=[], packs=[(0, 1, []), (1, 1, [])], num_ranks=2, tail_multiple=16),
    "a rank without microbatches": Case(seqlens=[9], packs=[(0, 1, [0])], num_ranks=2),
    "only sequences of length 0": Case(seqlens=[0, 0], packs=[(0, 2, [0, 1])], num_ranks=2),
    "uint8": _mixed(dtype=torch.uint8),
    "int8": _mixed(dtype=torch.int8),
    "int16": _mixed(dtype=torch.int16),
    "uint16, above 32767": _mixed(dtype=torch.uint16, extra_token=True),
    "int32": _mixed(dtype=torch.int32),
    "labels of the sample": _mixed(given=("labels",)),
    "loss mask of the sample": _mixed(given=("loss_mask",), dtype=torch.int32),
    "all of the sample": _mixed(given=("labels", "loss_mask", "position_ids"), gap=0),
    "positions of the sample, zeros at pads": _mixed(given=("position_ids",), pads=MEGATRON_PADS),
    "Megatron's pads": _mixed(pads=MEGATRON_PADS, dtype=torch.uint16),
    "other pads": _mixed(pads=PadRules(token=(1 << 33) + 7, label=-1)),
    "turns": _mixed(loss_spans=_turns(_SEQLENS)),
    "turns, one token more": _mixed(loss_spans=_turns(_SEQLENS), extra_token=True, dtype=torch.uint16),
    "turns, labels of the sample": _mixed(loss_spans=_turns(_SEQLENS), given=("labels",)),
    "no turn at all": _mixed(loss_spans=[[] for _ in _SEQLENS]),
    "user keys": _mixed(extras=_EXTRAS),
    "user keys, none between the samples": _mixed(extras=_EXTRAS, gap=0, dtype=torch.int32),
    "more than one block": Case(
        seqlens=[700, 1, 900, 513], packs=[(0, 2, [0, 1, 2, 3])], num_ranks=2, dtype=torch.uint16, extra_token=True
    ),
}

#: More sequences than Transformer Engine's kernel takes in one pack.
MANY = Case(
    seqlens=[1 + i % 2 for i in range(13_000)],
    packs=[(0, 1, list(range(13_000)))],
    num_ranks=1,
    tail_multiple=64,
    dtype=torch.int32,
)
