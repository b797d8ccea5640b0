"""Ranks of a wrapped loop that count differently, and data iterators that stand or deal out elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as TorchdataLoader

from tdp_megatron.errors import ExchangeError, StateMismatchError
from tdp_megatron.loops import HybridCPDataLoaderWrapper, LoopConfig, packing_session, wrap_data_iterator
from tdp_megatron.nodes import Loader, Shard
from tdp_megatron.testing import run_ranks

pytestmark = pytest.mark.distributed

CONFIG = LoopConfig(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20)
IMPATIENT = LoopConfig(max_seqlen_per_dp_cp_rank=64, data_timeout_s=2)


def samples(count: int = 200) -> IterableWrapper[dict[str, Any]]:
    return IterableWrapper([{"tokens": torch.full((5,), i)} for i in range(count)])


def first_token(packed: Any) -> int:
    return int(next(packed).tokens[0])


def test_data_parallel_ranks_with_other_numbers_of_microbatches_all_end() -> None:
    def body(rank: int, world: int) -> str:
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(iter(Loader(samples())), CONFIG, 6 if rank else 4)
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "rank 0 wants samples 0 to 8" in message
        assert "rank 1 wants samples 0 to 12" in message


@pytest.mark.parametrize("counts", [[6, 6], [4, 6]])
def test_a_tensor_parallel_rank_with_another_number_of_microbatches_ends(counts: list[int]) -> None:
    """It would take the next step for this one."""

    def body(rank: int, world: int) -> str:
        groups = DeviceMesh("cpu", torch.arange(2).reshape(1, 2), mesh_dim_names=("dp", "tp"))
        data = iter(Loader(samples())) if rank == 0 else None
        try:
            for count in counts if rank else [4, 4]:
                wrap_data_iterator(data, CONFIG, count, groups)
        except ExchangeError as error:
            return str(error)
        return ""

    _, message = run_ranks(body, 2)
    end = 4 * (1 + counts.index(6))
    assert f"takes samples up to {end + 4 * (counts[0] == 4)}; TP rank 1" in message
    assert "with num_microbatches 6; give all ranks the same num_microbatches" in message


@pytest.mark.parametrize(("num_ranks", "is_right"), [(1, True), (2, True), (4, False), (3, False)])
def test_a_shard_for_other_ranks_is_refused(num_ranks: int, is_right: bool) -> None:
    def body(rank: int, world: int) -> str:
        data = iter(Loader(Shard(samples(), rank=rank % num_ranks, num_ranks=num_ranks)))
        if is_right:
            wrap_data_iterator(data, CONFIG, 4)
            return ""
        with pytest.raises(ValueError, match="deals samples out to") as caught:
            wrap_data_iterator(data, CONFIG, 4)
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert message == "" or f"to {num_ranks} ranks, but 2 data-parallel ranks read them" in message
        assert bool(message) != is_right


@pytest.mark.parametrize(("num_ranks", "is_right"), [(1, True), (2, True), (4, False)])
def test_a_shard_for_other_ranks_is_refused_by_the_hybrid_wrapper(num_ranks: int, is_right: bool) -> None:
    """CP ranks of a data-parallel rank read the same: 2 data-parallel ranks of 2 CP ranks are not 4 that read."""

    def body(rank: int, world: int) -> str:
        groups = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "cp"))
        # One of them is enough: all ranks are told.
        shards = num_ranks if rank == 3 or is_right else 2
        data = iter(Loader(Shard(samples(), rank=(rank // 2) % shards, num_ranks=shards)))
        wrapper = HybridCPDataLoaderWrapper(data, CONFIG, groups)
        if is_right:
            mapped, schedule = next(wrapper)
            assert mapped is not None
            assert schedule is not None
            return ""
        with pytest.raises(ExchangeError) as caught:
            next(wrapper)
        return str(caught.value)

    wanted = f"rank 3 failed: ValueError: the Shard of the data iterator deals samples out to {num_ranks} ranks, but 2"
    for message in run_ranks(body, 4):
        assert message == "" if is_right else wanted in message


def late_reader(kind: str) -> Any:
    return {
        "shard": lambda: iter(Loader(Shard(samples(), rank=1, num_ranks=4))),
        "none": lambda: None,
        "no iterator": lambda: Loader(samples()),
    }[kind]()


@pytest.mark.parametrize("kind", ["shard", "none", "no iterator"])
def test_data_parallel_ranks_are_told_of_one_that_cannot_read(kind: str) -> None:
    """They find nothing wrong themselves: their error says what has happened there, while that process still runs."""
    names = {"shard": "ValueError: the Shard", "none": "ValueError: TP rank 0", "no iterator": "TypeError: data_iter"}

    def body(rank: int, world: int) -> str:
        groups = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp",))
        data = late_reader(kind) if rank else iter(Loader(samples()))
        with pytest.raises((ExchangeError, ValueError, TypeError)) as caught:
            wrap_data_iterator(data, IMPATIENT, 4, groups)
        message = f"{type(caught.value).__name__}: {caught.value}"
        kept: list[Any] = [message]
        dist.broadcast_object_list(kept, src=0)  # rank 1 is there until rank 0 has been told
        return message

    first, second = run_ranks(body, 2)
    assert second.startswith(names[kind])
    assert first.startswith("ExchangeError")
    assert f"rank 1 failed in step 0: {names[kind]}" in first


def test_data_parallel_ranks_are_told_of_stages_that_read_different_iterators() -> None:
    def body(rank: int, world: int) -> str:
        mesh = torch.arange(4).reshape(2, 2)
        groups = DeviceMesh("cpu", mesh, mesh_dim_names=("pp", "dp"))
        train, valid = iter(Loader(samples())), iter(Loader(samples()))
        for data in (train, valid):
            wrap_data_iterator(data, IMPATIENT, 4, groups)

        def go_on() -> None:
            for _ in range(3):  # one has been made ahead
                wrap_data_iterator(valid if rank == 3 else train, IMPATIENT, 4, groups)

        with pytest.raises((ExchangeError, ValueError)) as caught:
            go_on()
        kept: list[Any] = [None] * world
        dist.all_gather_object(kept, rank)
        return f"{type(caught.value).__name__}: {caught.value}"

    messages = run_ranks(body, 4)
    cause = "ValueError: the last pipeline stage reads data iterator 1, the first one 0"
    for rank in (1, 3):
        assert messages[rank].startswith(cause)
    for rank in (0, 2):
        assert messages[rank].startswith("ExchangeError")
        assert f": {cause}" in messages[rank]


def test_a_torchdata_iterator_that_was_not_taken_to_the_saved_place_is_refused() -> None:
    def body(rank: int, world: int) -> str:
        data = iter(TorchdataLoader(samples(), restart_on_stop_iteration=False))
        for _ in range(2):
            wrap_data_iterator(data, CONFIG, 4)
        state = packing_session(data, CONFIG).state_dict()
        other = iter(TorchdataLoader(samples(), restart_on_stop_iteration=False))
        with pytest.raises(StateMismatchError) as caught:
            packing_session(other, CONFIG).load_state_dict(state)
        loader = TorchdataLoader(samples(), restart_on_stop_iteration=False)
        loader.load_state_dict(state["data"])
        again = iter(loader)
        packing_session(again, CONFIG).load_state_dict(state)
        assert first_token(wrap_data_iterator(again, CONFIG, 4)[0]) == 8
        # Ours is taken there by the session alone.
        ours = iter(Loader(samples()))
        for _ in range(2):
            wrap_data_iterator(ours, CONFIG, 4)
        fresh = iter(Loader(samples()))
        packing_session(fresh, CONFIG).load_state_dict(packing_session(ours, CONFIG).state_dict())
        assert first_token(wrap_data_iterator(fresh, CONFIG, 4)[0]) == 8
        return str(caught.value)

    (message,) = run_ranks(body, 1)
    assert "it was taken at item 8 of the data iterator, which stands at its item 0" in message


@pytest.mark.parametrize(("axis", "saver", "world"), [("tp", 1, 2), ("pp", 1, 3)])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_the_state_of_a_rank_that_receives_resumes_at_its_samples(
    axis: str, saver: int, world: int, num_steps: int
) -> None:
    readers = [0] if axis == "tp" else [0, 2]

    def place(rank: int) -> tuple[Any, DeviceMesh]:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(1, world), mesh_dim_names=("dp", axis))
        return iter(Loader(samples())) if rank in readers else None, mesh

    def save(rank: int, world: int) -> Any:
        data, groups = place(rank)
        session = packing_session(data, CONFIG, groups)
        for _ in range(num_steps):
            wrap_data_iterator(data, CONFIG, 4, groups)
        session.skip([(10, 12)])
        return session.state_dict()

    def load(rank: int, world: int, state: Any) -> Any:
        data, groups = place(rank)
        session = packing_session(data, CONFIG, groups)
        session.load_state_dict(state)
        again = session.state_dict()
        session.load_state_dict(state)  # which reads nothing: it may be given twice
        steps = []
        for _ in range(3):
            packed, *_ = wrap_data_iterator(data, CONFIG, 4, groups)
            steps.append([int(t) for batch in packed for t in batch.tokens[::5]])
        return again, steps, packed.state_dict()

    states = run_ranks(save, world)
    assert states[saver]["data"] is None
    assert states[saver]["consumed_samples"] == 4 * num_steps
    resumed = run_ranks(load, world, states[saver])
    wanted = [i for i in range(4 * num_steps, 60) if i not in (10, 11)]
    for rank, (again, steps, _) in enumerate(resumed):
        assert {k: again[k] for k in again if k != "data"} == {k: v for k, v in states[saver].items() if k != "data"}
        if axis == "tp" or rank in readers:  # middle pipeline stages need no tokens
            assert [sorted(step) for step in steps] == [wanted[i : i + 4] for i in (0, 4, 8)]
    # What a rank that reads saves now has its iterator's state again.
    ends = [state for _, _, state in resumed]
    assert all(end["data_at"] == ends[0]["data_at"] for end in ends)
    assert ends[0]["data"]["num_yielded"] == ends[0]["data_at"]


def test_a_state_without_the_iterators_own_is_refused_where_it_is_needed() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.at = 0

        def __next__(self) -> dict[str, Any]:
            self.at += 1
            return {"tokens": torch.full((5,), self.at - 1)}

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def body(rank: int, world: int) -> str:
        groups = DeviceMesh("cpu", torch.arange(2).reshape(1, 2), mesh_dim_names=("dp", "tp"))
        data = Stateful() if rank == 0 else None
        packed, *_ = wrap_data_iterator(data, CONFIG, 4, groups)
        kept: list[Any] = [packed.state_dict()]
        dist.broadcast_object_list(kept, src=1)
        if rank == 0:
            with pytest.raises(StateMismatchError) as caught:
                packed.session.load_state_dict(kept[0])
            return str(caught.value)
        return ""

    message, _ = run_ranks(body, 2)
    assert "which Stateful needs to be taken to sample 4; it was saved on a rank that receives" in message


def test_an_iterator_that_has_been_read_is_not_taken_on_from_a_state_without_its_own() -> None:
    def body(rank: int, world: int) -> str:
        data = iter(Loader(samples()))
        packed, *_ = wrap_data_iterator(data, CONFIG, 4)
        packed.load_state_dict({**packed.state_dict(), "data": None})
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(data, CONFIG, 4)
        return str(caught.value)

    (message,) = run_ranks(body, 1)
    assert "the data iterator stands at its item 8 already; to begin at 4, give one that stands at its" in message


def test_a_hybrid_state_of_a_rank_that_receives_resumes_at_its_global_batch() -> None:
    def body(rank: int, world: int) -> list[int]:
        groups = DeviceMesh("cpu", torch.arange(2).reshape(1, 2), mesh_dim_names=("dp", "tp"))

        def fresh() -> HybridCPDataLoaderWrapper:
            return HybridCPDataLoaderWrapper(iter(Loader(samples())) if rank == 0 else None, CONFIG, groups)

        first = fresh()
        for _ in range(3):
            next(first)
        kept: list[Any] = [first.state_dict()]
        dist.broadcast_object_list(kept, src=1)
        assert kept[0]["data"] is None
        second = fresh()
        second.load_state_dict(kept[0])
        found = [next(second)[0] for _ in range(2)]
        return [int(mapped[0]["tokens"][0]) for mapped in found if mapped is not None]

    assert run_ranks(body, 2) == [[3, 4], []]


def test_validation_with_a_config_of_its_own_begins_at_its_beginning() -> None:
    def body(rank: int, world: int) -> list[list[int]]:
        training = LoopConfig(
            max_seqlen_per_dp_cp_rank=64, data_timeout_s=20, consumed_samples=16, skip_samples=[(2, 4), (18, 20)]
        )
        found = []
        for config in (training, CONFIG):
            packed, *_ = wrap_data_iterator(iter(Loader(samples())), config, 4)
            found.append(sorted({int(t) for batch in packed for t in batch.tokens}))
        return found

    assert run_ranks(body, 1) == [[[16, 17, 20, 21], [0, 1, 2, 3]]]
