"""Samples that are left out, and runs that begin further on: Batch and StreamPack, alone and on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchdata.nodes import BaseNode, IterableWrapper, Mapper

from tdp_megatron.nodes import Batch, Blend, DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute, StreamPack
from tdp_megatron.nodes.base import SampleSource
from tdp_megatron.nodes.left_out import LeftOut, draw_numbers
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import ParallelLayout

NUM_SAMPLES = 130
S = 40
LAYOUT = ParallelLayout(4, 1, 64, cp_sizes=(1, 2, 4), tail_multiple=2)
RANGES = [(17, 30), (3, 5), (30, 33), (60, 60), (90, 101)]
KEPT = [n for n in range(NUM_SAMPLES) if not any(begin <= n < end for begin, end in RANGES)]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("left_out")
    rng = np.random.default_rng(7)
    return [write_corpus(folder / f"d{i}", [rng.integers(0, 99, n) for n in rng.integers(1, S, 90)]) for i in (0, 1)]


def samples(prefixes: list[str], kind: str = "ours") -> BaseNode[Any]:
    sources: list[Any] = [DocumentSample(IndexedRead(p), max_seqlen=S, num_epochs=None) for p in prefixes]
    blend = Blend(sources, [0.6, 0.4], num_samples=NUM_SAMPLES)
    return blend if kind == "ours" else Mapper(blend, lambda sample: {**sample, "ref": list(sample.ref)})


@pytest.fixture(scope="module")
def whole(prefixes: list[str]) -> list[tuple[int, int]]:
    """The provenance of every sample, by its number."""
    source = samples(prefixes)
    assert isinstance(source, SampleSource)
    return [(a, b) for a, b in source.take(NUM_SAMPLES).refs.tolist()]


def batches(prefixes: list[str], kind: str = "ours", **options: Any) -> Batch:
    return Batch(samples(prefixes, kind), sequence_length=S, **{"micro_batch_size": 2, **options})


def rows(batch: dict[str, Any]) -> list[Any]:
    return [batch["tokens"].tolist(), batch.get("ref")]


def tokens_of_ranks(make: Callable[..., Batch], dp_size: int, state: Any = None, steps: int = 10**9) -> list[Any]:
    """The rows of all ranks in the order of the samples."""
    nodes = [make(dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for node in nodes:
        node.reset(state)
    found: list[Any] = []
    while steps > 0:
        steps -= 1
        try:
            found += [row for node in nodes for row in next(node)["tokens"].tolist()]
        except StopIteration:
            break
    return found


@pytest.mark.parametrize("kind", ["ours", "user"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_batch_leaves_samples_out(prefixes: list[str], kind: str, micro_batch_size: int) -> None:
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "drop_last": False}
    everything = [row for batch in batches(prefixes, kind, **options) for row in batch["tokens"].tolist()]
    found = [row for b in batches(prefixes, kind, **options, skip_samples=RANGES) for row in b["tokens"].tolist()]
    assert len(everything) == NUM_SAMPLES
    assert found == [everything[n] for n in KEPT]


@pytest.mark.parametrize("kind", ["ours", "user"])
def test_batches_with_gaps_resume_at_every_step(prefixes: list[str], kind: str) -> None:
    def make() -> Batch:
        return batches(prefixes, kind, dp_rank=1, dp_size=2, skip_samples=RANGES, consumed_samples=2)

    assert check_resume_at_every_step(make, describe=rows) == (len(KEPT) - 2) // 4
    assert check_resume_at_every_step(lambda: Prefetch(make(), depth=2), describe=rows) > 3


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
def test_batches_with_gaps_go_on_with_other_ranks(prefixes: list[str], dp_size: int, steps: int) -> None:
    def make(**ranks: Any) -> Batch:
        return batches(prefixes, micro_batch_size=1, skip_samples=RANGES, **ranks)

    everything = tokens_of_ranks(make, 1)
    node = make(dp_rank=3, dp_size=4)
    node.reset(None)
    for _ in range(steps):
        next(node)
    state = json.loads(json.dumps(node.state_dict()))
    found = tokens_of_ranks(make, dp_size, state)
    assert len(found) > len(everything) - 4 * steps - dp_size
    assert found == everything[4 * steps : 4 * steps + len(found)]


def test_a_range_may_be_added_when_a_run_goes_on(prefixes: list[str]) -> None:
    """After a loss spike: back to the last checkpoint, and around what caused it."""
    everything = tokens_of_ranks(lambda **ranks: batches(prefixes, **ranks), 1)
    node = batches(prefixes, dp_size=2)
    node.reset(None)
    for _ in range(5):
        next(node)
    found = tokens_of_ranks(lambda **r: batches(prefixes, skip_samples=[(10, 24), (40, 50)], **r), 1, node.state_dict())
    assert found == everything[24:40] + everything[50:]


@pytest.mark.parametrize("end", [NUM_SAMPLES, NUM_SAMPLES + 1, 10**9, 2**70])
@pytest.mark.parametrize("kind", ["ours", "user"])
def test_a_range_may_reach_past_the_end(prefixes: list[str], kind: str, end: int) -> None:
    node = batches(prefixes, kind, skip_samples=[(100, end)])
    assert len(list(node)) == 50
    again = batches(prefixes, kind, skip_samples=[(100, end)])
    again.reset(node.state_dict())
    assert list(again) == []
    # Without the range, a run goes on where it begins.
    further = batches(prefixes, kind)
    further.reset(node.state_dict())
    assert len(list(further)) == (NUM_SAMPLES - 100) // 2
    packed = StreamPack(samples(prefixes, kind), LAYOUT, window=20, skip_samples=[(100, end)])
    assert sum(len(batch.refs) for batch in packed) == 100


@pytest.mark.parametrize("end", [2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize("kind", ["ours", "user"])
def test_a_range_without_end_ends_data_that_repeats(prefixes: list[str], kind: str, end: int) -> None:
    def endless() -> BaseNode[Any]:
        source = DocumentSample(IndexedRead(prefixes[0]), max_seqlen=S, num_epochs=None)
        return source if kind == "ours" else Mapper(source, dict)

    ranges = [(30, end)]
    assert len(list(Batch(endless(), micro_batch_size=2, sequence_length=S, skip_samples=ranges))) == 15
    packed = StreamPack(endless(), LAYOUT, window=7, skip_samples=ranges)
    assert sum(len(batch.refs) for batch in packed) == 30


def test_skipping_on_inside_and_behind_what_is_drawn(prefixes: list[str]) -> None:
    def make() -> Batch:
        return batches(prefixes, micro_batch_size=1, skip_samples=RANGES)

    everything = tokens_of_ranks(lambda **ranks: batches(prefixes, micro_batch_size=1, **ranks), 1)
    for start in (0, 1, 2, 12):  # samples read before
        for target in (*range(start + 2, 36), 92, 100, 101, 129):
            node = make()
            node.reset(None)
            for _ in range(start):
                next(node)
            node.skip_to(target)
            restored = make()
            restored.reset(node.state_dict())
            expected = [everything[n] for n in KEPT if n >= target]
            for one in (node, restored):
                assert [row for batch in one for row in batch["tokens"].tolist()] == expected


def test_a_batch_goes_on_from_megatrons_consumed_samples(prefixes: list[str]) -> None:
    everything = tokens_of_ranks(lambda **ranks: batches(prefixes, **ranks), 1)
    for consumed in (0, 24, np.int64(25), 128):
        found = [row for batch in batches(prefixes, consumed_samples=consumed) for row in batch["tokens"].tolist()]
        begin = int(consumed)
        assert found == everything[begin : begin + (NUM_SAMPLES - begin) // 2 * 2]
    node = batches(prefixes, consumed_samples=24)
    node.skip_to(13)
    assert next(node)["tokens"].tolist() == everything[26:28]
    again = batches(prefixes, consumed_samples=24)
    again.reset(json.loads(json.dumps(node.state_dict())))
    assert next(again)["tokens"].tolist() == everything[28:30]  # a saved state comes first
    node = batches(prefixes, consumed_samples=5000)
    for _ in range(2):
        with pytest.raises(ValueError, match="sample 5000 is beyond the end"):
            next(node)


# StreamPack


def packed(prefixes: list[str], kind: str = "ours", layout: ParallelLayout = LAYOUT, **options: Any) -> StreamPack:
    return StreamPack(samples(prefixes, kind), layout, **{"window": 24, **options})


def described(batch: Any) -> list[Any]:
    return [batch.index, batch.refs.tolist(), batch.seqlens.tolist(), batch.plan.digest()]


def sorted_refs(found: list[Any]) -> list[tuple[int, int]]:
    return sorted((a, b) for batch in found for a, b in batch.refs.tolist())


@pytest.mark.parametrize("window", [1, 24, 500])
def test_a_stream_leaves_samples_out(prefixes: list[str], whole: list[tuple[int, int]], window: int) -> None:
    found = list(packed(prefixes, window=window, skip_samples=RANGES, consumed_samples=2))
    assert sorted_refs(found) == sorted(whole[n] for n in KEPT if n >= 2)
    assert [batch.index for batch in found] == list(range(len(found)))


@pytest.mark.parametrize("kind", ["ours", "user"])
@pytest.mark.parametrize("options", [{}, {"max_age": 30}, {"waves_per_batch": 2, "consumed_samples": 11}])
def test_streams_with_gaps_resume_at_every_step(prefixes: list[str], kind: str, options: dict[str, Any]) -> None:
    def make() -> StreamPack:
        return packed(prefixes, kind, skip_samples=RANGES, **options)

    assert check_resume_at_every_step(make, describe=described) > 3


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (2, 2), (3, 2), (8, 1), (1, 4)])
@pytest.mark.parametrize("added", [[], [(0, 40), (70, 80)]])
def test_streams_with_gaps_go_on_with_other_ranks(
    prefixes: list[str], whole: list[tuple[int, int]], dp: int, cp: int, added: list[tuple[int, int]]
) -> None:
    """Every sample that is not left out comes once; those of ranges that are added do not come any more."""
    before = packed(prefixes, skip_samples=RANGES)
    before.reset(None)
    first = [next(before) for _ in range(3)]
    layout = ParallelLayout(dp, cp, 128, cp_sizes=tuple({1, cp}), tail_multiple=2)
    after = packed(prefixes, layout=layout, skip_samples=[*RANGES, *added])
    after.reset(json.loads(json.dumps(before.state_dict())))
    second = list(after)
    done = sorted_refs(first)
    kept = [whole[n] for n in KEPT if whole[n] in done or not any(b <= n < e for b, e in added)]
    assert len(set(whole)) == len(whole)
    assert sorted(done + sorted_refs(second)) == sorted(kept)


def test_a_stream_is_skipped_over_gaps(prefixes: list[str]) -> None:
    everything = [described(batch) for batch in packed(prefixes, skip_samples=RANGES)]
    node = packed(prefixes, skip_samples=RANGES)
    node.skip_to(4)
    assert [described(batch) for batch in node] == everything[4:]


def test_long_ranges_hold_no_memory_and_read_nothing(prefixes: list[str]) -> None:
    source = DocumentSample(IndexedRead(prefixes[0]), max_seqlen=S, num_epochs=None)
    node = StreamPack(source, LAYOUT, window=24, skip_samples=[(30, 10**12)])
    node.reset(None)
    while (state := node.state_dict())["buffer"]["arrived"] < 10**12:
        next(node)
    assert state["buffer"]["first"] < 30, "a sample from before the range must still wait"
    again = StreamPack(DocumentSample(IndexedRead(prefixes[0]), max_seqlen=S, num_epochs=None), LAYOUT, window=24)
    again.reset(state)  # the range has been passed over: what is behind it goes on
    assert described(next(again)) == described(next(node))


# The ranges themselves


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12))), st.integers(0, 50), st.integers(0, 25))
def test_ranges_are_what_they_say(pairs: list[tuple[int, int]], number: int, n: int) -> None:
    ranges = [(begin, begin + size) for begin, size in pairs]
    left_out = LeftOut("skip", ranges)
    out = {i for begin, end in ranges for i in range(begin, end)}
    assert {i for begin, end in left_out.ranges for i in range(begin, end)} == out
    assert bool(left_out) == bool(out)
    assert left_out.contains(np.arange(60)).tolist() == [i in out for i in range(60)]
    first, run = left_out.next_run(number)
    assert first == next(i for i in range(number, 100) if i not in out)
    assert run == next((i for i in range(first, 100) if i in out), 2**63 - 1) - first
    source = IterableWrapper([{"tokens": [i]} for i in range(40)])
    source.reset()
    block, numbers = left_out.draw(source, n, 0)
    assert numbers.tolist() == [i for i in range(40) if i not in out][:n]
    assert [int(sample["tokens"][0]) for sample in block] == block.refs[:, 1].tolist() == numbers.tolist()


@given(st.sets(st.integers(5, 60)), st.integers(0, 30))
def test_samples_drawn_by_number(numbers: set[int], more: int) -> None:
    wanted = np.array(sorted(numbers), dtype=np.int64)
    end = max(numbers, default=5) + 1 + more
    source = IterableWrapper([{"tokens": [i]} for i in range(70)])
    source.reset({"_num_yielded": 5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tdp_megatron.nodes.left_out._SMALL_GAP", 3)
        block = draw_numbers(source, wanted, 5, end)
    if end > 70:
        assert block is None
    else:
        assert block is not None
        assert [int(sample["tokens"][0]) for sample in block] == wanted.tolist()
        assert int(next(source, {"tokens": [70]})["tokens"][0]) == end


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        ([(3, 2)], ValueError, r"must hold \(begin, end\) with 0 <= begin <= end, got \(3, 2\)"),
        ([(-1, 2)], ValueError, r"got \(-1, 2\)"),
        ([(1, 2, 3)], TypeError, r"must hold pairs \(begin, end\) of ints, got \(1, 2, 3\)"),
        ([(1, 2.0)], TypeError, "of ints, got"),
        ([5], TypeError, "of ints, got 5"),
        ([(True, 5)], TypeError, "of ints"),
        ([None], TypeError, "of ints, got None"),
    ],
)
def test_bad_ranges(prefixes: list[str], ranges: Any, error: type[Exception], message: str) -> None:
    source = samples(prefixes)
    with pytest.raises(error, match=f"skip_samples {message}" if message.startswith("must") else message):
        Batch(source, micro_batch_size=1, sequence_length=S, skip_samples=ranges)
    with pytest.raises(error, match=message):
        StreamPack(source, LAYOUT, window=4, skip_samples=ranges)
    with pytest.raises(error, match=message):
        Pack(source, LAYOUT, global_batch_size=4, skip=ranges)


@pytest.mark.parametrize(("consumed", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError)])
def test_bad_consumed_samples(prefixes: list[str], consumed: Any, error: type[Exception]) -> None:
    for make in (batches, packed):
        with pytest.raises(error, match="consumed_samples must"):
            make(prefixes, consumed_samples=consumed)


def test_a_stream_with_gaps_behind_reroute(prefixes: list[str], whole: list[tuple[int, int]]) -> None:
    roots = [Reroute(packed(prefixes, skip_samples=RANGES), rank=rank) for rank in range(LAYOUT.num_ranks)]
    held = sorted({ref for root in roots for step in Loader(root) for batch in step for ref in batch.refs})
    assert held == sorted({whole[n] for n in KEPT})


# What loops do with a loader's iterator


@pytest.mark.parametrize("kind", ["ours", "user"])
@pytest.mark.parametrize("ranges", [[], RANGES])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("restart", [False, True])
def test_an_iterator_passes_items_over(
    prefixes: list[str], kind: str, ranges: list[tuple[int, int]], depth: int, restart: bool
) -> None:
    def make() -> Any:
        node: BaseNode[Any] = batches(prefixes, kind, dp_rank=1, dp_size=2, skip_samples=ranges)
        return iter(Loader(Prefetch(node, depth=depth) if depth else node, restart_on_stop_iteration=restart))

    everything = [rows(batch) for batch in make()]
    for before, n in ((0, 0), (0, 3), (2, 1), (2, 9), (5, len(everything) - 5)):
        steps = make()
        if restart and before == 2:
            steps.has_next()
        assert [rows(next(steps)) for _ in range(before)] == everything[:before]
        steps.skip_items(n)
        fresh = make()
        fresh.load_state_dict(json.loads(json.dumps(steps.state_dict())))
        for one in (steps, fresh):
            # torchdata counts an item that it has drawn in advance twice.
            assert restart or one.state_dict()["num_yielded"] == before + n
            assert [rows(batch) for batch in one] == everything[before + n :]
    steps = make()
    with pytest.raises(StopIteration):
        steps.skip_items(len(everything) + 10)
    for n, error in ((-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="n must"):
            steps.skip_items(n)
