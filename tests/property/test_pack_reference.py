"""Packs against an independent, slow construction: join the CP slices, and compare token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.nodes.pack import GlobalBatch
from tdp_megatron.ops import PackTable, build_pack_table, build_rank_spans, build_tables, cp_partition_indices
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import Plan, schedule
from tdp_megatron.types import IGNORE_LABEL, PackedBatch, ParallelLayout

layouts = st.builds(
    lambda dp, cp, tail: ParallelLayout(dp, cp, 64, tail_multiple=tail),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 6, 8, 16]),
)


def batch_of(seqlens: list[int], layout: ParallelLayout, algorithm: str) -> tuple[GlobalBatch, list[dict[str, Any]]]:
    rng = np.random.default_rng(len(seqlens))
    items: list[dict[str, Any]] = []
    for n in seqlens:
        tokens = torch.from_numpy(rng.integers(1, 1000, n))
        items.append({"tokens": tokens, "weight": torch.rand(n, 2), "name": f"s{len(items)}"})
    block = block_from_items(items, 0, 0)
    for reader in block.readers:
        reader.declare_token_keys(["weight"])  # type: ignore[attr-defined]
    plan = schedule(block.seqlens, layout, algorithm=algorithm)
    batch = GlobalBatch(
        index=0,
        plan=plan,
        seqlens=block.seqlens,
        num_loss_tokens=block.num_loss_tokens,
        refs=block.refs,
        block=block,
    )
    return batch, items


def packs_by_op(plan: Plan, per_rank: list[tuple[PackedBatch, ...]]) -> list[list[PackedBatch]]:
    """For each op, the batches of its ranks in rank order."""
    packs: list[list[PackedBatch]] = [[] for _ in range(plan.num_ops)]
    for rank, batches in enumerate(per_rank):
        for op, packed in zip(plan.rank_ops(rank).tolist(), batches, strict=True):
            packs[op].append(packed)
    return packs


def expected_pack(items: list[dict[str, Any]], packed: PackedBatch, cu: list[int]) -> dict[str, list[Any]]:
    """The whole pack, built sequence by sequence in plain Python."""
    out: dict[str, list[Any]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": [], "pad": [], "doc": []}
    out["weight"] = []
    for doc in range(len(cu) - 1):
        width = cu[doc + 1] - cu[doc]
        tokens = items[packed.sample_ids[doc]]["tokens"].tolist() if doc < len(packed.sample_ids) else []
        weights = items[packed.sample_ids[doc]]["weight"].tolist() if doc < len(packed.sample_ids) else []
        pads = width - len(tokens)
        out["tokens"] += tokens + [0] * pads
        out["labels"] += tokens[1:] + [IGNORE_LABEL] * (pads + bool(tokens))
        out["loss_mask"] += [1.0] * (len(tokens) - 1) + [0.0] * (pads + bool(tokens))
        out["position_ids"] += list(range(width))
        out["pad"] += [False] * len(tokens) + [True] * pads
        out["doc"] += [doc] * width
        out["weight"] += weights + [[0.0, 0.0]] * pads
    return out


def check_rank_spans(plan: Plan) -> None:
    """All ranks at once say what each rank's own table says."""
    spans = build_rank_spans(plan)
    for rank in range(plan.layout.num_ranks):
        table = build_pack_table(plan, rank)
        real = table.lengths > 0
        mine = spans.rank == rank
        for name in ("sample_ids", "starts", "lengths", "destinations"):
            np.testing.assert_array_equal(getattr(spans, name)[mine], getattr(table, name)[real], err_msg=name)
        np.testing.assert_array_equal(spans.held[spans.held_rank == rank], table.held)
        for name in PackTable.__dataclass_fields__:
            together = getattr(build_tables(plan, rank)[0], name)
            np.testing.assert_array_equal(together, getattr(table, name), err_msg=name)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 45), max_size=25), layouts, st.sampled_from(["lpt", "dp_balanced"]))
def test_joined_cp_slices_are_the_pack(seqlens: list[int], layout: ParallelLayout, algorithm: str) -> None:
    batch, items = batch_of(seqlens, layout, algorithm)
    plan = batch.plan
    per_rank = [batch.pack(rank) for rank in range(layout.num_ranks)]
    seen: list[int] = []
    for packs in packs_by_op(plan, per_rank):
        first = packs[0]
        k = first.local_cp_size
        assert [p.cp_rank for p in packs] == list(range(k))
        cu = first.cu_seqlens_padded.tolist()
        total = first.num_tokens * k
        assert cu[-1] == total
        assert first.num_tokens <= layout.tokens_per_rank_limit
        whole = expected_pack(items, first, cu)
        joined: dict[str, torch.Tensor] = {}
        for packed in packs:
            assert packed.sample_ids == first.sample_ids
            assert packed.cu_seqlens.tolist() == first.cu_seqlens.tolist()
            places = cp_partition_indices(packed.cu_seqlens_padded, k, packed.cp_rank)
            parts = {
                "tokens": packed.tokens,
                "labels": packed.labels,
                "loss_mask": packed.loss_mask,
                "position_ids": packed.position_ids,
                "pad": packed.padding_mask,
                "doc": packed.document_id.long(),
                "weight": packed.extras.get("weight", torch.zeros(packed.num_tokens, 2)),
            }
            for key, part in parts.items():
                target = joined.setdefault(key, torch.zeros(total, *part.shape[1:], dtype=part.dtype))
                target[places] = part
            assert packed.extras.get("name", ()) == tuple(items[i]["name"] for i in packed.sample_ids)
        for key, values in joined.items():
            expected = torch.tensor(whole[key], dtype=values.dtype).reshape(values.shape)
            torch.testing.assert_close(values, expected, rtol=0, atol=0, msg=key)
        real = [min(len(items[i]["tokens"]), 10**9) for i in first.sample_ids]
        tail = [cu[-1] - cu[-2]] if len(cu) - 1 > len(real) else []
        assert first.cu_seqlens.diff().tolist() == real + tail
        holes = first.cu_seqlens.tolist() != cu
        assert (first.cu_seqlens is first.cu_seqlens_padded) == (not holes)
        assert first.max_seqlen == max(np.diff(cu).tolist(), default=0)
        assert first.cu_seqlens.dtype == first.cu_seqlens_padded.dtype == torch.int32
        seen += first.sample_ids
    assert sorted(seen) == list(range(len(seqlens)))
    check_rank_spans(plan)
    for sample_id in range(len(seqlens)):
        rank, microbatch, offset = plan.locate(sample_id)
        packed = per_rank[rank][microbatch]
        assert packed.cu_seqlens_padded[packed.sample_ids.index(sample_id)] == offset


def test_te_example_partition() -> None:
    """The example of Transformer Engine's documentation of ``thd_get_partitioned_indices``."""
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    assert cp_partition_indices(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert cp_partition_indices(cu, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 6))
def test_partition_against_its_definition(chunks: list[int], cp_size: int) -> None:
    lengths = [c * 2 * cp_size for c in chunks]
    cu = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
    everything: list[int] = []
    for rank in range(cp_size):
        expected: list[int] = []
        for begin, chunk in zip(cu.tolist(), chunks, strict=False):
            for c in (rank, 2 * cp_size - 1 - rank):
                expected += range(begin + c * chunk, begin + (c + 1) * chunk)
        assert cp_partition_indices(cu, cp_size, rank).tolist() == expected
        everything += expected
    assert sorted(everything) == list(range(int(cu[-1])))


def test_more_sequences_than_transformer_engine_takes() -> None:
    cu = torch.arange(0, 4 * 20_001, 4, dtype=torch.int32)
    indices = torch.cat([cp_partition_indices(cu, 2, r) for r in range(2)])
    assert torch.equal(indices.sort().values, torch.arange(4 * 20_000))
