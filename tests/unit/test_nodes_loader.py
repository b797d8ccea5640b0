"""Loader, skipping, look-ahead windows, statistics, checkpoints of torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchdata.nodes import BaseNode, IterableWrapper, Mapper

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Loader, LookAhead, Pack, Prefetch, Reroute, Shard
from tdp_megatron.nodes.look_ahead import balanced_batches
from tdp_megatron.schedule import CostModel
from tdp_megatron.stats import flatten_stats, prometheus_text, write_tensorboard
from tdp_megatron.testing import check_resume_at_every_step, run_ranks, write_corpus
from tdp_megatron.types import ParallelLayout, Step

LAYOUT = ParallelLayout(2, 1, 128)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("loader")
    rng = np.random.default_rng(5)
    return [write_corpus(folder / f"d{i}", [rng.integers(0, 99, n) for n in rng.integers(1, 80, 50)]) for i in (0, 1)]


def samples(prefixes: list[str], num_samples: int | None = 120) -> Blend:
    sources = [DocumentSample(IndexedRead(p), max_seqlen=60, num_epochs=None) for p in prefixes]
    return Blend(sources, [0.6, 0.4], num_samples=num_samples)


def root(prefixes: list[str], **options: Any) -> Reroute:
    return Reroute(Pack(samples(prefixes), LAYOUT, global_batch_size=10, **options))


def refs_of(step: Step) -> list[Any]:
    return [step.index, sorted(ref for batch in step for ref in batch.refs)]


@pytest.mark.parametrize("read_ahead", [False, True])
def test_skip_to_jumps_and_keeps_the_numbers(prefixes: list[str], read_ahead: bool) -> None:
    whole = [refs_of(step) for step in root(prefixes)]
    loader = Loader(Prefetch(root(prefixes)) if read_ahead else root(prefixes))
    steps = iter(loader)
    seen = [refs_of(next(steps)) for _ in range(3)]
    loader.skip_to(7)
    seen += [refs_of(next(steps))]
    state = loader.state_dict()
    seen += [refs_of(step) for step in steps]
    assert seen == whole[:3] + whole[7:]
    again = Loader(Prefetch(root(prefixes)) if read_ahead else root(prefixes))
    again.load_state_dict(state)
    assert [refs_of(step) for step in again] == whole[8:]


@pytest.mark.parametrize("read_ahead", [False, True])
def test_a_skip_before_the_iteration_is_not_lost(prefixes: list[str], read_ahead: bool) -> None:
    whole = [refs_of(step) for step in root(prefixes)]
    loader = Loader(Prefetch(root(prefixes)) if read_ahead else root(prefixes))
    loader.skip_to(4)
    assert [refs_of(step) for step in loader] == whole[4:]
    assert [refs_of(step) for step in loader] == whole  # the next iteration begins anew
    steps = iter(loader)
    next(steps)
    loader.load_state_dict(loader.state_dict())
    loader.skip_to(6)  # from the loaded place on
    assert [refs_of(step) for step in loader] == whole[6:]


def test_numbers_of_numpy_and_torch_stay_out_of_the_state(prefixes: list[str]) -> None:
    """They come from checkpoints; a state that held one could not be restored, nor saved as JSON."""
    whole = [refs_of(step) for step in root(prefixes)]
    for consumed in (np.int64(30), torch.tensor(30), 30):
        loader = Loader(root(prefixes, consumed_samples=consumed))
        steps = iter(loader)
        seen = [refs_of(next(steps))]
        loader.skip_to(np.int32(6))
        state = json.loads(json.dumps(loader.state_dict()))
        again = Loader(root(prefixes))
        again.load_state_dict(state)
        assert seen + [refs_of(step) for step in again] == [whole[3], *whole[6:]]


@pytest.mark.parametrize("last", [12, 13, 10**9])
def test_a_stretch_may_reach_past_the_end(prefixes: list[str], last: int) -> None:
    steps = [refs_of(step) for step in root(prefixes, skip=[(2, 4), (9, last)])]
    whole = [refs_of(step) for step in root(prefixes)]
    assert len(whole) == 12
    assert steps == whole[:2] + whole[4:9]


@pytest.mark.parametrize("read_ahead", [False, True])
def test_bad_stretches_are_left_out(prefixes: list[str], read_ahead: bool) -> None:
    def make() -> BaseNode[Step]:
        node = root(prefixes, skip=[(2, 4), (4, 5), (8, 9), (11, 12)])
        return Prefetch(node) if read_ahead else node

    whole = [refs_of(step) for step in root(prefixes)]
    assert [refs_of(step) for step in make()] == [whole[i] for i in (0, 1, 5, 6, 7, 9, 10)]
    check_resume_at_every_step(make, describe=refs_of)


def test_a_run_goes_on_from_megatrons_consumed_samples(prefixes: list[str]) -> None:
    whole = [refs_of(step) for step in root(prefixes)]
    assert [refs_of(step) for step in root(prefixes, consumed_samples=50)] == whole[5:]
    check_resume_at_every_step(lambda: root(prefixes, consumed_samples=50), describe=refs_of)
    with pytest.raises(ValueError, match="nearest: 50, 60"):
        root(prefixes, consumed_samples=55)
    with pytest.raises(ValueError, match="consumed_samples"):
        root(prefixes, consumed_samples=-10)
    node = root(prefixes, consumed_samples=5000)
    for _ in range(2):
        with pytest.raises(ValueError, match="beyond the end"):
            next(node)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: Pack(samples(p), LAYOUT, global_batch_size=5, skip=[(3, 2)]), ValueError, "skip must hold"),
        (lambda p: Loader(IterableWrapper([])).skip_to(2), TypeError, "cannot skip"),
        (lambda p: Prefetch(IterableWrapper([])).skip_to(2), TypeError, "cannot skip"),
        (lambda p: Reroute(IterableWrapper([])).skip_to(2), TypeError, "cannot skip"),
        (lambda p: root(p).skip_to(99), ValueError, "beyond the end"),
    ],
)
def test_impossible_skips(prefixes: list[str], call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(prefixes)


def test_going_back_needs_a_reset(prefixes: list[str]) -> None:
    node = root(prefixes)
    next(node)
    next(node)
    with pytest.raises(ValueError, match="cannot go back"):
        node.skip_to(1)


@pytest.mark.parametrize("step", [0, 1000])
def test_an_impossible_skip_changes_nothing(prefixes: list[str], step: int) -> None:
    loader = Loader(Prefetch(root(prefixes)))
    steps = iter(loader)
    before = [refs_of(next(steps)) for _ in range(3)]
    with pytest.raises(ValueError, match="cannot go back|beyond the end"):
        loader.skip_to(step)
    assert before + [refs_of(step) for step in steps] == [refs_of(step) for step in root(prefixes)]


def windows(prefixes: list[str], num_batches: int = 4) -> LookAhead:
    cost = CostModel(a=1e-4, b=1e-6)
    return LookAhead(samples(prefixes), global_batch_size=10, num_batches=num_batches, cost=cost)


def test_look_ahead_moves_samples_within_windows_only_and_evens_the_work(prefixes: list[str]) -> None:
    plain, moved = samples(prefixes).take(120), windows(prefixes).take(120)
    for begin in range(0, 120, 40):
        window = slice(begin, begin + 40)
        assert sorted(plain.refs[window].tolist()) == sorted(moved.refs[window].tolist())
    cost = CostModel(a=1e-4, b=1e-6)

    def spread(seqlens: np.ndarray[Any, Any]) -> float:
        work = cost.sequence_costs(seqlens).reshape(12, 10).sum(axis=1)
        return float((work.max() / work.mean()) - 1)

    assert spread(moved.seqlens) < spread(plain.seqlens) / 3
    order = balanced_batches(np.array([1.0, 9.0, 5.0, 5.0]), 2)
    assert order.tolist() == [0, 1, 2, 3]
    # A last window that is not full keeps its order.
    tail = LookAhead(samples(prefixes), global_batch_size=10, num_batches=7).take(500)
    assert tail.refs[70:].tolist() == plain.refs[70:].tolist()


def test_look_ahead_resumes_at_every_step_and_in_blocks_of_any_size(prefixes: list[str]) -> None:
    check_resume_at_every_step(lambda: windows(prefixes), describe=lambda s: s.ref)
    whole = windows(prefixes).take(200).refs.tolist()
    for size in (1, 7, 40, 41):
        node, drawn = windows(prefixes), []
        while len(part := node.take(size)):
            drawn += part.refs.tolist()
        assert drawn == whole


@pytest.mark.parametrize("start", [0, 7, 40, 47])
def test_look_ahead_passes_over_windows_without_planning_them(
    prefixes: list[str], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = windows(prefixes).take(200).refs.tolist()
    for target in (start, start + 3, 79, 80, 81, 119, 120):
        node = windows(prefixes)
        assert len(node.take(start)) == start
        assert node.num_remaining() == 120 - start
        node.skip_to(target)
        restored = windows(prefixes)
        restored.reset(json.loads(json.dumps(node.state_dict())))
        for one in (node, restored):
            assert one.num_remaining() == 120 - target
            assert one.take(200).refs.tolist() == whole[target:]
    with pytest.raises(ValueError, match="sample 121 is beyond the end"):
        windows(prefixes).skip_to(121)
    endless = LookAhead(samples(prefixes, None), global_batch_size=10, num_batches=4)
    monkeypatch.setattr("tdp_megatron.nodes.look_ahead.balanced_batches", None)
    endless.skip_to(4_000_000)
    assert endless.state_dict()["source"]["position"] == 4_000_000


def test_look_ahead_over_a_users_node_tells_the_end(prefixes: list[str]) -> None:
    def make() -> LookAhead:
        return LookAhead(Mapper(samples(prefixes, 45), lambda s: s), global_batch_size=10, num_batches=2)

    node = make()
    assert node.num_remaining() is None
    node.skip_to(43)
    assert len(node.take(10)) == 2
    for target in (46, 61):
        with pytest.raises(ValueError, match="more samples were to be passed over|ended while"):
            make().skip_to(target)


@pytest.mark.parametrize(("dp", "cp"), [(2, 2), (3, 1), (8, 1), (1, 4)])
def test_windows_and_steps_read_ahead_continue_on_other_ranks(prefixes: list[str], dp: int, cp: int) -> None:
    def run(layout: ParallelLayout, state: Any, count: int) -> tuple[list[Any], Any]:
        roots = [
            Prefetch(Reroute(Pack(windows(prefixes), layout, global_batch_size=10), rank=r), depth=3)
            for r in range(layout.num_ranks)
        ]
        for node in roots:
            node.reset(state)
        batches = []
        for _ in range(count):
            placed: dict[int, tuple[int, int]] = {}
            for node in roots:
                for packed in next(node):
                    placed.update(zip(packed.sample_ids, packed.refs, strict=True))
            batches.append([list(placed[i]) for i in sorted(placed)])
        states = [node.state_dict() for node in roots]
        assert all(s == states[0] for s in states)
        for node in roots:
            node.shutdown()
        return batches, states[0]

    before, state = run(ParallelLayout(4, 2, 64), None, 5)
    after, _ = run(ParallelLayout(dp, cp, 64), state, 6)
    flat = [ref for batch in before + after for ref in batch]
    assert flat == windows(prefixes).take(110).refs.tolist()


def test_look_ahead_bad_arguments(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="num_batches must be at least 1"):
        LookAhead(samples(prefixes), global_batch_size=10, num_batches=0)


def test_statistics_of_all_nodes(prefixes: list[str]) -> None:
    loader = Loader(Prefetch(root(prefixes)))
    assert len(list(loader)) == 12
    stats = loader.stats()
    assert list(stats) == [
        "Prefetch",
        "Reroute",
        "Pack",
        "Blend",
        "DocumentSample",
        "DocumentSample.1",
        "IndexedRead",
        "IndexedRead.1",
    ]
    assert stats["Reroute"]["items"] == stats["Pack"]["items"] == 12
    assert stats["Blend"]["items"] == stats["DocumentSample"]["items"] + stats["DocumentSample.1"]["items"] == 120
    assert stats["Pack"]["imbalance"] >= 1
    assert 0 <= stats["Reroute"]["padding"] < 1
    assert stats["Reroute"]["wait_seconds"] > 0
    shares = list(stats["Blend"]["sources"].values())
    assert [s["requested"] for s in shares] == pytest.approx([0.6, 0.4])
    assert [s["actual"] for s in shares] == pytest.approx([0.6, 0.4], abs=0.01)
    assert prefixes[0] in shares[0]["name"]


def test_writers() -> None:
    stats = {"Pack": {"items": 3, "imbalance": 1.5}, "Blend": {"items": 9, "sources": {'0 (a"b)': {"drawn": 7}}}}
    assert flatten_stats(stats)['Blend/sources/0 (a"b)/drawn'] == 7

    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, Any] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = (value, step)

    writer = Writer()
    write_tensorboard(writer, stats, 4)
    assert writer.scalars["data/Pack/imbalance"] == (1.5, 4)
    text = prometheus_text(stats, labels={"rank": "0"})
    assert text == (
        "# TYPE tdp_items gauge\n"
        'tdp_items{node="Pack",rank="0"} 3\n'
        'tdp_items{node="Blend",rank="0"} 9\n'
        "# TYPE tdp_imbalance gauge\n"
        'tdp_imbalance{node="Pack",rank="0"} 1.5\n'
        "# TYPE tdp_drawn gauge\n"
        'tdp_drawn{node="Blend/sources/0 (a\\"b)",rank="0"} 7\n'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": {"my-rank": "0"}}, "got 'my-rank'"),
        ({"labels": {"node": "0"}}, "got 'node'"),
        ({"labels": {"__name__": "x"}}, "got '__name__'"),
        ({"labels": {"": "x"}}, "got ''"),
        ({"prefix": "1tdp"}, "got '1tdp'"),
        ({"prefix": "tdp data"}, "got 'tdp data'"),
    ],
)
def test_names_that_prometheus_does_not_allow(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prometheus_text({"Pack": {"items": 3}}, **options)
    assert prometheus_text({}) == "\n"


@pytest.mark.distributed
@pytest.mark.parametrize("restored_world", [2, 1, 4])
def test_state_in_a_distributed_checkpoint_is_saved_once(
    prefixes: list[str], tmp_path: Path, restored_world: int
) -> None:
    """As a Stateful of torch.distributed.checkpoint, written by two ranks and read by another number."""
    folder = tmp_path / "checkpoint"

    def loader(rank: int, world: int) -> Loader[Step]:
        return Loader(
            Prefetch(Reroute(Pack(samples(prefixes), ParallelLayout(world, 1, 128), global_batch_size=10), rank=rank))
        )

    def save(rank: int, world: int) -> list[Any]:
        mine = loader(rank, world)
        steps = iter(mine)
        for _ in range(3):
            next(steps)
        dcp.save({"data": mine}, checkpoint_id=folder)
        return [refs_of(step)[0] for step in steps]

    def load(rank: int, world: int) -> list[Any]:
        mine = loader(rank, world)
        dcp.load({"data": mine}, checkpoint_id=folder)
        return [refs_of(step)[0] for step in mine]

    rest = run_ranks(save, 2)
    assert run_ranks(load, restored_world) == [rest[0]] * restored_world
    # The ranks share the fields out: every field stands in one file, and the files hold nothing else.
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    assert sum(entry.length for entry in stored) == sum(p.stat().st_size for p in folder.glob("*.distcp"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["ours", "user"])
def test_a_distributed_checkpoint_with_a_blend_of_version_1(prefixes: list[str], tmp_path: Path, kind: str) -> None:
    """Loaded in place it is an error, also in part; read whole, it goes on exactly."""

    def sources() -> list[Any]:
        return [DocumentSample(IndexedRead(p), max_seqlen=60, num_epochs=None) for p in prefixes]

    def make() -> Loader[Any]:
        nodes = sources()
        if kind == "user":
            nodes[1] = Mapper(nodes[1], lambda sample: {"tokens": sample["tokens"], "ref": list(sample.ref)})
        return Loader(Prefetch(Pack(Blend(nodes, [0.6, 0.4]), LAYOUT, global_batch_size=10)))

    def described(batch: Any) -> list[Any]:
        return [batch.index, batch.refs.tolist(), batch.seqlens.tolist()]

    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    saved: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    rest = [described(next(batches)) for _ in range(4)]
    blend = saved["root"]["source"]
    states = []
    for source, count in zip(sources(), blend["counts"], strict=True):
        source.skip_to(count)
        states.append(source.state_dict())
    if kind == "user":
        states[1] = blend["sources"]["own"]["1"]
    blend.update(version=1, sources=states)
    folder = tmp_path / "checkpoint"
    dcp.save({"data": saved}, checkpoint_id=folder, no_dist=True)

    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: data\.root"):
        dcp.load({"data": make()}, checkpoint_id=folder, no_dist=True)
    again = make()
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"data": again}, checkpoint_id=folder, planner=planner, no_dist=True)
    with pytest.raises(StateMismatchError, match=r"version 1, but its sources are as version 2 .*dcp_to_torch_save"):
        iter(again)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["data"])
    batches = iter(again)
    assert [described(next(batches)) for _ in range(4)] == rest


def test_shards_know_what_is_left(prefixes: list[str]) -> None:
    shards = [Shard(samples(prefixes, 10), rank=r, num_ranks=4) for r in range(4)]
    for shard in shards:
        shard.reset(None)
    assert [shard.num_remaining() for shard in shards] == [3, 3, 2, 2]
    assert [len(shard.take(9)) for shard in shards] == [3, 3, 2, 2]


def test_a_restored_shard_stands_where_the_saved_one_did(prefixes: list[str]) -> None:
    for drawn in (0, 5, 11):
        shard = Shard(samples(prefixes), rank=1, num_ranks=3)
        shard.take(drawn)
        fresh = Shard(samples(prefixes), rank=1, num_ranks=3)
        fresh.reset(shard.state_dict())
        assert fresh.position == shard.position == drawn
        for one in (shard, fresh):
            one.skip_to(20)
        assert fresh.take(50).refs.tolist() == shard.take(50).refs.tolist()


def test_a_blend_of_shards_resumes_at_every_step(prefixes: list[str]) -> None:
    def blend() -> Blend:
        sources = [DocumentSample(IndexedRead(p), max_seqlen=60) for p in prefixes]
        return Blend([Shard(source, rank=1, num_ranks=2) for source in sources], [2, 1])

    assert check_resume_at_every_step(blend, describe=lambda sample: sample.ref) > 10


@pytest.mark.parametrize("place", [None, -1, 10**6, 1.5, True])
def test_a_damaged_place_in_the_window_is_told(prefixes: list[str], place: Any) -> None:
    node = windows(prefixes)
    node.take(7)
    state = {**node.state_dict(), "window_position": place}
    with pytest.raises(StateMismatchError, match="window_position must be a number of samples"):
        windows(prefixes).reset(state)
