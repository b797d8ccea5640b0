"""Mistakes that look like the end of the data: a StopIteration of a user's function; and states that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes import Batch, Blend, DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute, Shard
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(1, 1, 64, tail_multiple=1)


class Once:
    """A function that asks an iterator which is too short, as users' functions do."""

    def __init__(self, count: int) -> None:
        self.labels: Iterator[int] = iter(range(count))

    def __call__(self, item: Any) -> Any:
        next(self.labels)
        return item


def plain(count: int = 6) -> BaseNode[Any]:
    return IterableWrapper([{"tokens": [i, i + 1]} for i in range(count)])


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("early") / "d", [[i] * 4 for i in range(24)])


def documents(prefix: str) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=8)


def packs(source: BaseNode[Any], **options: Any) -> Reroute:
    return Reroute(Pack(source, LAYOUT, global_batch_size=2, **options))


GRAPHS: dict[str, Any] = {
    "before Pack": lambda fn: packs(Mapper(plain(), fn)),
    "two before Pack": lambda fn: packs(Mapper(Mapper(plain(), fn), lambda x: x)),
    "in a Blend": lambda fn: packs(Blend([Mapper(plain(), fn), plain()], [1, 1])),
    "before Batch": lambda fn: Batch(Mapper(plain(), fn), sequence_length=2, micro_batch_size=1),
    "between Pack and Reroute": lambda fn: Reroute(Mapper(Pack(plain(), LAYOUT, global_batch_size=2), fn)),
    "last": lambda fn: Mapper(packs(plain()), fn),
    "last but Prefetch": lambda fn: Prefetch(Mapper(packs(plain()), fn)),
    "in threads": lambda fn: packs(ParallelMapper(plain(), fn, num_workers=1, method="thread", in_order=True)),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_function_that_raises_stop_iteration_is_an_error(graph: str) -> None:
    with pytest.raises(RuntimeError, match=r"function of a Mapper raised StopIteration.*end the data early"):
        list(Loader(GRAPHS[graph](Once(1))))


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_real_end_is_an_end(graph: str) -> None:
    loader = Loader(GRAPHS[graph](Once(1000)))
    assert len(list(loader)) >= 3
    with pytest.raises(StopIteration):
        next(loader._it)  # and it stays one


class Labelled(BaseNode[Any]):
    """A node as users write them, with the mistake in its ``next``."""

    def __init__(self, source: BaseNode[Any], count: int) -> None:
        super().__init__()
        self.source = source
        self.labels: Iterator[int] = iter(range(count))

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        item = next(self.source)
        next(self.labels)
        return item

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}


USERS: dict[str, Any] = {
    "before Pack": lambda p, n: packs(Labelled(documents(p), n)),
    "read ahead before Pack": lambda p, n: packs(Mapper(Labelled(documents(p), n), lambda x: x)),
    "in a Blend": lambda p, n: packs(Blend([Labelled(documents(p), n), documents(p)], [1, 1])),
    "before Batch": lambda p, n: Batch(Labelled(documents(p), n), sequence_length=8, micro_batch_size=1),
    "between Pack and Reroute": lambda p, n: Reroute(Labelled(Pack(documents(p), LAYOUT, global_batch_size=2), n)),
    "last": lambda p, n: Labelled(packs(documents(p)), n),
    "before Prefetch": lambda p, n: Prefetch(Labelled(packs(documents(p)), n)),
    "passed over": lambda p, n: packs(Labelled(documents(p), n), skip=[(0, 9)]),
    "of shares": lambda p, n: packs(Shard(Labelled(documents(p), n), rank=0, num_ranks=2)),
}


@pytest.mark.parametrize("graph", USERS)
def test_a_users_node_that_ends_before_its_source_is_reported_once(
    prefix: str, graph: str, caplog: pytest.LogCaptureFixture
) -> None:
    list(Loader(USERS[graph](prefix, 3)))
    (record,) = caplog.records
    assert "Labelled ended, but DocumentSample, from which it draws, has" in record.message
    assert record.message.count("samples left") == 1
    caplog.clear()
    list(Loader(USERS[graph](prefix, 1000)))
    assert not caplog.records


def test_how_much_is_left_is_said(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    endless = DocumentSample(IndexedRead(prefix), max_seqlen=8, num_epochs=None)
    list(Loader(Batch(Labelled(endless, 3), sequence_length=8, micro_batch_size=1)))
    list(Loader(Batch(Labelled(documents(prefix), 3), sequence_length=8, micro_batch_size=1)))
    assert [record.args[2] for record in caplog.records if isinstance(record.args, tuple)] == ["endless", 20]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_ends_that_are_meant_are_not_reported(prefix: str, stop: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of a blend whose other sources have more, of incomplete batches, of ranges left out, of users' own data."""

    def mapped() -> BaseNode[Any]:
        return Mapper(documents(prefix), lambda x: x)

    layout = {"global_batch_size": 7}
    for root in (
        Reroute(Pack(Blend([mapped(), documents(prefix)], [5, 1], stop=stop), LAYOUT, **layout)),
        Mapper(Reroute(Pack(mapped(), LAYOUT, **layout)), lambda x: x),
        Mapper(Reroute(Pack(documents(prefix), LAYOUT, **layout, skip=[(1, 99)])), lambda x: x),
        Batch(mapped(), sequence_length=8, micro_batch_size=5, skip_samples=[(10, 99)]),
        Mapper(Batch(Labelled(plain(), 3), sequence_length=2, micro_batch_size=1), lambda x: x),
        Mapper(Prefetch(Reroute(Pack(mapped(), LAYOUT, **layout))), lambda x: x),
    ):
        list(Loader(root))
        if isinstance(root, Prefetch):
            root.shutdown()
    assert not caplog.records


def test_passing_over_samples_is_no_way_around() -> None:
    root = packs(Mapper(plain(), Once(1)), skip=[(0, 2)])
    with pytest.raises(RuntimeError, match="function of a Mapper"):
        list(Loader(root))


def state_after(root: Reroute, steps: int) -> dict[str, Any]:
    root.reset(None)
    for _ in range(steps):
        next(root)
    return copy.deepcopy(root.state_dict())


def test_states_whose_parts_are_from_different_moments_are_refused(prefix: str) -> None:
    early, late = (state_after(packs(documents(prefix)), steps) for steps in (2, 5))
    mixed = copy.deepcopy(early)
    mixed["source"]["source"] = late["source"]["source"]
    with pytest.raises(StateMismatchError, match=r"Pack: .* 2 global batches, that is 4 samples, .* handed out 10"):
        packs(documents(prefix)).reset(mixed)
    with pytest.raises(StateMismatchError, match=r"Reroute: .* 5 steps, but its Pack 2 global batches"):
        packs(documents(prefix)).reset({**late, "source": early["source"]})


@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"skip": [(1, 3)]}, {"skip": [(3, 100)]}])
def test_states_of_every_step_and_of_the_end_fit(prefix: str, options: dict[str, Any]) -> None:
    def make() -> Reroute:
        return Reroute(Pack(documents(prefix), LAYOUT, global_batch_size=5, **options))

    root = make()
    root.reset(None)
    ended = False
    while not ended:
        try:
            next(root)
        except StopIteration:
            ended = True
        again = make()
        again.reset(copy.deepcopy(root.state_dict()))
        if ended:
            with pytest.raises(StopIteration):
                next(again)
