"""The loop adapters with whatever samples hold: any dtype, any ragged value, nothing at all; and what is told of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import IterableWrapper

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.errors import ExchangeError, ScheduleError, TdpError
from tdp_megatron.loops import (
    HybridCPDataLoaderWrapper,
    PackedIterator,
    get_batch_on_this_rank_for_sequence_packing,
    wrap_data_iterator,
)
from tdp_megatron.nodes import Pack
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.schedule import CostModel
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import IGNORE_LABEL, PackedBatch, ParallelLayout

pytestmark = pytest.mark.distributed

STEPS, ITEMS = 2, 2
TOKEN_DTYPES = {
    "t_bfloat16": torch.bfloat16,
    "t_float8": torch.float8_e4m3fn,
    "t_float64": torch.float64,
    "t_bool": torch.bool,
    "t_uint16": torch.uint16,
    "t_int64": torch.int64,
}


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_seqlen_per_dp_cp_rank": 64, "data_timeout_s": 20.0, "check_plans": True, **fields})


def sample(dp: int, number: int) -> dict[str, Any]:
    """Every value names its sample; the integers are above what a double holds."""
    rng = np.random.default_rng([dp, number])
    n = int(rng.choice([0, 1, 1, 2, int(rng.integers(1, 40))]))
    media = [torch.from_numpy(rng.random((int(k), 2))).bfloat16() for k in rng.integers(0, 3, rng.integers(0, 4))]
    found: dict[str, Any] = {
        "tokens": torch.from_numpy(rng.integers(0, 2**40, n)),
        "labels": torch.from_numpy(rng.integers(-100, 2**40, n)),
        "position_ids": torch.from_numpy(rng.integers(0, 2**20, n).astype(np.int32)),
        "big": torch.tensor(2**53 + 1 + 1000 * dp + number),
        "huge": 2**62 + number,
        "media": media,
        "grid": torch.full((len(media), 1, 3), number, dtype=torch.uint8),
        "about": {"name": f"{dp}/{number}", "none": None, "raw": b"\0" * dp},
    }
    for key, dtype in TOKEN_DTYPES.items():
        shape = (n, 2) if key == "t_float64" else (n,)
        found[key] = torch.from_numpy(rng.integers(0, 2, shape)).to(dtype)
    found["t_int64"] += 2**53 + 1
    return found


def items(dp: int) -> list[list[dict[str, Any]]]:
    """Uneven, and none at all on some ranks in some steps."""
    numbers = itertools.count()
    return [[sample(dp, next(numbers)) for _ in range((dp + i) % 3)] for i in range(STEPS * ITEMS)]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_packs(packs: list[PackedBatch], cp: int, wanted: dict[tuple[int, int], dict[str, Any]]) -> None:
    """Of the packs that CP neighbours hold together, each sample is whole, and nothing else is in them."""
    first = packs[0]
    edges = first.cu_seqlens_padded
    places = torch.cat([cp_partition_indices(edges, cp, rank) for rank in range(cp)])
    order = torch.argsort(places)

    def whole(value: Callable[[PackedBatch], torch.Tensor]) -> torch.Tensor:
        parts = torch.cat([value(pack).reshape(len(pack.tokens), -1).view(torch.uint8) for pack in packs])
        return parts[order]

    def raw(value: torch.Tensor, n: int) -> torch.Tensor:
        return value[:n].reshape(n, -1).view(torch.uint8) if n else value.new_zeros(0, dtype=torch.uint8)

    pads = whole(lambda pack: pack.padding_mask)[:, 0].bool()
    for j, ref in enumerate(first.refs):
        s = wanted[ref]
        n, begin = len(s["tokens"]), int(edges[j])
        assert int(first.cu_seqlens[j + 1] - first.cu_seqlens[j]) == n
        assert not pads[begin : begin + n].any()
        pads[begin : begin + n] = True
        for key in ("tokens", "labels", "position_ids"):
            got = whole(lambda pack, key=key: getattr(pack, key))[begin : begin + n]
            assert torch.equal(got.flatten(), raw(s[key].long(), n).flatten()), key
        for key in TOKEN_DTYPES:
            assert first.extras[key].dtype == s[key].dtype
            got = whole(lambda pack, key=key: pack.extras[key])[begin : begin + n]
            assert torch.equal(got.flatten(), raw(s[key], n).flatten()), key
        for key in s.keys() - TOKEN_DTYPES.keys() - {"tokens", "labels", "position_ids"}:
            for pack in packs:
                assert same(pack.extras[key][j], s[key]), key
    assert pads.all()


@pytest.mark.parametrize(
    ("shape", "axes", "virtual"),
    [
        ((1, 1, 1), "dp cp tp pp", None),
        ((2, 1, 2), "cp tp dp pp", None),
        ((1, 2, 2), "tp cp pp dp", 2),
        ((2, 2, 1), "pp dp cp tp", 2),
        ((1, 4, 1), "dp pp tp cp", None),
        ((2, 2, 2), "cp pp dp tp", None),
    ],
    ids=str,
)
def test_any_key_over_any_order_of_ranks(shape: tuple[int, int, int], axes: str, virtual: int | None) -> None:
    """The ranks of the mesh are in no order; values are compared byte for byte with what the samples hold."""
    tp, pp, cp = shape
    world, names = 8, tuple(axes.split())
    dp = world // (tp * pp * cp)
    sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    ranks = np.random.default_rng(5).permutation(world).reshape([sizes[name] for name in names])
    options = config(token_keys=tuple(TOKEN_DTYPES), virtual_pipeline_model_parallel_size=virtual)

    def body(rank: int, world: int) -> tuple[dict[str, int], list[Any]]:
        here = dict(zip(names, np.argwhere(ranks == rank)[0].tolist(), strict=True))
        mesh = DeviceMesh("cpu", torch.from_numpy(ranks.copy()), mesh_dim_names=names)
        reads = here["tp"] == 0 and here["pp"] in (0, pp - 1)
        iterator: Any = iter(items(here["dp"])) if reads else None
        source = [iterator] + [None] * (virtual - 1) if virtual else iterator
        steps = []
        for _ in range(STEPS):
            chunks, count, *_ = wrap_data_iterator(source, options, ITEMS, mesh)
            packed: Any = chunks[0] if isinstance(chunks, list) else chunks
            assert count % (pp if virtual else 1) == 0  # a multiple of the stages, though nothing said so
            if not virtual:
                first = get_batch_on_this_rank_for_sequence_packing(packed)
                assert first[-1].shape == (1, len(packed.step.batches[0].tokens))
            # A group of processes cannot be sent to the parent.
            steps.append([_without_group(batch) for batch in packed.step.batches])
        with pytest.raises(StopIteration):
            wrap_data_iterator(source, options, ITEMS, mesh)
        return here, steps

    results = run_ranks(body, world, timeout_s=90)
    # Middle stages know where the sequences lie; there is nothing to learn from, and nothing left over in memory.
    for pack in [pack for here, steps in results if 0 < here["pp"] < pp - 1 for step in steps for pack in step]:
        assert not pack.tokens.any()
        assert not pack.loss_mask.any()
        assert (pack.labels == IGNORE_LABEL).all()
    for step in range(STEPS):
        wanted = {}
        for d in range(dp):
            mine = [s for item in items(d)[step * ITEMS : (step + 1) * ITEMS] for s in item]
            wanted.update({(d, i): s for i, s in enumerate(mine)})
        assert wanted
        for stage, tp_rank in itertools.product({0, pp - 1}, range(tp)):
            held = {
                here["dp"] * cp + here["cp"]: steps[step]
                for here, steps in results
                if (here["pp"], here["tp"]) == (stage, tp_rank)
            }
            seen: list[Any] = []
            for first in range(0, dp * cp, cp):
                for packs in zip(*(held[first + i] for i in range(cp)), strict=True):
                    assert len({pack.refs for pack in packs}) == 1
                    seen += packs[0].refs
                    check_packs(list(packs), cp, wanted)
            assert sorted(seen) == sorted(wanted)


def _without_group(batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(batch, cp_group=None)


def told(
    make: Callable[[int], Any], *, world: int = 4, steps: int = 1, number: Any = 2, options: Any = None
) -> list[list[str]]:
    """What each rank hears, step by step."""

    def body(rank: int, world: int) -> list[str]:
        iterator = make(rank)
        heard = []
        for _ in range(steps):
            try:
                packed, *_ = wrap_data_iterator(iterator, options or config(), number)
                assert isinstance(packed, PackedIterator)
                heard.append("")
            except (ExchangeError, ScheduleError) as error:
                heard.append(f"{type(error).__name__}: {error}")
        return heard

    return run_ranks(body, world)


def test_samples_of_one_pack_with_different_keys_are_told_to_all_ranks() -> None:
    """Also to those whose own packs are in order: they would wait in the training step for the others."""

    def make(rank: int) -> Iterator[Any]:
        # One sample of the second step has media; it is in the first pack, with samples that have none.
        lengths = [60, 60, 20, 20]
        return iter(
            [
                {"tokens": torch.ones(n).long(), **({"media": 1} if rank == 0 and i == 2 else {})}
                for i, n in enumerate(lengths)
            ]
        )

    for first, second in told(make, steps=2):
        assert first == ""
        assert second.startswith("ExchangeError: step 1: samples ")
        assert "are in one pack, and only one of them has ['media']; give every sample the same keys" in second


def test_samples_with_different_keys_may_be_in_different_packs() -> None:
    def make(rank: int) -> Iterator[Any]:
        return iter([{"tokens": torch.ones(60).long(), **({"media": 1} if rank % 2 else {})}] * 4)

    assert told(make, steps=2) == [["", ""]] * 4


def test_ranks_with_different_per_token_keys_are_told_which() -> None:
    def make(rank: int) -> Iterator[Any]:
        score = torch.ones(3, 2) if rank == 2 else torch.ones(3).bfloat16()
        return iter(
            [{"tokens": torch.arange(3), "score": score, **({"position_ids": torch.arange(3)} if rank else {})}]
        )

    for (message,) in told(make, number=1, options=config(token_keys=("score",))):
        assert "'position_ids' is missing on rank 0 and int64 on rank 1; give all of them the same" in message
        assert "rank 2" not in message

    def other(rank: int) -> Iterator[Any]:
        return iter([{"tokens": torch.arange(3), "score": torch.ones(3, 2) if rank == 2 else torch.ones(3).bfloat16()}])

    for (message,) in told(other, number=1, options=config(token_keys=("score",))):
        assert "'score' is torch.bfloat16 on rank 0 and float32 (2,) per token on rank 2;" in message


def test_a_sequence_above_the_cap_is_found_in_the_data() -> None:
    def make(rank: int) -> Iterator[Any]:
        return iter([{"tokens": torch.zeros(65 if rank == 2 and i == 3 else 4).long()} for i in range(4)])

    for first, second in told(make, steps=2):
        assert first == ""
        assert second.startswith("ScheduleError: step 1: sequence ")
        assert "has 65 tokens, the limit is 64" in second
        assert second.endswith("is sample 1 of this step on data-parallel rank 2)")


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_batch_sizes_of_schedules_are_numbers_too(number: Any) -> None:
    assert told(lambda rank: iter([{"tokens": torch.arange(3)}] * 4), steps=2, number=number, world=1) == [["", ""]]


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [1, 1], []], ids=str)
def test_steps_with_hardly_any_tokens(lengths: list[int]) -> None:
    def body(rank: int, world: int) -> list[Any]:
        item = [{"tokens": torch.full((n,), 7)} for n in lengths]
        packed, count, total, squares = wrap_data_iterator(iter([item]), config(), 1)
        assert (total, squares) == (2 * sum(lengths), 2 * sum(n * n for n in lengths))
        found = []
        for _ in range(count):
            batch: Any = get_batch_on_this_rank_for_sequence_packing(packed)  # type: ignore[arg-type]
            tokens, labels, loss_mask, _, positions, params, pads = batch
            assert tokens.shape == labels.shape == loss_mask.shape == positions.shape == pads.shape
            assert int(params.cu_seqlens_q[-1]) == tokens.numel() >= 1
            assert int(loss_mask.sum()) == sum(max(n - 1, 0) for _, n in _held(packed))
            found += tokens[~pads].tolist()
        return found

    assert sorted(t for part in run_ranks(body, 2) for t in part) == [7] * (2 * sum(lengths))


def _held(packed: Any) -> list[tuple[int, int]]:
    (batch,) = packed.step.batches
    return list(enumerate(batch.cu_seqlens.diff()[: len(batch.sample_ids)].tolist()))


def hybrid(make: Callable[[int], Any], steps: int = 1) -> list[list[Any]]:
    def body(rank: int, world: int) -> list[Any]:
        wrapper = HybridCPDataLoaderWrapper(make(rank), config(max_seqlen_per_dp_cp_rank=16))
        heard: list[Any] = []
        for _ in range(steps):
            try:
                samples, groups = next(wrapper)
                assert samples is not None
                heard.append((sorted(samples), groups, {i: s.get("score") for i, s in samples.items()}))
            except (ExchangeError, ScheduleError) as error:
                heard.append(f"{type(error).__name__}: {error}")
        return heard

    return run_ranks(body, 4)


def test_hybrid_steps_without_any_sample() -> None:
    """Before any rank has said which keys there are, and after."""

    def make(rank: int) -> Iterator[Any]:
        return iter([[], [{"tokens": torch.arange(3)}] if rank == 2 else [], []])

    for nothing, something, again in hybrid(make, steps=3):
        assert nothing[0] == again[0] == []
        assert not any(ids for group in (*nothing[1], *again[1]) for ids in group)
        assert something[0] == [0]


def test_hybrid_ranks_that_cannot_read_are_named() -> None:
    for culprit, message in (
        (None, "ValueError: TP rank 0 of pipeline stage 0 reads data; its data_iterator is None"),
        ([[]], "TypeError: data_iterator must be an iterator, got list; give iter() of it"),
    ):
        for (heard,) in hybrid(lambda rank, culprit=culprit: culprit if rank == 1 else iter([[]])):  # type: ignore[misc]
            assert heard.startswith(f"ExchangeError: step 0: rank 1 failed: {message}")


def test_hybrid_sequences_above_the_cap_and_keys_of_any_dtype() -> None:
    def make(rank: int) -> Iterator[Any]:
        score = torch.tensor([rank, 0.5]).bfloat16()
        return iter(
            [[{"tokens": torch.arange(2), "score": score}], [{"tokens": torch.zeros(70 if rank == 3 else 2).long()}]]
        )

    for rank, (first, second) in enumerate(hybrid(make, steps=2)):
        (number,) = first[0]
        assert first[2][number].dtype == torch.bfloat16
        assert first[2][number].tolist() == [number, 0.5], rank
        assert second.startswith("ScheduleError: step 1: sequence 3 has 70 tokens, the limit is 64")
        assert second.endswith("is sample 0 of this step on data-parallel rank 3)")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_packing_scheduler": "lpt"}, "algorithm is 'dp_balanced' on rank 0 and 'lpt' on rank 1"),
        ({"max_seqlen_per_dp_cp_rank": 32}, "max_seqlen_per_dp_cp_rank is 64 on rank 0 and 32 on rank 1"),
        ({"scheduler_options": {"equal_count": False}}, "equal_count is True on rank 0 and False on rank 1"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 4},
            "microbatches_multiple is not given on rank 0 and 4 on rank 1",
        ),
    ],
    ids=str,
)
def test_ranks_that_would_plan_differently_are_told(fields: dict[str, Any], message: str) -> None:
    """They would send what the others do not expect, which ends processes without a word of why."""

    def body(rank: int, world: int) -> str:
        items = iter([{"tokens": torch.zeros(1 + (7 * i + rank) % 9).long()} for i in range(8)])
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(items, config(**(fields if rank == 1 else {})), 4)
        return str(caught.value)

    for heard in run_ranks(body, 4):
        assert heard == f"step 0: the ranks would plan differently: {message}. Give all ranks the same configuration"


def test_packs_of_an_exchange_that_differ_are_told() -> None:
    def body(rank: int, world: int) -> str:
        layout = ParallelLayout(2, 1, 64)
        mover = Exchange(DpCpGroups.create(layout, timeout_s=10))
        items = IterableWrapper([{"tokens": torch.zeros(1 + i % 5).long()} for i in range(20)])
        cost = CostModel(a=1e-5, b=1e-9 * (1 + rank))
        with pytest.raises(ExchangeError) as caught:
            next(Pack(items, layout, global_batch_size=8, exchange=mover, cost=cost))
        return str(caught.value)

    for heard in run_ranks(body, 2):
        assert "step 0: the ranks would plan differently: cost is CostModel(" in heard


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("kind", ["other lengths", "other tokens", "other order"])
def test_pipeline_stages_that_read_different_data_are_told(pp: int, kind: str) -> None:
    """Labels would silently belong to other tokens."""
    dp_size = 1 if kind == "other order" else 2  # in one pack, sums of tokens are the same

    def body(rank: int, world: int) -> str:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(pp, -1), mesh_dim_names=("pp", "dp"))
        stage, dp = divmod(rank, world // pp)
        changed = stage == pp - 1 and dp == dp_size - 1
        lengths, ids = [4, 5, 6, 6], [0, 1, 2, 3]
        if changed:
            lengths[2] = 7 if kind == "other lengths" else 6
            ids = {"other lengths": ids, "other tokens": [0, 1, 2, 4], "other order": [0, 1, 3, 2]}[kind]
        items = [{"tokens": torch.full((n,), i)} for n, i in zip(lengths, ids, strict=True)]
        iterator = iter(items) if stage in (0, pp - 1) else None
        try:
            wrap_data_iterator(iterator, config(data_timeout_s=3.0, read_ahead=False), 4, mesh)
            wrap_data_iterator(iterator, config(data_timeout_s=3.0, read_ahead=False), 4, mesh)
        except (TdpError, StopIteration) as error:
            return str(error)
        return ""

    heard = run_ranks(body, dp_size * pp)
    message = "step 0: the first and the last pipeline stage read samples of other lengths or tokens"
    assert sum(text.startswith(message) for text in heard) >= pp  # one pipeline at least
    if kind == "other lengths":
        assert all(text.startswith(message) for text in heard)


@pytest.mark.parametrize("adapter", ["wrap", "hybrid"])
def test_context_parallel_ranks_that_read_different_data_are_told(adapter: str) -> None:
    """They share the samples out among themselves: some would be trained on twice, and others never."""

    def body(rank: int, world: int) -> list[str]:
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "cp"))
        heard = []
        for culprit in (None, 3):
            lengths = [3, 8, 5, 6] if rank != culprit else [8, 3, 5, 6]
            items = iter([[{"tokens": torch.zeros(n).long()} for n in lengths]])
            try:
                if adapter == "wrap":
                    wrap_data_iterator(items, config(), 1, mesh)
                else:
                    next(HybridCPDataLoaderWrapper(items, config(), mesh))
                heard.append("")
            except ExchangeError as error:
                heard.append(str(error))
        return heard

    for fine, wrong in run_ranks(body, 4):
        assert fine == ""
        assert wrong.startswith("step 0: ranks 2 and 3 have read samples of different lengths")
