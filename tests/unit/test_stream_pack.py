"""StreamPack: waves out of a window, every sample once, on any layout and after any restart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper, Mapper

from tdp_megatron.errors import ScheduleError, StateMismatchError
from tdp_megatron.nodes import Blend, DocumentSample, GlobalBatch, IndexedRead, Loader, Prefetch, Reroute, StreamPack
from tdp_megatron.schedule import CostModel, validate
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import ParallelLayout, Step

LAYOUT = ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), tail_multiple=2)
COST = CostModel(a=1e-5, b=1e-8, c0=1e-5)
NUM_SAMPLES = 150


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("stream")
    rng = np.random.default_rng(5)
    return [write_corpus(folder / f"d{i}", [rng.integers(0, 99, n) for n in rng.integers(1, 90, 50)]) for i in (0, 1)]


def samples(prefixes: list[str], num_samples: int | None = NUM_SAMPLES) -> Blend:
    sources = [DocumentSample(IndexedRead(p), max_seqlen=90, num_epochs=None) for p in prefixes]
    return Blend(sources, [0.6, 0.4], num_samples=num_samples)


def packed(prefixes: list[str], layout: ParallelLayout = LAYOUT, **options: Any) -> StreamPack:
    return StreamPack(samples(prefixes), layout, **{"window": 40, "cost": COST, **options})


def described(batch: GlobalBatch) -> list[Any]:
    return [batch.index, batch.refs.tolist(), batch.seqlens.tolist(), batch.plan.digest()]


def steps_of_ranks(roots: list[Any], count: int) -> list[dict[int, tuple[int, int]]]:
    """Per step, what all ranks together hold: sample of the step -> provenance."""
    steps = []
    for _ in range(count):
        held: dict[int, tuple[int, int]] = {}
        for root in roots:
            for batch in next(root):
                held.update(zip(batch.sample_ids, batch.refs, strict=True))
        steps.append(held)
    return steps


@pytest.mark.parametrize("waves_per_batch", [1, 3])
def test_every_sample_comes_once_in_valid_plans(prefixes: list[str], waves_per_batch: int) -> None:
    batches = list(Loader(packed(prefixes, waves_per_batch=waves_per_batch)))
    assert [batch.index for batch in batches] == list(range(len(batches)))
    refs = [tuple(ref) for batch in batches for ref in batch.refs.tolist()]
    assert sorted(refs) == sorted(map(tuple, samples(prefixes).take(NUM_SAMPLES).refs.tolist()))
    for batch in batches[:-1]:
        validate(batch.plan, equal_count=True)
        assert batch.plan.num_microbatches(0) == waves_per_batch
        assert batch.plan.seqlens.tolist() == batch.seqlens.tolist()


def test_batches_of_waves_are_the_waves(prefixes: list[str]) -> None:
    single = list(Loader(packed(prefixes)))
    double = list(Loader(packed(prefixes, waves_per_batch=2)))
    assert len(double) == -(-len(single) // 2)
    for number, batch in enumerate(double):
        waves = single[2 * number : 2 * number + 2]
        ops = [
            (op.first_rank, op.cp_size, sorted(wave.refs[list(op.sample_ids)].tolist()))
            for wave in waves
            for op in wave.plan.ops
        ]
        assert [
            (op.first_rank, op.cp_size, sorted(batch.refs[list(op.sample_ids)].tolist())) for op in batch.plan.ops
        ] == ops


def test_the_tokens_of_each_rank_are_those_of_its_samples(prefixes: list[str]) -> None:
    layout = ParallelLayout(4, 1, 128)
    roots = [Reroute(packed(prefixes, layout), rank=rank) for rank in range(layout.num_ranks)]
    for root in roots:
        root.reset(None)
    tokens = {tuple(ref): sample["tokens"] for ref, sample in with_refs(samples(prefixes))}
    seen = 0
    for _ in range(5):
        for step in (next(root) for root in roots):
            assert isinstance(step, Step)
            for batch in step:
                bounds = batch.cu_seqlens_padded.tolist()
                for ref, begin, end in zip(batch.refs, bounds, bounds[1:], strict=False):
                    assert torch.equal(batch.tokens[begin:end], tokens[ref])
                    seen += 1
    assert seen > 20


def with_refs(source: Blend) -> Iterator[tuple[tuple[int, int], Any]]:
    return ((sample.ref, sample) for sample in source.take(NUM_SAMPLES))


@pytest.mark.parametrize("options", [{}, {"waves_per_batch": 2}, {"max_age": 45}, {"window": 1}, {"window": 500}])
def test_resume_at_every_step(prefixes: list[str], options: dict[str, Any]) -> None:
    assert check_resume_at_every_step(lambda: packed(prefixes, **options), describe=described) > 3


def test_resume_behind_a_users_node(prefixes: list[str]) -> None:
    def make() -> StreamPack:
        source = Mapper(samples(prefixes), lambda sample: {**sample, "id": sample.ref[1]})
        return StreamPack(source, LAYOUT, window=40, cost=COST)

    assert check_resume_at_every_step(make, describe=described) > 3


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (2, 2), (3, 2), (8, 1), (1, 4)])
def test_on_another_layout_nothing_is_lost_or_repeated(prefixes: list[str], dp: int, cp: int) -> None:
    before = [Prefetch(Reroute(packed(prefixes), rank=rank), depth=3) for rank in range(LAYOUT.num_ranks)]
    for root in before:
        root.reset(None)
    first = steps_of_ranks(before, 4)
    states = [root.state_dict() for root in before]
    assert all(state == states[0] for state in states)
    for root in before:
        root.shutdown()
    layout = ParallelLayout(dp, cp, 128, cp_sizes=tuple({1, cp}), tail_multiple=2)
    after = [Reroute(packed(prefixes, layout), rank=rank) for rank in range(layout.num_ranks)]
    for root in after:
        root.reset(states[0])
    second = []
    while True:
        try:
            second += steps_of_ranks(after, 1)
        except StopIteration:
            break
    refs = [ref for step in first + second for ref in step.values()]
    assert sorted(refs) == sorted(map(tuple, samples(prefixes).take(NUM_SAMPLES).refs.tolist()))


def test_skip_to_plans_the_same_waves(prefixes: list[str]) -> None:
    whole = [described(batch) for batch in Loader(packed(prefixes))]
    node = packed(prefixes)
    node.skip_to(3)
    assert described(next(node)) == whole[3]
    with pytest.raises(ValueError, match="cannot go back from global batch 4 to 1"):
        node.skip_to(1)
    with pytest.raises(ValueError, match=f"global batch 900 is beyond the end; there are {len(whole)}"):
        node.skip_to(900)


def test_drop_last(prefixes: list[str]) -> None:
    kept = list(Loader(packed(prefixes, waves_per_batch=4)))
    dropped = list(Loader(packed(prefixes, waves_per_batch=4, drop_last=True)))
    single = list(Loader(packed(prefixes)))
    assert len(single) % 4, "the data must end inside a batch, or this shows nothing"
    assert len(kept) == len(dropped) + 1 == -(-len(single) // 4)


def test_samples_that_went_out_are_let_go() -> None:
    class Tokens(dict[str, Any]):
        pass

    alive: list[weakref.ref[Tokens]] = []

    def source() -> Iterator[Tokens]:
        for i in range(400):
            item = Tokens(tokens=np.full(1 + i % 50, i))
            alive.append(weakref.ref(item))
            yield item

    node = StreamPack(IterableWrapper(source()), LAYOUT, window=30, max_age=60, cost=COST)
    node.reset(None)
    for _ in range(40):
        next(node)
    gc.collect()
    assert len(alive) > 150
    # What waits, and what shares a draw with it.
    assert sum(ref() is not None for ref in alive) <= 100


def test_a_sample_that_fits_no_rank_is_named(prefixes: list[str]) -> None:
    small = ParallelLayout(2, 1, 16)
    with pytest.raises(ScheduleError, match=r"sample \d+ of dataset \d: .*16"):
        next(iter(Loader(packed(prefixes, small))))


def test_states_that_do_not_belong(prefixes: list[str]) -> None:
    node = packed(prefixes)
    node.reset(None)
    for _ in range(4):
        next(node)
    state = node.state_dict()
    assert state["buffer"]["numbers"], "samples must be waiting"
    with pytest.raises(StateMismatchError, match="window was 40 and is 41"):
        packed(prefixes, window=41).reset(state)
    with pytest.raises(StateMismatchError, match="no buffer"):
        packed(prefixes).reset({k: v for k, v in state.items() if k != "buffer"})
    for numbers in ([1, 0], [-1], [state["buffer"]["arrived"]], [5, 5]):
        with pytest.raises(StateMismatchError, match="do not rise from"):
            packed(prefixes).reset({**state, "buffer": {**state["buffer"], "first": 0, "numbers": numbers}})
    with pytest.raises(StateMismatchError, match="10000 samples had been drawn .* the data ends before"):
        packed(prefixes).reset({**state, "buffer": {**state["buffer"], "arrived": 10_000}})
    with pytest.raises(ScheduleError):
        packed(prefixes, ParallelLayout(2, 1, 16)).reset(state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"window": 2.5}, TypeError, "window must be an int"),
        ({"max_age": -1}, ValueError, "max_age must be at least 0"),
        ({"waves_per_batch": 0}, ValueError, "waves_per_batch must be at least 1"),
        ({"waves_per_batch": True}, TypeError, "waves_per_batch must be an int"),
    ],
)
def test_bad_arguments(prefixes: list[str], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        packed(prefixes, **options)
    with pytest.raises(TypeError, match=r"must be a torchdata\.nodes\.BaseNode"):
        StreamPack([1, 2], LAYOUT, window=4)  # type: ignore[arg-type]
