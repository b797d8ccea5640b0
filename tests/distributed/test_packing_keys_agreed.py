"""Keys of samples that each rank reads for itself: agreed with the lengths, kept by the plan of all ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchdata.nodes import IterableWrapper

from tdp_megatron.distributed import DpCpGroups, Exchange, scatter_back
from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops import HybridCPDataLoaderWrapper, LoopConfig, wrap_data_iterator
from tdp_megatron.nodes import Pack
from tdp_megatron.schedule import validate
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelLayout(2, 1, 64)
#: Near the end of int64, where a detour through floats would join neighbours.
FAR = 2**62


def samples_of(rank: int) -> list[dict[str, Any]]:
    """Conversation i has one turn on each rank; on rank 0 the turns are all of one speaker."""
    return [
        {"tokens": torch.arange(3 + 5 * rank + i), "conversation": FAR + i, "speaker": 1 if rank == 0 else -1}
        for i in range(6)
    ]


def test_keys_travel_with_the_lengths() -> None:
    def body(rank: int, world: int) -> Any:
        exchange = Exchange(DpCpGroups.create(LAYOUT, timeout_s=20))
        options: dict[str, Any] = {"global_batch_size": 6, "exchange": exchange, "check_plans": True}
        source = IterableWrapper(samples_of(rank))
        node = Pack(source, LAYOUT, together_key="conversation", apart_key="speaker", **options)
        digests = []
        for batch in node:
            assert batch.samples is not None
            index, owner = batch.samples.local_index, batch.samples.owner
            validate(batch.plan, together=index, apart=[1 if r == 0 else -1 for r in owner.tolist()])
            batch.pack(rank)
            digests.append(batch.plan.digest())
        # And another without keys, over the same exchange.
        assert len([b.pack(rank) for b in Pack(IterableWrapper(samples_of(rank)), LAYOUT, **options)]) == 2
        return digests

    first, second = run_ranks(body, 2)
    assert first == second
    assert len(first) == 2


def test_ranks_with_different_keys_are_told() -> None:
    def body(rank: int, world: int) -> None:
        exchange = Exchange(DpCpGroups.create(LAYOUT, timeout_s=20))
        key = "conversation" if rank else None
        node = Pack(IterableWrapper(samples_of(rank)), LAYOUT, global_batch_size=6, exchange=exchange, together_key=key)
        with pytest.raises(ExchangeError, match="give all ranks the same together_key and apart_key"):
            next(node)

    run_ranks(body, 2)


@pytest.mark.parametrize("of_rank_1", [{"together_key": "conversation"}, {"apart_key": "speaker"}, {}])
def test_ranks_with_different_keys_on_the_second_pack_of_an_exchange_are_told(of_rank_1: dict[str, str]) -> None:
    """By then the exchange knows how many samples to expect; what it sends must not depend on the keys for that."""

    def body(rank: int, world: int) -> str:
        exchange = Exchange(DpCpGroups.create(LAYOUT, timeout_s=20))
        options: dict[str, Any] = {"global_batch_size": 6, "exchange": exchange}
        next(Pack(IterableWrapper(samples_of(rank)), LAYOUT, **options))
        keys = of_rank_1 if rank else {"together_key": "conversation", "apart_key": "speaker"}
        second = Pack(IterableWrapper(samples_of(rank)), LAYOUT, **options, **keys)
        with pytest.raises(ExchangeError) as caught:
            next(second)
        return str(caught.value)

    told = f"step 0: rank 0 tells 2 more numbers of each sample, rank 1 {len(of_rank_1)}"
    wanted = f"{told}; give all ranks the same together_key and apart_key"
    assert run_ranks(body, 2) == [wanted] * 2


def test_packs_with_more_and_fewer_keys_take_turns_on_one_exchange() -> None:
    def body(rank: int, world: int) -> None:
        exchange = Exchange(DpCpGroups.create(LAYOUT, timeout_s=20))
        samples = samples_of(rank)
        packs: list[tuple[int, Pack]] = []
        kinds: list[tuple[int, dict[str, Any]]] = [(2, {}), (3, {"together_key": "conversation"}), (1, {})]
        for share, keys in kinds:
            node = Pack(IterableWrapper(samples), LAYOUT, global_batch_size=2 * share, exchange=exchange, **keys)
            packs.append((share, node))
        for turn, (share, node) in enumerate((*packs, *packs)):
            batch = next(node)
            assert batch.samples is not None
            tokens = [packed.tokens for packed in batch.pack(rank)]
            back = scatter_back(exchange.host, batch.plan, batch.samples, tokens)
            begin = share * (turn // len(packs))
            wanted = [sample["tokens"].tolist() for sample in samples[begin : begin + share]]
            assert [t.tolist() for t in back] == wanted

    run_ranks(body, 2)


@pytest.mark.parametrize("from_object", [False, True])
def test_loops_keep_keys(from_object: bool) -> None:
    options: dict[str, Any] = {
        "max_seqlen_per_dp_cp_rank": 64,
        "data_timeout_s": 20.0,
        "together_key": "conversation",
        "apart_key": "speaker",
        "check_plans": True,
    }
    config: Any = SimpleNamespace(**options) if from_object else LoopConfig(**options)

    def body(rank: int, world: int) -> list[Any]:
        source = iter(samples_of(rank))
        steps = []
        for _ in range(2):
            packed, *_ = wrap_data_iterator(source, config, 3)
            seen = [list(zip(b.refs, b.extras.get("conversation", ()), strict=True)) for b in packed.step.batches]
            steps.append(seen)
        return steps

    for step in zip(*run_ranks(body, 2), strict=True):
        packs = [pack for of_rank in step for pack in of_rank if pack]
        assert sorted(ref for pack in packs for ref, _ in pack) == [(r, i) for r in range(2) for i in range(3)]
        for pack in packs:  # a conversation's two turns, and no other's: rank 0 has one speaker
            assert sorted(rank for (rank, _), _ in pack) == [0, 1]
            assert len({key for _, key in pack}) == 1


@pytest.mark.parametrize(
    ("value", "message"), [("absent", "has no key 'conversation'"), (0.5, "with the value 0.5, which is no integer")]
)
def test_a_rank_whose_samples_lack_the_key_is_named(value: Any, message: str) -> None:
    config = LoopConfig(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20.0, together_key="conversation")

    def body(rank: int, world: int) -> str:
        samples = samples_of(rank)
        if rank == 1 and value == "absent":
            del samples[1]["conversation"]
        elif rank == 1:
            samples[1]["conversation"] = value
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(iter(samples), config, 3)
        return str(caught.value)

    for told, wanted in itertools.product(run_ranks(body, 2), ("step 0: rank 1 failed", "sample 1 of source", message)):
        assert wanted in told


def test_plans_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("tdp_megatron.loops.session.validate", lambda plan, **keys: calls.append(keys))

    def body(rank: int, world: int) -> None:
        for check in (False, True):
            config = LoopConfig(max_seqlen_per_dp_cp_rank=64, check_plans=check, read_ahead=False)
            wrap_data_iterator(iter(samples_of(rank)), config, 3)
            assert len(calls) == int(check)
        assert calls == [{"equal_count": True}]

    run_ranks(body, 1)


def test_hybrid_context_parallelism_has_no_keys() -> None:
    def body(rank: int, world: int) -> None:
        config = LoopConfig(max_seqlen_per_dp_cp_rank=64, apart_key="speaker")
        with pytest.raises(ValueError, match="runs each sample by itself"):
            HybridCPDataLoaderWrapper(iter([]), config)

    run_ranks(body, 1)


@pytest.mark.parametrize("name", ["", 3])
def test_names_that_are_none(name: Any) -> None:
    for config in (SimpleNamespace(max_seqlen_per_dp_cp_rank=8, together_key=name),):
        with pytest.raises(TypeError, match="together_key must be the name of a key"):
            LoopConfig.of(config)
