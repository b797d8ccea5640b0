"""Ranks of a wrapped loop that count differently, and data iterators that stand or deal out elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as TorchdataLoader

from tdp_megatron.errors import ExchangeError, StateMismatchError
from tdp_megatron.loops import LoopConfig, packing_session, wrap_data_iterator
from tdp_megatron.nodes import Loader, Shard
from tdp_megatron.testing import run_ranks

pytestmark = pytest.mark.distributed

CONFIG = LoopConfig(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20)


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
