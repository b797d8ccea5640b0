"""Pack, Reroute, Prefetch: resume through packing, on other ranks, with steps read ahead."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode, IterableWrapper, Loader, Mapper

from tdp_megatron import nodes as tdp_nodes
from tdp_megatron.errors import ScheduleError, StateMismatchError, TdpError
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Pack, Prefetch, Reroute, Shard
from tdp_megatron.schedule import Plan, PlanOp, Problem, api
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import ParallelLayout, Step

LAYOUT = ParallelLayout(2, 2, 64)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("steps")
    rng = np.random.default_rng(11)
    return [write_corpus(folder / f"d{i}", [rng.integers(0, 99, n) for n in rng.integers(0, 80, 40)]) for i in (0, 1)]


def blend(prefixes: list[str], num_samples: int | None = 100) -> Blend:
    sources = [DocumentSample(IndexedRead(p), max_seqlen=60, num_epochs=None) for p in prefixes]
    return Blend(sources, [0.6, 0.4], num_samples=num_samples)


def steps(prefixes: list[str], layout: ParallelLayout = LAYOUT, rank: int = 0, **options: Any) -> Reroute:
    arguments: dict[str, Any] = {"global_batch_size": 12, "check_plans": True, **options}
    return Reroute(Pack(blend(prefixes), layout, **arguments), rank=rank)


def describe(step: Step) -> list[Any]:
    facts = [step.index, step.num_loss_tokens_global, step.num_samples_global, dict(step.source_counts)]
    return [facts, [[b.tokens, b.labels, b.position_ids, b.cu_seqlens, list(b.refs)] for b in step]]


@pytest.mark.parametrize("drop_last", [True, False])
def test_resume_at_every_step(prefixes: list[str], drop_last: bool) -> None:
    count = check_resume_at_every_step(lambda: steps(prefixes, rank=3, drop_last=drop_last), describe=describe)
    assert count == (8 if drop_last else 9)


@pytest.mark.parametrize("depth", [1, 3, 50])
def test_resume_with_steps_read_ahead(prefixes: list[str], depth: int) -> None:
    assert check_resume_at_every_step(lambda: Prefetch(steps(prefixes), depth=depth), describe=describe) == 8


def test_resume_through_the_loader(prefixes: list[str]) -> None:
    def loader() -> Loader[Step]:
        return Loader(Prefetch(steps(prefixes)), restart_on_stop_iteration=False)

    whole = [describe(step)[0] for step in loader()]
    first = loader()
    taken = [describe(step)[0] for _, step in zip(range(3), first, strict=False)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert taken + [describe(step)[0] for step in second] == whole


@pytest.mark.parametrize(("dp", "cp"), [(2, 2), (3, 1), (8, 1), (1, 4), (1, 1)])
def test_continue_on_other_ranks(prefixes: list[str], dp: int, cp: int) -> None:
    """(4, 2) for three steps, then (dp, cp): the global batches are those of one uninterrupted run."""

    def global_batches(root_of: Any, layout: ParallelLayout, state: Any, count: int) -> tuple[list[Any], Any]:
        roots = [root_of(layout, rank) for rank in range(layout.num_ranks)]
        for root in roots:
            root.reset(state)
        batches = []
        for _ in range(count):
            placed: dict[int, tuple[int, int]] = {}
            for root in roots:
                for packed in next(root):
                    placed.update(zip(packed.sample_ids, packed.refs, strict=True))
            batches.append([placed[i] for i in sorted(placed)])
        states = [root.state_dict() for root in roots]
        assert all(s == states[0] for s in states)  # nothing per rank is in it
        return batches, states[0]

    def root_of(layout: ParallelLayout, rank: int) -> Reroute:
        return steps(prefixes, layout, rank)

    before, state = global_batches(root_of, ParallelLayout(4, 2, 64), None, 3)
    after, _ = global_batches(root_of, ParallelLayout(dp, cp, 64), state, 5)
    uninterrupted = blend(prefixes).take(96).refs.tolist()
    assert [list(ref) for batch in before + after for ref in batch] == uninterrupted


def test_shards_deal_one_order_and_continue_on_other_ranks(prefixes: list[str]) -> None:
    def deal(num_ranks: int, state: Any, rounds: int) -> tuple[list[Any], Any]:
        shards = [Shard(blend(prefixes), rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
        for shard in shards:
            shard.reset(state)
        drawn = [shard.take(rounds).refs.tolist() for shard in shards]
        return [ref for group in zip(*drawn, strict=True) for ref in group], shards[-1].state_dict()

    before, state = deal(4, None, 6)
    after, _ = deal(3, state, 8)
    assert before + after == blend(prefixes).take(48).refs.tolist()
    check_resume_at_every_step(lambda: Shard(blend(prefixes), rank=1, num_ranks=3), describe=lambda s: s.ref)


def test_a_tail_batch_is_kept_when_asked(prefixes: list[str]) -> None:
    *_, last = list(steps(prefixes, drop_last=False))
    assert last.num_samples_global == 100 % 12
    assert all(len(b.tokens) for b in last)


def test_every_rank_has_a_microbatch_even_without_a_sample(prefixes: list[str]) -> None:
    layout = ParallelLayout(4, 1, 64)
    for rank in range(4):
        for step in Reroute(Pack(blend(prefixes, 6), layout, global_batch_size=2, check_plans=True), rank=rank):
            assert step.num_microbatches == len(step.batches) >= 1
            for packed in step:
                if packed.is_dummy:
                    assert packed.loss_mask.sum() == 0
                    assert packed.padding_mask.all()
                    assert packed.refs == ()


def test_a_sample_above_the_cap_is_named(prefixes: list[str]) -> None:
    with pytest.raises(ScheduleError, match=r"(?s)\d+ tokens.*16|16.*\d+ tokens"):
        next(steps(prefixes, ParallelLayout(2, 1, 16)))


def test_content_dependent_loss_tokens_need_groups(prefixes: list[str]) -> None:
    source = DocumentSample(IndexedRead(prefixes[0]), max_seqlen=60, eod_token=5, eod_mask_loss=True)
    with pytest.raises(TdpError, match="give Reroute its groups"):
        next(Reroute(Pack(source, LAYOUT, global_batch_size=4)))
    alone = next(Reroute(Pack(source, ParallelLayout(1, 1, 64), global_batch_size=4)))
    assert alone.num_loss_tokens_global == sum(int(b.loss_mask.sum()) for b in alone)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"global_batch_size": 0}, ValueError, "global_batch_size must be at least 1"),
        ({"global_batch_size": 4.0}, TypeError, "global_batch_size must be an int"),
        ({"algorithm": "magic"}, ValueError, "unknown algorithm 'magic'"),
        ({"mode": "magic"}, ValueError, "magic"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"consumed_samples": 12.0}, TypeError, "consumed_samples must be an int, got 12.0"),
        ({"consumed_samples": 13}, ValueError, "nearest: 12, 24"),
        ({"exchange": 5}, TypeError, "exchange must be an Exchange, got int"),
        ({"token_keys": "reward"}, TypeError, "token_keys must be a sequence of names"),
        ({"skip": (2, 4)}, TypeError, r"skip must hold pairs \(begin, end\) of ints, got 2"),
        ({"skip": [(0.5, 2)]}, TypeError, "skip must hold pairs"),
        ({"skip": [(4, 2)]}, ValueError, "0 <= begin <= end"),
    ],
)
def test_bad_arguments_show_at_once(
    prefixes: list[str], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        steps(prefixes, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 1.0}, TypeError, "rank must be an int, got 1.0"),
        ({"rank": -1}, ValueError, "rank must not be negative"),
        ({"pad_id": "x"}, TypeError, "pad_id must be an int"),
        ({"agree_every": 0.5}, TypeError, "agree_every must be an int"),
    ],
)
def test_bad_arguments_of_reroute(
    prefixes: list[str], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reroute(Pack(blend(prefixes), LAYOUT, global_batch_size=12), **options)


def test_reroute_wants_plans(prefixes: list[str]) -> None:
    with pytest.raises(TypeError, match="needs planned global batches of Pack or StreamPack, got Sample"):
        next(Reroute(blend(prefixes)))


def test_samples_with_several_numbers_per_token_can_be_looked_at() -> None:
    source = IterableWrapper([{"tokens": [1, 2], "weight": torch.arange(6.0).reshape(2, 3)}])
    batch = next(Pack(source, ParallelLayout(1, 1, 64), global_batch_size=1, token_keys=["weight"]))
    assert batch.block is not None
    assert batch.block[0]["weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_samples_of_one_pack_need_the_same_keys() -> None:
    uneven = IterableWrapper([{"tokens": [1], "a": 1}, {"tokens": [2]}])
    with pytest.raises(ValueError, match="sample 1 of dataset 0 has no key 'a'.*give every sample the same keys"):
        next(Reroute(Pack(uneven, ParallelLayout(1, 1, 64), global_batch_size=2)))


def test_another_batch_size_is_a_state_mismatch(prefixes: list[str]) -> None:
    root = steps(prefixes)
    next(root)
    with pytest.raises(StateMismatchError, match="global_batch_size was 12 and is 10"):
        steps(prefixes, global_batch_size=10).reset(root.state_dict())


def test_a_user_mapper_between_source_and_pack(prefixes: list[str]) -> None:
    """A plain dict from a user's function is enough, and its keys arrive."""

    def tag(sample: Any) -> Any:
        return {"tokens": sample["tokens"], "score": torch.full((sample.seqlen,), 2.5), "tag": sample.ref[0]}

    source = Mapper(blend(prefixes), tag)
    root = Reroute(Pack(source, LAYOUT, global_batch_size=12, token_keys=["score"]), rank=1)
    for step in root:
        for packed in step:
            assert torch.equal(packed.extras["score"] > 0, ~packed.padding_mask)
            assert len(packed.extras["tag"]) == len(packed.sample_ids)


def test_token_keys_that_no_sample_has(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="token_keys"):
        next(steps(prefixes, token_keys=["score"]))
    source = IterableWrapper([{"tokens": torch.arange(4)}] * 4)
    with pytest.raises(ValueError, match="no key 'score'"):
        next(Pack(source, LAYOUT, global_batch_size=4, token_keys=["score"]))


class Slow(BaseNode[int]):
    """Counts up; sleeps, and raises at one item."""

    def __init__(self, fail_at: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self.fail_at, self.seconds = fail_at, seconds

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self.n = 0 if initial_state is None else initial_state["n"]

    def next(self) -> int:
        time.sleep(self.seconds)
        if self.n == self.fail_at:
            raise OSError("disk gone")
        self.n += 1
        return self.n

    def get_state(self) -> dict[str, Any]:
        return {"n": self.n}


def test_prefetch_raises_after_the_items_before_and_again() -> None:
    node = Prefetch(Slow(fail_at=3), depth=8)
    assert [next(node) for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(node)
    assert node.state_dict() == {"n": 3}


def test_reset_of_prefetch_during_a_slow_read_loses_nothing() -> None:
    node = Prefetch(Slow(seconds=0.05), depth=1)
    for _ in range(3):
        node.reset(None)
        assert [next(node), next(node)] == [1, 2]
    thread = node._thread
    assert thread is not None
    assert thread.is_alive()
    node.shutdown()
    assert not thread.is_alive()


def test_a_forgotten_prefetch_ends_its_thread() -> None:
    node = Prefetch(Slow(), depth=1)
    next(node)
    thread = node._thread
    assert thread is not None
    del node
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_prefetch_bad_depth_and_pickle() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1"):
        Prefetch(Slow(), depth=0)
    node = Prefetch(Slow())
    next(node)
    with pytest.raises(TypeError, match="cannot be pickled"):
        node.__getstate__()
    node.shutdown()


def test_what_is_no_node_is_refused_when_the_graph_is_made(prefixes: list[str]) -> None:
    for make in (
        lambda: Pack([1], LAYOUT, global_batch_size=2),  # type: ignore[arg-type]
        lambda: Prefetch(5),  # type: ignore[arg-type]
        lambda: Reroute(None),  # type: ignore[arg-type]
        lambda: Blend([5]),  # type: ignore[list-item]
        lambda: Shard("x", rank=0, num_ranks=1),  # type: ignore[arg-type]
        lambda: tdp_nodes.Loader([1, 2]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="must be a torchdata.nodes.BaseNode"):
            make()
    with pytest.raises(TypeError, match="depth must be an int"):
        Prefetch(Slow(), depth=1.5)  # type: ignore[arg-type]


def test_damaged_states_are_told_apart_from_code_errors(prefixes: list[str]) -> None:
    root = steps(prefixes)
    next(root)
    state = root.state_dict()
    for damaged, message in [
        ({k: v for k, v in state.items() if k != "source"}, "no 'source'"),
        ({**state, "fingerprint": None}, "fingerprint must be a mapping"),
        ([], "a saved state is a mapping"),
    ]:
        with pytest.raises(StateMismatchError, match=message):
            steps(prefixes).reset(damaged)  # type: ignore[arg-type]


def test_an_overlong_sample_is_named_by_its_place_in_the_data(prefixes: list[str]) -> None:
    source = DocumentSample(IndexedRead(prefixes[0]), max_seqlen=60, shuffle=False)
    longest = int(np.argmax(source.table.seqlens))
    node = Pack(source, ParallelLayout(1, 1, 32), global_batch_size=40)
    with pytest.raises(ScheduleError, match=rf"global batch 0: .*sample {longest} of dataset 0"):
        next(node)


def test_data_smaller_than_a_global_batch_is_told(prefixes: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert list(steps(prefixes, global_batch_size=1000)) == []
    assert "100 samples, fewer than one global batch of 1000" in caplog.text


def test_ids_beyond_int64_are_refused() -> None:
    source = IterableWrapper([{"tokens": np.array([1, 2**63], dtype=np.uint64)}])
    with pytest.raises(ValueError, match="more than int64 holds"):
        next(Pack(source, LAYOUT, global_batch_size=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"equal_count": True}, "microbatches"),
        ({"mode": "lockstep"}, "microbatches"),
        ({"microbatches_multiple": 3}, "multiple"),
        ({"max_sequences_per_microbatch": 2}, "sequences"),
    ],
)
def test_checked_plans_keep_the_limits(
    prefixes: list[str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lopsided(problem: Problem) -> Plan:
        n = len(problem.seqlens)
        packs = [(0, 1, [i]) for i in range(n - 4)] + [(1, 1, list(range(max(n - 4, 0), n)))]
        ops = [PlanOp(first, size, tuple(ids), tuple(problem.seqlens[ids].tolist())) for first, size, ids in packs]
        return Plan.from_ops(
            problem.layout, problem.seqlens, ops if n else [PlanOp(0, 1, (), ()), PlanOp(1, 1, (), ())]
        )

    monkeypatch.setattr(api, "_REGISTRY", {**api._REGISTRY, "lopsided": lopsided})
    arguments: dict[str, Any] = {"global_batch_size": 12, "algorithm": "lopsided"}
    layout = ParallelLayout(2, 1, 256)
    unchecked = Pack(blend(prefixes), layout, **arguments, **options)
    unchecked.reset(None)
    assert next(unchecked).plan.num_microbatches_per_rank.tolist() == [8, 1]
    checked = Pack(blend(prefixes), layout, **arguments)
    checked.check_plans = True
    checked.reset(None)
    next(checked)  # nothing is asked for
    checked = Pack(blend(prefixes), layout, **arguments, **options)
    checked.check_plans = True
    checked.reset(None)
    with pytest.raises(ScheduleError, match=message):
        next(checked)
