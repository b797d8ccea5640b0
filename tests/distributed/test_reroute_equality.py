"""Plan and exchange give the same batches on every rank, and together exactly the global order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper, Mapper

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.errors import ExchangeError
from tdp_megatron.nodes import Blend, DocumentSample, GPTSample, IndexedRead, Pack, Reroute, Shard
from tdp_megatron.samples import with_values
from tdp_megatron.testing import run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout, Sample, Step

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(7)
    a = [rng.integers(0, 500, n) for n in rng.integers(0, 90, 60)]
    b = [rng.integers(500, 70_000, n) for n in rng.lognormal(3, 1, 40).astype(int)]
    return write_corpus(folder / "a", a), write_corpus(folder / "b", b, dtype=np.int32)


def blend(prefixes: tuple[str, str], num_samples: int = 70, **options: Any) -> Blend:
    a, b = prefixes
    documents = DocumentSample(IndexedRead(a), max_seqlen=48, num_epochs=None, **options)
    fixed = GPTSample(IndexedRead(b, mmap=False), sequence_length=32, num_samples=60, **options)
    return Blend([documents, fixed], [0.6, 0.4], num_samples=num_samples)


def add_keys(sample: Sample) -> Sample:
    n = sample.seqlen
    return with_values(
        sample,
        advantage=torch.arange(n, dtype=torch.float32).reshape(n, 1) + sample.ref[1],
        image=torch.full((sample.ref[1] % 3, 2), sample.ref[0], dtype=torch.bfloat16),
        name=f"{sample.ref}",
    )


def describe(step: Step) -> dict[str, Any]:
    """Everything but the process group, as plain arrays."""
    batches = []
    for packed in step:
        fields = {
            name: getattr(packed, name).numpy()
            for name in (
                "tokens",
                "labels",
                "loss_mask",
                "position_ids",
                "padding_mask",
                "document_id",
                "cu_seqlens",
                "cu_seqlens_padded",
            )
        }
        fields["facts"] = (packed.max_seqlen, packed.local_cp_size, packed.cp_rank, packed.first_rank)
        fields["sample_ids"], fields["refs"] = packed.sample_ids, packed.refs
        fields["same_object"] = packed.cu_seqlens is packed.cu_seqlens_padded
        for key, value in packed.extras.items():
            if isinstance(value, torch.Tensor):
                fields[key] = value.numpy()
            else:
                fields[key] = [v.float().numpy().tolist() if isinstance(v, torch.Tensor) else v for v in value]
        batches.append(fields)
    return {
        "batches": batches,
        "facts": (
            step.index,
            step.rank,
            step.num_samples_global,
            step.num_loss_tokens_global,
            step.seqlen_sum,
            step.seqlen_squared_sum,
            dict(step.source_counts),
            step.plan.digest(),
        ),
    }


def drain(root: Reroute) -> list[dict[str, Any]]:
    root.reset(None)
    steps = []
    while True:
        try:
            steps.append(describe(next(root)))
        except StopIteration:
            return steps


LAYOUTS = {2: ParallelLayout(1, 2, 96), 4: ParallelLayout(2, 2, 96), 8: ParallelLayout(2, 4, 64)}


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("keys", ["tokens", "user_keys", "eod_mask_loss"])
def test_plan_and_exchange_give_identical_batches(prefixes: tuple[str, str], world_size: int, keys: str) -> None:
    layout = LAYOUTS[world_size]
    options = {"eod_token": 3, "eod_mask_loss": True} if keys == "eod_mask_loss" else {}

    def source() -> Any:
        mixed = blend(prefixes, **options)
        return Mapper(mixed, add_keys) if keys == "user_keys" else mixed

    token_keys = ("advantage",) if keys == "user_keys" else ()
    common: dict[str, Any] = {"global_batch_size": 16, "algorithm": "lpt", "check_plans": True, "drop_last": False}

    def body(rank: int, world_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        groups = DpCpGroups.create(layout, timeout_s=30)
        by_plan = Reroute(Pack(source(), layout, token_keys=token_keys, **common), groups=groups, agree_every=1)
        share = Shard(source(), rank=rank, num_ranks=world_size)
        by_exchange = Reroute(
            Pack(share, layout, token_keys=token_keys, exchange=Exchange(groups), **common), groups=groups
        )
        return drain(by_plan), drain(by_exchange)

    results = run_ranks(body, world_size, timeout_s=60)
    for by_plan, by_exchange in results:
        assert len(by_plan) == 5  # 70 samples in batches of 16, the last one short
        np.testing.assert_equal(by_exchange, by_plan)
        if keys == "user_keys":
            assert any("advantage" in b and "image" in b and "name" in b for s in by_plan for b in s["batches"])

    # The union over ranks and steps is the global order, CP partners holding the same samples.
    drawn = blend(prefixes, **options).take(70)
    for s in range(5):
        by_sample: dict[int, set[tuple[int, int]]] = {}
        holders: dict[int, list[int]] = {}
        for rank, (steps, _) in enumerate(results):
            for packed in steps[s]["batches"]:
                for i, ref in zip(packed["sample_ids"], packed["refs"], strict=True):
                    by_sample.setdefault(i, set()).add(ref)
                    holders.setdefault(i, []).append(rank)
        expected = drawn.refs[16 * s : 16 * s + 16].tolist()
        assert [sorted(by_sample[i]) for i in sorted(by_sample)] == [[tuple(ref)] for ref in expected]
        for ranks in holders.values():
            first = ranks[0]
            assert ranks == list(range(first, first + layout.cp))
    # The loss denominator is what the ranks really hold.
    for s in range(5):
        held = sum(int(np.count_nonzero(b["loss_mask"])) for steps, _ in results for b in steps[s]["batches"])
        assert held == results[0][0][s]["facts"][3]


def facts_of(sample: Sample) -> dict[Any, Any]:
    n = sample.ref[1]
    return {
        "turns": [("user", n), ("assistant", None)],
        "by_number": {0: (1, 2.5), n: {"nested": {True, n}}},
        "score": np.float32(n / 3),
        "numbers": (float("nan"), -0.0, 1 << 80, b"raw"),
        "mask": np.zeros((n % 3, 2), dtype=np.bool_),
    }


def test_values_keep_their_types_in_both_ways(prefixes: tuple[str, str]) -> None:
    """Python values travel as what they are: no lists from tuples, no strings from integers, as when nothing moves."""
    layout = ParallelLayout(2, 1, 96)
    common: dict[str, Any] = {"global_batch_size": 10, "algorithm": "lpt", "drop_last": False}

    def values(root: Reroute) -> list[str]:
        root.reset(None)
        return [repr([sorted(b.extras.items()) for b in next(root)]) for _ in range(3)]

    def body(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        groups = DpCpGroups.create(layout, timeout_s=30)

        def source() -> Any:
            return Mapper(blend(prefixes), lambda sample: with_values(sample, facts=facts_of(sample), why=None))

        shard = Shard(source(), rank=rank, num_ranks=2)
        by_plan = Reroute(Pack(source(), layout, **common), groups=groups)
        by_exchange = Reroute(Pack(shard, layout, exchange=Exchange(groups), **common), groups=groups)
        return values(by_plan), values(by_exchange)

    for by_plan, by_exchange in run_ranks(body, 2, timeout_s=60):
        assert "by_number" in by_plan[0]
        assert by_exchange == by_plan


def test_values_that_would_change_are_refused_by_name_on_all_ranks(prefixes: tuple[str, str]) -> None:
    layout = ParallelLayout(2, 1, 96)

    def body(rank: int, world_size: int) -> str:
        groups = DpCpGroups.create(layout, timeout_s=30)
        source = Shard(
            Mapper(blend(prefixes), lambda s: with_values(s, span=range(2) if rank else (0, 2))), rank=rank, num_ranks=2
        )
        root = Reroute(Pack(source, layout, global_batch_size=4, exchange=Exchange(groups)), groups=groups)
        root.reset(None)
        with pytest.raises(ExchangeError) as caught:
            next(root)
        return str(caught.value)

    for message in run_ranks(body, 2, timeout_s=60):
        assert "rank 1 failed: TypeError: key 'span' holds a builtins.range; what can be exchanged are" in message


def test_exchange_agrees_for_any_number_of_samples_per_rank(prefixes: tuple[str, str]) -> None:
    """A rank with fewer samples than ranks, one-sample batches, and a share that ends in the middle of a round."""
    layout = ParallelLayout(4, 1, 96)

    def body(rank: int, world_size: int) -> list[list[tuple[int, ...]]]:
        groups = DpCpGroups.create(layout, timeout_s=30)
        root = Reroute(
            Pack(
                Shard(blend(prefixes, num_samples=10), rank=rank, num_ranks=4),
                layout,
                global_batch_size=4,
                exchange=Exchange(groups),
                drop_last=False,
            ),
            groups=groups,
        )
        return [[b["sample_ids"] for b in s["batches"]] for s in drain(root)]

    results = run_ranks(body, 4, timeout_s=60)
    assert [len(steps) for steps in results] == [3] * 4
    for s, size in enumerate([4, 4, 2]):
        ids = sorted(i for steps in results for batch in steps[s] for i in batch)
        assert ids == list(range(size))


def test_samples_of_different_ranks_have_different_numbers() -> None:
    """Plain mappings bring no provenance; they are numbered through, ranks in turn."""

    def body(rank: int, world: int) -> list[list[tuple[int, int]]]:
        layout = ParallelLayout(3, 1, 64)
        groups = DpCpGroups.create(layout, timeout_s=20)
        source = IterableWrapper([{"tokens": torch.full((2,), 3 * i + rank)} for i in range(6)])
        pack = Pack(source, layout, global_batch_size=9, exchange=Exchange(groups))
        steps = []
        for step in Reroute(pack, groups=groups):
            for batch in step:
                tokens = batch.tokens[~batch.padding_mask].tolist()
                assert tokens[::2] == [number for _, number in batch.refs]
            steps.append([ref for batch in step for ref in batch.refs])
        return steps

    ranks = run_ranks(body, 3)
    for step in range(2):
        assert sorted(ref for rank in ranks for ref in rank[step]) == [(0, 9 * step + i) for i in range(9)]
