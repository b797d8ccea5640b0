"""Whatever labels, loss masks, positions and ids look like, samples arrive as sent, in as few bytes as fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.distributed.token_form import NOTHING_TO_SEND, TokenForm
from tdp_megatron.ops import allocate_pack, build_pack_table, build_rank_spans
from tdp_megatron.reading import read_block
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import schedule
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import IGNORE_LABEL, ParallelLayout

pytestmark = pytest.mark.distributed

#: Pattern -> (bytes per token on the wire, roughly; None for no expectation).
PATTERNS: dict[str, tuple[float, float]] = {
    "pretraining": (2.0, 2.3),
    "document": (2.0, 2.3),
    "wide vocabulary": (4.0, 4.4),
    "huge ids": (8.0, 8.8),
    "negative ids": (8.0, 8.8),
    "masked turns": (3.0, 3.4),
    "loss without labels": (17.0, 17.0),
    "weights": (6.0, 6.4),
    "own positions": (10.0, 10.8),
    "shifted labels": (17.0, 17.0),
    "ignore minus one": (17.0, 17.0),
}


def make_sample(pattern: str, rng: np.random.Generator, n: int) -> dict[str, Any]:
    document = rng.integers(0, 60_000, n + 1)
    if pattern == "wide vocabulary":
        document += 100_000
    if pattern == "huge ids":
        document += 1 << 40
    tokens, labels = document[:-1].copy(), document[1:].copy()
    loss = np.ones(n, dtype=np.float32)
    sample: dict[str, Any] = {"tokens": tokens, "labels": labels, "loss_mask": loss}
    if pattern == "negative ids":
        tokens[: n // 2] *= -1
        labels[:-1] = tokens[1:]
    if pattern == "document" and n:
        labels[-1], loss[-1] = IGNORE_LABEL, 0
    if pattern == "masked turns":
        off = rng.random(n) < 0.5
        labels[off], loss[off] = IGNORE_LABEL, 0
    if pattern == "loss without labels":
        labels[:] = rng.integers(0, 50, n)
        loss[rng.random(n) < 0.5] = 0
    if pattern == "weights":
        loss[:] = rng.random(n)
    if pattern == "own positions":
        sample["position_ids"] = rng.integers(0, 99, n)
    if pattern == "shifted labels":
        labels += 1
    if pattern == "ignore minus one" and n:
        labels[-1] = -1
    return sample


def all_samples(pattern: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(sorted(PATTERNS).index(pattern))
    return [make_sample(pattern, rng, int(n)) for n in rng.integers(0, 90, 31)]


def expected(samples: list[dict[str, Any]], key: str) -> list[Any]:
    if key == "position_ids" and "position_ids" not in samples[0]:
        return [list(range(len(s["tokens"]))) for s in samples]
    return [s[key].tolist() for s in samples]


@pytest.mark.parametrize("cp", [1, 3])
def test_all_patterns_arrive(cp: int) -> None:
    layout = ParallelLayout(3 // cp, cp, 1024)

    def body(rank: int, world: int) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
        mover = Exchange(DpCpGroups.create(layout, timeout_s=20))
        results = {}
        for step, pattern in enumerate(PATTERNS):
            samples = all_samples(pattern)
            local = read_block(block_from_items(samples[rank::3], 0, 0))
            known = mover.gather(step, local, 0)
            assert known.seqlens.tolist() == [len(s["tokens"]) for s in samples]
            plan = schedule(known.seqlens, layout, algorithm="lpt")
            table = build_pack_table(plan, rank)
            buffers = allocate_pack(table, mover.token_keys)
            before = mover.bytes_sent
            mover.transfer(step, build_rank_spans(plan), known, local, buffers.arrays)
            spans: dict[int, dict[str, Any]] = {}
            rows = zip(table.sample_ids, table.starts, table.lengths, table.destinations, strict=True)
            for sample, start, length, at in rows:
                if sample >= 0:
                    entry = spans.setdefault(int(sample), {})
                    for key in ("tokens", "labels", "loss_mask", "position_ids"):
                        entry.setdefault(key, {})[int(start)] = buffers.arrays[key][at : at + length].tolist()
            results[pattern] = (mover.bytes_sent - before, spans)
        return results

    ranks = run_ranks(body, 3, timeout_s=60)
    for pattern, (low, high) in PATTERNS.items():
        samples = all_samples(pattern)
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            got: list[Any] = []
            for i in range(len(samples)):
                parts: dict[int, list[Any]] = {}
                for result in ranks:
                    parts.update(result[pattern][1].get(i, {}).get(key, {}))
                got.append([v for start in sorted(parts) for v in parts[start]])
            assert got == expected(samples, key), (pattern, key)
        sent = sum(result[pattern][0] for result in ranks)
        moved = sum(
            len(s["tokens"])
            for i, s in enumerate(samples)
            if cp == 1 and not any(i in result[pattern][1] for result in [ranks[i % 3]])
        )
        if cp == 1:
            assert low * moved <= sent <= high * moved, (pattern, sent / moved)


def test_ranks_without_samples_and_mixed_ranks_agree() -> None:
    plain = [all_samples("pretraining")[1], all_samples("masked turns")[2]]
    facts = [read_block(block_from_items([sample], 0, 0)).facts for sample in plain]
    alone = TokenForm.agree(np.array([facts[0].bits, NOTHING_TO_SEND]), np.array([facts[0].largest, 0]))
    assert alone.derived_labels
    assert alone.loss == "derived"
    assert not alone.labels_need_loss
    mixed = TokenForm.agree(np.array([f.bits for f in facts]), np.array([f.largest for f in facts]))
    assert mixed.derived_labels
    assert mixed.labels_need_loss
    assert mixed.loss == "binary"
