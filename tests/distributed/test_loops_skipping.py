"""Loops that begin at Megatron's `consumed_samples`, leave stretches of the data out, and go on with other ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torchdata.nodes import Batcher, Mapper

from tdp_megatron.errors import ExchangeError, StateMismatchError
from tdp_megatron.loops import (
    HybridCPDataLoaderWrapper,
    LoopConfig,
    PackedIterator,
    packing_session,
    wrap_data_iterator,
)
from tdp_megatron.nodes import Batch, DocumentSample, IndexedRead, Loader, Prefetch, Shard
from tdp_megatron.testing import run_ranks, write_corpus

pytestmark = pytest.mark.distributed

NUM_SAMPLES = 400
BATCH = 24
#: In rising order apart from each other, though not given so; one ends a step, one lies inside a round of ranks.
RANGES = [(100, 131), (30, 31), (55, 72), (60, 80), (200, 200)]


def kept(begin: int = 0, ranges: Any = RANGES, end: int = NUM_SAMPLES) -> list[int]:
    return [n for n in range(begin, end) if not any(first <= n < last for first, last in ranges)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(5)
    # The first token is the number of the sample.
    documents = [np.concatenate([[n], rng.integers(0, 999, rng.integers(3, 20))]) for n in range(NUM_SAMPLES)]
    return str(write_corpus(tmp_path_factory.mktemp("skipping") / "d", documents))


class Read:
    """Counts the samples whose tokens a rank has looked at."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, sample: Any) -> dict[str, Any]:
        tokens = torch.as_tensor(sample["tokens"])
        self.numbers.append(int(tokens[0]))
        return {"tokens": tokens}


def graph(prefix: str, kind: str, rank: int, num_ranks: int) -> Any:
    samples = DocumentSample(IndexedRead(prefix), max_seqlen=24, shuffle=False)
    if kind == "batch":
        return Batch(samples, micro_batch_size=1, dp_rank=rank, dp_size=num_ranks, sequence_length=24, drop_last=False)
    shard = Shard(samples, rank=rank, num_ranks=num_ranks)
    if kind == "mapped":
        return Mapper(shard, lambda sample: {"tokens": torch.as_tensor(sample["tokens"])})
    return Prefetch(shard) if kind == "prefetch" else shard


def groups_of(dp: int, cp: int = 1, tp: int = 1, pp: int = 1) -> DeviceMesh:
    ranks = torch.arange(dp * cp * tp * pp).reshape(pp, dp, cp, tp)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "cp", "tp"))


def place_of(rank: int, cp: int, tp: int, dp: int) -> tuple[int, int]:
    """Data-parallel rank, and whether it reads."""
    return rank // (tp * cp) % dp, rank % tp == 0


def config(**options: Any) -> LoopConfig:
    return LoopConfig(max_seqlen_per_dp_cp_rank=48, data_timeout_s=20.0, **options)


def numbers_of(packed: Any) -> list[int]:
    """Of the samples that this data-parallel rank's iterator gave for the step, brought back whole."""
    outputs = [batch.tokens for batch in packed]
    returned = packed.scatter_back(outputs)
    assert all(len(tokens) > 3 for tokens in returned)
    return [int(tokens[0]) for tokens in returned]


def steps_on(
    prefix: str,
    dp: int,
    cp: int = 1,
    *,
    kind: str = "shard",
    state: Any = None,
    steps: int = 4,
    act: Callable[[int, Any], None] = lambda step, packed: None,
    **options: Any,
) -> tuple[list[list[int]], Any]:
    """The samples of each global batch, and the state behind the last; all ranks have the same state."""

    def body(rank: int, world: int) -> Any:
        groups = groups_of(dp, cp)
        dp_rank, _ = place_of(rank, cp, 1, dp)
        samples = iter(Loader(graph(prefix, kind, dp_rank, dp)))
        session = packing_session(samples, config(**options), groups)
        if state is not None:
            session.load_state_dict(json.loads(json.dumps(state)))
        seen = []
        for step in range(steps):
            packed, *_ = wrap_data_iterator(samples, config(**options), BATCH // dp, groups)
            seen.append(numbers_of(packed))
            act(step, packed)
        after = session.state_dict()
        session.close()
        return seen, json.loads(json.dumps(after))

    ranks = run_ranks(body, dp * cp)
    # A Batch says in two ways where it is, by what it has drawn ahead.
    assert kind == "batch" or all(after == ranks[0][1] for _, after in ranks)
    return [sorted(n for seen, _ in ranks[::cp] for n in seen[step]) for step in range(steps)], ranks[0][1]


def cut(numbers: list[int], steps: int) -> list[list[int]]:
    return [numbers[i * BATCH : (i + 1) * BATCH] for i in range(steps)]


@pytest.mark.parametrize("kind", ["shard", "mapped", "prefetch", "batch"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_loop_leaves_samples_out(prefix: str, kind: str, dp: int) -> None:
    found, state = steps_on(prefix, dp, kind=kind, skip_samples=RANGES, consumed_samples=25)
    assert found == cut(kept(25), 4)
    assert state["consumed_samples"] == kept(25)[4 * BATCH - 1] + 1
    assert state["skip_samples"] == []  # of the configuration, not of the state


@pytest.mark.parametrize(("dp", "cp"), [(2, 2), (3, 1), (8, 1), (1, 4)])
@pytest.mark.parametrize("kind", ["shard", "prefetch", "mapped"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_loop_with_gaps_goes_on_with_other_ranks(prefix: str, dp: int, cp: int, kind: str, steps: int) -> None:
    wanted = cut(kept(), steps + 4)
    found, state = steps_on(prefix, 4, 2, kind=kind, steps=steps, skip_samples=RANGES)
    assert found == wanted[:steps]
    further, state = steps_on(prefix, dp, cp, kind=kind, steps=1, skip_samples=RANGES, state=state)
    assert further == wanted[steps : steps + 1]
    # And back, from a place that need not be a whole round of the ranks.
    further, _ = steps_on(prefix, 4, 2, kind=kind, steps=2, skip_samples=RANGES, state=state)
    assert further == wanted[steps + 1 : steps + 3]


def test_ranges_and_positions_given_while_a_step_is_made_ahead(prefix: str) -> None:
    def act(step: int, packed: Any) -> None:
        if step == 0:
            packed.skip([(30, 40), (35, 45)])
            packed.skip([(90, 95), (3, 9)])
        elif step == 1:
            packed.session.skip_to(70)
        elif step == 2:
            packed.skip_to(packed.session.consumed_samples)

    found, state = steps_on(prefix, 4, act=act)
    later = kept(70, [(90, 95)])
    first = kept(24, [(30, 45)])[:BATCH]
    assert found == [list(range(24)), first, later[:BATCH], later[BATCH : 2 * BATCH]]
    assert state["skip_samples"] == []  # all are behind
    found, state = steps_on(prefix, 4, steps=1, act=act)
    assert state["skip_samples"] == [[30, 45], [90, 95]]
    for dp, cp in ((2, 2), (8, 1)):
        further, _ = steps_on(prefix, dp, cp, state=state, steps=3)
        assert further == cut(kept(24, [(30, 45), (90, 95)]), 3)


def test_a_range_may_be_added_when_a_loop_goes_on(prefix: str) -> None:
    _, state = steps_on(prefix, 2, steps=2)
    found, _ = steps_on(prefix, 2, state=state, skip_samples=[(50, 90)], steps=2)
    assert found == cut([48, 49, *range(90, NUM_SAMPLES)], 2)


@pytest.mark.parametrize("ranges", [[(60, 10**6)], [(60, NUM_SAMPLES)], [(60, 2**70)], [(60, 399)]])
@pytest.mark.parametrize("kind", ["shard", "mapped"])
def test_a_range_up_to_the_end_and_past_it(prefix: str, ranges: Any, kind: str) -> None:
    def body(rank: int, world: int) -> Any:
        samples = iter(Loader(graph(prefix, kind, rank, world)))
        seen = []
        while True:
            try:
                packed, *_ = wrap_data_iterator(samples, config(skip_samples=ranges), 10)
            except StopIteration:
                return seen
            seen += numbers_of(packed)

    ranks = run_ranks(body, 2)
    assert sorted(n for seen in ranks for n in seen) == list(range(60))


def test_nothing_is_read_of_what_is_left_out(prefix: str) -> None:
    def body(rank: int, world: int) -> Any:
        read = Read()
        shard = Shard(DocumentSample(IndexedRead(prefix), max_seqlen=24, shuffle=False), rank=rank, num_ranks=world)
        drawn = []
        take = shard._take
        shard._take = lambda n: drawn.append(n) or take(n)  # type: ignore[func-returns-value, method-assign]
        options = config(skip_samples=RANGES, consumed_samples=25, read_ahead=False)
        samples = iter(Loader(shard))
        seen = [numbers_of(wrap_data_iterator(samples, options, 12)[0]) for _ in range(3)]
        # A mapper of the user's reads what it is given.
        mapped = iter(Loader(Mapper(graph(prefix, "shard", rank, world), read)))
        assert [numbers_of(wrap_data_iterator(mapped, options, 12)[0]) for _ in range(3)] == seen
        assert set(read.numbers) > {n for part in seen for n in part}
        return sum(drawn), len([n for part in seen for n in part])

    for drawn, seen in run_ranks(body, 2):
        assert drawn == seen


class Items(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rank: int, num_ranks: int, begin: int = 0) -> None:
        super().__init__()
        self.numbers = range(begin + rank, NUM_SAMPLES, num_ranks)

    def __iter__(self) -> Iterator[Any]:
        return iter([{"tokens": torch.full((4,), n)} for n in self.numbers])


def test_a_dataloader_reads_and_drops_and_stands_where_it_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, world: int) -> Any:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tdp_megatron.loops").addHandler(handler)
        samples = iter(DataLoader(Items(rank, world, 25), batch_size=None))
        options = config(skip_samples=RANGES, consumed_samples=25)
        seen = []
        for _ in range(3):
            packed, *_ = wrap_data_iterator(samples, options, BATCH // world)
            seen.append(numbers_of(packed))
        state = json.loads(json.dumps(packed.state_dict()))
        assert len(messages) == 1
        assert "has no skip_items: it is taken to stand at sample 25 already" in messages[0]
        # On it goes, where the user has it stand.
        again = iter(DataLoader(Items(rank, world, state["consumed_samples"]), batch_size=None))
        packing_session(again, config(skip_samples=RANGES)).load_state_dict(state)
        seen.append(numbers_of(wrap_data_iterator(again, options, BATCH // world)[0]))
        return seen

    ranks = run_ranks(body, 2)
    assert [sorted(ranks[0][step] + ranks[1][step]) for step in range(4)] == cut(kept(25), 4)


DIFFERENT: dict[str, Callable[[Any, int], Any]] = {
    "skip": lambda packed, rank: packed.skip([(60, 60 + rank)]),
    "skip_to": lambda packed, rank: packed.skip_to(60 + rank),
    "only one skips": lambda packed, rank: packed.skip([(60, 70)]) if rank else None,
    "only one skips to": lambda packed, rank: packed.skip_to(60) if rank else None,
}


@pytest.mark.parametrize("how", ["skip_samples", "consumed_samples", "num_microbatches", *DIFFERENT])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (2, 1, 2, 3), (1, 2, 1, 2)])
def test_ranks_that_are_told_different_things_all_end(prefix: str, how: str, shape: tuple[int, int, int, int]) -> None:
    dp, cp, tp, pp = shape

    def body(rank: int, world: int) -> str:
        groups = groups_of(dp, cp, tp, pp)
        dp_rank, reads = place_of(rank, cp, tp, dp)
        samples = iter(Loader(graph(prefix, "shard", dp_rank, dp))) if reads else None
        odd = rank // tp % (dp * cp)  # every second DP x CP rank has it otherwise
        options: dict[str, Any] = {}
        if how == "skip_samples":
            options["skip_samples"] = [(10, 20 + odd)]
        elif how == "consumed_samples":
            options["consumed_samples"] = 10 + odd
        count = 6 + odd if how == "num_microbatches" else 6
        with pytest.raises(ExchangeError) as caught:  # noqa: PT012
            for _ in range(4):
                packed, *_ = wrap_data_iterator(samples, config(**options), count, groups)
                if how in DIFFERENT:
                    DIFFERENT[how](packed, odd)
        return str(caught.value)

    for message in run_ranks(body, dp * cp * tp * pp, timeout_s=60):
        assert "rank 0 wants samples" in message
        assert "rank 1 wants samples" in message
        assert "Give all ranks the same" in message


def test_pipeline_stages_that_are_told_different_things_all_end(prefix: str) -> None:
    def body(rank: int, world: int) -> str:
        groups = groups_of(1, pp=3)
        samples = iter(Loader(graph(prefix, "shard", 0, 1)))
        with pytest.raises(ExchangeError) as caught:  # noqa: PT012
            packed, *_ = wrap_data_iterator(samples, config(), 6, groups)
            packed.skip([(20, 25 + rank)])
            for _ in range(2):
                wrap_data_iterator(samples, config(), 6, groups)
        return str(caught.value)

    for message in run_ranks(body, 3):
        assert "the first and the last pipeline stage read different samples; give all ranks the same" in message


@pytest.mark.parametrize(
    ("shape", "how", "directly"),
    [
        ((1, 1, 2, 1), "skip", False),
        ((1, 1, 2, 1), "skip_to", False),
        ((1, 1, 2, 1), "load_state_dict", False),
        ((1, 1, 1, 3), "skip", False),
        ((2, 1, 2, 2), "skip", False),
        ((1, 1, 2, 1), "skip", True),
    ],
)
def test_a_rank_that_is_handed_its_data_moves_like_the_others(
    prefix: str, shape: tuple[int, int, int, int], how: str, directly: bool
) -> None:
    """Otherwise it would go on with the step made ahead, which the ranks that read have given up."""
    dp, cp, tp, pp = shape

    def body(rank: int, world: int) -> Any:
        groups = groups_of(dp, cp, tp, pp)
        options = LoopConfig(max_seqlen_per_dp_cp_rank=48, data_timeout_s=5.0)
        dp_rank, reads = place_of(rank, cp, tp, dp)
        samples = iter(Loader(graph(prefix, "shard", dp_rank, dp))) if reads else None
        packed, *_ = wrap_data_iterator(samples, options, 6, groups)
        session = packed.session
        moves = {
            "skip": lambda: packed.skip([(40, 44)]),
            "skip_to": lambda: packed.skip_to(40),
            "load_state_dict": lambda: packed.load_state_dict(packed.state_dict()),
        }
        if rank != (1 if tp > 1 or pp > 2 else 0):
            moves[how]()
        try:
            for _ in range(3):
                wrap_data_iterator(session if directly else samples, options, 6, groups)
        except (ValueError, ExchangeError) as error:
            return str(error)
        return ""

    told = run_ranks(body, dp * cp * tp * pp, return_failures=True, timeout_s=20)
    assert all(isinstance(message, str) and message for message in told), told
    assert any("all ranks must call skip_to, skip and load_state_dict alike" in message for message in told)
    if not directly:
        assert all("all ranks must call skip_to" in message for message in told[:tp])


@pytest.mark.parametrize("shape", [(2, 1, 2, 1), (1, 1, 1, 3), (1, 2, 2, 2)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_ranks_that_receive_know_the_position(prefix: str, shape: tuple[int, int, int, int], steps: int) -> None:
    dp, cp, tp, pp = shape

    def body(rank: int, world: int) -> Any:
        groups = groups_of(dp, cp, tp, pp)
        dp_rank, reads = place_of(rank, cp, tp, dp)
        samples = iter(Loader(graph(prefix, "shard", dp_rank, dp))) if reads else None
        options = config(skip_samples=RANGES, consumed_samples=24)
        session = packing_session(samples, options, groups)
        for _ in range(steps):
            packed, *_ = wrap_data_iterator(samples, options, BATCH // dp, groups)
            assert isinstance(packed, PackedIterator)
        session.skip([(300, 310)])
        state = session.state_dict()
        return {key: value for key, value in state.items() if key != "data"}, state["data"]

    ranks = run_ranks(body, dp * cp * tp * pp)
    assert all(state == ranks[0][0] for state, _ in ranks)
    assert len({json.dumps(data) for _, data in ranks if data is not None}) == 1
    end = kept(24)[steps * BATCH - 1] + 1 if steps else 24
    assert ranks[0][0]["consumed_samples"] == end
    assert ranks[0][0]["skip_samples"] == [[300, 310]]


def test_a_loader_that_stands_elsewhere_is_refused(prefix: str) -> None:
    def body(rank: int, world: int) -> str:
        loader = Loader(graph(prefix, "shard", rank, world))
        samples = iter(loader)
        loader.skip_to(7)
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(samples, config(consumed_samples=12), 4)
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "rank 0 failed: ValueError: the data iterator stands at its item 7 already" in message


def test_a_position_beyond_the_end_is_an_error_on_all_ranks(prefix: str) -> None:
    def body(rank: int, world: int) -> str:
        samples = iter(Loader(graph(prefix, "shard", rank, world)))
        packed, *_ = wrap_data_iterator(samples, config(), 4)
        packed.skip_to(5000)
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(samples, config(), 4)
        with pytest.raises(ExchangeError):
            packed.skip_to(6000)
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "number 5000 is beyond the end of the data: of those from 0 on" in message


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"consumed_samples": -1}, ValueError, "consumed_samples must not be negative, got -1"),
        ({"consumed_samples": 1.5}, TypeError, "consumed_samples must be an int, got 1.5"),
        ({"skip_samples": [(3, 2)]}, ValueError, r"skip_samples must hold \(begin, end\) with 0 <= begin <= end"),
        ({"skip_samples": [(-1, 2)]}, ValueError, r"got \(-1, 2\)"),
        ({"skip_samples": [(1, 2.0)]}, TypeError, "skip_samples must hold pairs"),
        ({"skip_samples": 5}, TypeError, "skip_samples must hold pairs .* got 5"),
        ({"skip_samples": "12"}, TypeError, "skip_samples must hold pairs .* got '1'"),
    ],
)
def test_bad_arguments(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config(**options)

    def body(rank: int, world: int) -> None:
        session = packing_session(iter([{"tokens": torch.arange(3)}] * 9), config())
        if "skip_samples" in options:
            with pytest.raises(error, match=message):
                session.skip(options["skip_samples"])
        else:
            with pytest.raises(error, match=message):
                session.skip_to(options["consumed_samples"])
        wrap_data_iterator(session, config(), 4)
        with pytest.raises(ValueError, match="cannot go back from 4 to 3; load a saved state instead"):
            session.skip_to(3)
        wrap_data_iterator(session, config(), 5)
        with pytest.raises(StopIteration):
            wrap_data_iterator(session, config(), 1)
        with pytest.raises(ValueError, match="the data has ended; to go on, load a saved state"):
            session.skip_to(30)
        session.close()
        with pytest.raises(RuntimeError, match="session was closed"):
            session.skip([(40, 50)])

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_at": 99}, "data_at 99 is behind consumed_samples 4"),
        ({"skip_samples": [[3, 1]]}, "saved state: skip_samples must hold"),
        ({"skip_samples": [3]}, "saved state: skip_samples must hold"),
        ({"skip_samples": None}, "saved state: skip_samples must hold"),
        ({"consumed_samples": 4.0}, "consumed_samples must be a number from 0 up"),
        ({"version": 1}, "version 1, expected 2"),
    ],
)
def test_damaged_states(change: Any, message: str) -> None:
    def body(rank: int, world: int) -> None:
        session = packing_session(iter([{"tokens": torch.arange(3)}] * 9), config())
        wrap_data_iterator(session, config(), 4)
        state = session.state_dict()
        with pytest.raises(StateMismatchError, match=message):
            session.load_state_dict({**state, **change})

    run_ranks(body, 1)


# HybridCPDataLoaderWrapper: whole global batches


class Lists:
    """A list of samples per step of one data-parallel rank, with or without a way to pass them over."""

    def __init__(self, rank: int, num_ranks: int, at: int = 0) -> None:
        self.rank, self.num_ranks, self.at = rank, num_ranks, at
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at >= 20:
            raise StopIteration
        self.at += 1
        self.read.append(self.at - 1)
        return [{"tokens": torch.full((4 + i,), self.at - 1)} for i in range(self.rank, 6, self.num_ranks)]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class SkippingLists(Lists):
    def skip_items(self, n: int) -> None:
        if self.at + n > 20:
            raise StopIteration
        self.at += n


@pytest.mark.parametrize("kind", [Lists, SkippingLists])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_hybrid_wrapper_leaves_steps_out(kind: type[Lists], dp: int) -> None:
    ranges = [(4, 6), (5, 8), (18, 30)]
    wanted = [n for n in range(2, 18) if not 4 <= n < 8]

    def body(rank: int, world: int) -> Any:
        dp_rank, reads = place_of(rank, 1, 2, dp)
        groups = groups_of(dp, tp=2)
        options = {"first_step": 2, "skip": ranges}

        def make(at: int) -> HybridCPDataLoaderWrapper:
            source = kind(dp_rank, dp, at) if reads else None
            return HybridCPDataLoaderWrapper(source, config(), groups, **options)

        begin = 0 if kind is SkippingLists else 2
        wrapper = make(begin)
        seen, states = [], [wrapper.state_dict()]
        for _ in wanted:
            samples, _ = next(wrapper)
            states.append(wrapper.state_dict())
            if samples is not None:
                seen.append({int(s["tokens"][0]) for s in samples.values()})
        if reads:
            with pytest.raises(StopIteration):
                next(wrapper)
            assert wrapper.data_iterator is not None
            if kind is SkippingLists:
                assert wrapper.data_iterator.read == wanted
        for done in (0, 1, 2, 3):
            again = make(0)
            again.load_state_dict(json.loads(json.dumps(states[done])))
            again.skip([(10, 12)])
            samples, _ = next(again)
            assert samples is None or {int(s["tokens"][0]) for s in samples.values()} <= {wanted[done]}
            again.skip_to(10)
            samples, _ = next(again)
            assert samples is None or {int(s["tokens"][0]) for s in samples.values()} <= {12}
        return seen, [{key: value for key, value in state.items() if key != "data"} for state in states]

    ranks = run_ranks(body, 2 * dp)
    assert all(states == ranks[0][1] for _, states in ranks)
    for step, number in enumerate(wanted):
        assert set().union(*(seen[step] for seen, _ in ranks[::2])) == {number}


def test_hybrid_wrappers_that_are_told_different_things_all_end() -> None:
    def body(rank: int, world: int) -> str:
        wrapper = HybridCPDataLoaderWrapper(Lists(rank, world), config(), groups_of(world), skip=[(3, 4 + rank)])
        with pytest.raises(ExchangeError) as caught:  # noqa: PT012
            for _ in range(5):
                next(wrapper)
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "rank 0 wants steps 0 to 1 without [(3, 4)]" in message


def test_what_a_hybrid_wrapper_refuses() -> None:
    def body(rank: int, world: int) -> None:
        groups = groups_of(1)
        for options, error, message in (
            ({"first_step": -1}, ValueError, "first_step must not be negative"),
            ({"skip": [(2, 1)]}, ValueError, "skip must hold"),
            ({"skip": [1]}, TypeError, "skip must hold pairs"),
        ):
            with pytest.raises(error, match=message):
                HybridCPDataLoaderWrapper(Lists(0, 1), config(), groups, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="give it first_step and skip instead of consumed_samples"):
            HybridCPDataLoaderWrapper(Lists(0, 1), config(consumed_samples=3), groups)
        wrapper = HybridCPDataLoaderWrapper(Lists(0, 1), config(), groups)
        next(wrapper)
        with pytest.raises(ValueError, match="cannot go back from 1 to 0"):
            wrapper.skip_to(0)

    run_ranks(body, 1)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_hybrid_wrapper_goes_on_with_other_ranks(prefix: str, dp: int, steps: int) -> None:
    wanted = [n for n in range(1, 16) if n not in (3, 4, 9)]

    def run(dp: int, steps: int, state: Any = None) -> tuple[list[list[int]], Any]:
        def body(rank: int, world: int) -> Any:
            batches = Batcher(graph(prefix, "shard", rank, dp), BATCH // dp, drop_last=True)
            options = LoopConfig(max_seqlen_per_dp_cp_rank=512, data_timeout_s=20.0)
            wrapper = HybridCPDataLoaderWrapper(
                iter(Loader(batches)), options, groups_of(dp), first_step=1, skip=[(9, 10), (3, 5)]
            )
            if state is not None:
                wrapper.load_state_dict(json.loads(json.dumps(state)))
            seen = []
            for _ in range(steps):
                samples, _ = next(wrapper)
                assert samples is not None
                seen.append([int(sample["tokens"][0]) for sample in samples.values()])
            return seen, json.loads(json.dumps(wrapper.state_dict()))

        ranks = run_ranks(body, dp)
        assert all(after == ranks[0][1] for _, after in ranks)
        return [sorted({n for seen, _ in ranks for n in seen[step]}) for step in range(steps)], ranks[0][1]

    def of(numbers: list[int]) -> list[list[int]]:
        return [list(range(n * BATCH, (n + 1) * BATCH)) for n in numbers]

    found, state = run(4, steps)
    assert found == of(wanted[:steps])
    assert run(dp, 5, state)[0] == of(wanted[steps : steps + 5])
