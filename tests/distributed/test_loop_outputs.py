"""Outputs of a loop's packs come back to every rank of the data-parallel rank that read the samples, in its order."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.errors import ExchangeError
from tdp_megatron.loops import HybridCPDataLoaderWrapper, packing_session, wrap_data_iterator
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.testing import run_ranks

pytestmark = pytest.mark.distributed

NUM_MICROBATCHES = 3
CONFIG = SimpleNamespace(max_seqlen_per_dp_cp_rank=64, data_timeout_s=20.0)
IMPATIENT = SimpleNamespace(max_seqlen_per_dp_cp_rank=64, data_timeout_s=2.0)


class Place:
    """One process of TP x PP x CP x DP, and its data."""

    def __init__(self, rank: int, world: int, tp: int = 1, pp: int = 1, cp: int = 1) -> None:
        ranks = np.arange(world).reshape(pp, -1, cp, tp)
        self.pp, self.dp, self.cp, self.tp = np.argwhere(ranks == rank)[0].tolist()
        self.mesh = DeviceMesh("cpu", torch.from_numpy(ranks), mesh_dim_names=("pp", "dp", "cp", "tp"))
        self.is_last_stage = self.pp == pp - 1
        self.reads = self.tp == 0 and self.pp in (0, pp - 1)

    def items(self, steps: int) -> list[list[dict[str, Any]]]:
        """Microbatches of 0 to 2 samples of very different lengths; every other one is padded in advance."""
        rng = np.random.default_rng(self.dp)
        items = []
        for number in range(steps * NUM_MICROBATCHES):
            item = []
            for n in rng.integers(1, 40, (number + self.dp) % 3).tolist():
                sample = {"tokens": torch.from_numpy(rng.integers(1, 250, n))}
                if number % 2:
                    sample["original_seq_len"], sample["padded_seq_len"] = n - n // 3, n + n // 4
                item.append(sample)
            items.append(item)
        return items

    def iterator(self, steps: int = 3) -> Iterator[Any] | None:
        return iter(self.items(steps)) if self.reads else None

    def step(self, iterator: Any, config: Any = CONFIG) -> Any:
        return wrap_data_iterator(iterator, config, NUM_MICROBATCHES, self.mesh)[0]

    def read(self, step: int) -> list[torch.Tensor]:
        """Tokens of the samples of a step."""
        items = self.items(step + 1)[-NUM_MICROBATCHES:]
        return [s["tokens"][: s.get("original_seq_len", None)] for item in items for s in item]


def outputs_of(packed: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """As a model's forward step gives them: [1, T] per microbatch."""
    return [batch.tokens[None].to(dtype) for batch in packed.step.batches]


def check(got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    assert [(t.dtype, t.tolist()) for t in got] == [(dtype, w.to(dtype).tolist()) for w in wanted]


SHAPES = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 1, 2),
    (2, 1, 2),
    (1, 2, 2),
    (1, 4, 1),
    (2, 2, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"tp{s[0]}pp{s[1]}cp{s[2]}")
def test_outputs_come_back_while_the_next_step_is_made(shape: tuple[int, int, int]) -> None:
    def body(rank: int, world: int) -> None:
        place = Place(rank, world, *shape)
        iterator = place.iterator()
        seen = []
        for step in range(3):
            packed = place.step(iterator)
            seen.append(packed)
            wanted = place.read(step)
            if not place.is_last_stage:  # what a loop has there is not looked at
                outputs = [torch.zeros(7, 1, 16)] if step else None
                check(packed.scatter_back(outputs), wanted)
                check(packed.scatter_back(), wanted, torch.bfloat16)
                wide = packed.scatter_back(outputs)
            else:
                outputs = outputs_of(packed)
                check(packed.scatter_back(outputs if step or place.tp == 0 else None), wanted)
                whole = torch.cat([out[0] for out in outputs])
                check(packed.scatter_back(whole.bfloat16().requires_grad_()), wanted, torch.bfloat16)
                ids = whole.long() + 2**40
                wide = packed.scatter_back(torch.stack([ids, -ids], dim=1))
            assert [w.tolist() for w in wide] == [[[t + 2**40, -t - 2**40] for t in w.tolist()] for w in wanted]
        # Steps that have gone by are still there for whoever has kept them.
        for step in (1, 0):
            check(seen[step].scatter_back(outputs_of(seen[step], torch.int64)), place.read(step), torch.int64)
        with pytest.raises(StopIteration):
            place.step(iterator)
        check(seen[2].scatter_back(outputs_of(seen[2])), place.read(2))

    run_ranks(body, 8, timeout_s=90)


def test_an_iterator_that_waits_for_the_outputs() -> None:
    """As rollouts do that a worker makes once it has the rewards; the step read ahead hangs on it meanwhile."""

    def body(rank: int, world: int) -> None:
        place = Place(rank, world, 2)
        came = threading.Event()

        def data() -> Iterator[Any]:
            for number, item in enumerate(place.items(2)):
                if number == NUM_MICROBATCHES:
                    assert came.wait(20)
                yield item

        iterator = data() if place.reads else None
        packed = place.step(iterator)
        check(packed.scatter_back(outputs_of(packed)), place.read(0))
        came.set()
        packed = place.step(iterator)
        check(packed.scatter_back(outputs_of(packed)), place.read(1))

    run_ranks(body, 4)


def test_virtual_stages_and_several_iterators() -> None:
    def body(rank: int, world: int) -> str:
        place = Place(rank, world, 1, 2)
        config = SimpleNamespace(
            **vars(CONFIG), virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=2
        )
        train, valid = place.iterator(), place.iterator(4)
        chunks = place.step(train, config)
        for chunk in chunks:
            check(chunk.scatter_back(outputs_of(chunk)), place.read(0))
        other = place.step(valid, config)[0]
        check(other.scatter_back(outputs_of(other)), place.read(0))
        packing_session(valid, config, place.mesh).close()
        check(other.scatter_back(outputs_of(other)), place.read(0))
        mine = other if rank == 1 else chunks[0]
        with pytest.raises(ExchangeError) as caught:
            mine.scatter_back(outputs_of(mine))
        check(chunks[0].scatter_back(outputs_of(chunks[0])), place.read(0))
        return str(caught.value)

    for message in run_ranks(body, 4):
        assert "for the outputs of step 0" in message
        assert "for those of step 0" in message
        assert "of data iterator 1" in message


def test_a_dummy_pack_of_one_token_has_one_reading() -> None:
    """Its output [1, 1] could be [T, 1] or [1, T]; the other ranks' outputs tell."""

    def body(rank: int, world: int) -> None:
        samples = [{"tokens": torch.arange(5)}] if rank == 0 else []
        packed, *_ = wrap_data_iterator(iter([samples]), CONFIG, 1)
        assert [b.num_tokens for b in packed.step.batches] == ([5] if rank == 0 else [1])
        back = packed.scatter_back(outputs_of(packed))
        assert [t.tolist() for t in back] == ([[0, 1, 2, 3, 4]] if rank == 0 else [])
        column = [batch.tokens[:, None] for batch in packed.step.batches]
        assert [t.tolist() for t in packed.scatter_back(column)] == ([[[0], [1], [2], [3], [4]]] if rank == 0 else [])

    run_ranks(body, 2)


def cut(packed: Any) -> Any:
    return [out[:, 1:] for out in outputs_of(packed)]


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too short": (cut, ValueError, "the plan gives it"),
    "joined, too long": (
        lambda packed: torch.zeros(1 + sum(b.num_tokens for b in packed.step.batches)),
        ValueError,
        "the plan gives it",
    ),
    "one microbatch too few": (
        lambda packed: outputs_of(packed)[1:],
        ValueError,
        r"has \d+ outputs, and \d+ microbatches",
    ),
    "scalars": (lambda packed: [out.sum() for out in outputs_of(packed)], ValueError, "the plan gives it"),
    "nothing": (lambda packed: None, TypeError, "must be tensors"),
    "no tensors": (lambda packed: [out.tolist() for out in outputs_of(packed)], TypeError, "must be tensors"),
    "arrays": (lambda packed: [out.numpy() for out in outputs_of(packed)], TypeError, "must be torch tensors"),
    "other dtype": (lambda packed: outputs_of(packed, torch.float16), ExchangeError, "they must be the same"),
    "other shape": (
        lambda packed: [out[..., None] for out in outputs_of(packed)],
        ExchangeError,
        "they must be the same",
    ),
}


@pytest.mark.parametrize("culprit", [2, 5, 6])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_outputs_of_one_rank_are_told_to_all(kind: str, culprit: int) -> None:
    """Of 2 stages x DP 2 x TP 2, rank 2 is of the first stage, 5 a TP rank 1, and 6 the TP rank 0 of the last one."""
    make, error, message = WRONG[kind]

    def body(rank: int, world: int) -> str:
        place = Place(rank, world, 2, 2)
        packed = place.step(place.iterator())
        outputs = make(packed) if rank == culprit else outputs_of(packed)
        told = ""
        try:
            packed.scatter_back(outputs)
        except (ValueError, TypeError, ExchangeError) as caught:
            told = f"{type(caught).__name__}: {caught}"
        # All ranks are in step, and may try again.
        check(packed.scatter_back(outputs_of(packed)), place.read(0))
        return told

    told = run_ranks(body, 8, timeout_s=60)
    if culprit == 2 or (culprit == 5 and kind == "nothing"):  # a TP rank other than 0 may give nothing
        assert told == [""] * 8
        return
    for rank, text in enumerate(told):
        assert re.search(message, text), (rank, text)
        wanted = error if rank == culprit else ExchangeError
        assert text.startswith(wanted.__name__)
        if error is not ExchangeError and rank != culprit:
            name = "rank 0 of pipeline stage 1 (tensor-parallel rank 1)" if culprit == 5 else "rank 1 of pipeline"
            assert f"step 0: sending outputs back: {name}" in text


def test_ranks_that_ask_for_different_steps() -> None:
    def body(rank: int, world: int) -> list[str]:
        place = Place(rank, world, 2, 2)
        iterator = place.iterator()
        steps = [place.step(iterator) for _ in range(2)]
        texts = []
        for odd in (1, 2, 5, 6):
            packed = steps[int(rank != odd)]
            with pytest.raises(ExchangeError) as caught:
                packed.scatter_back(outputs_of(packed))
            texts.append(str(caught.value))
        check(steps[1].scatter_back(outputs_of(steps[1])), place.read(1))
        return texts

    for texts in run_ranks(body, 8, timeout_s=60):
        for text in texts:
            assert "for the outputs of step " in text
            assert "for those of step " in text


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_a_rank_that_does_not_come_is_named(shape: tuple[int, int], how: str, before: int) -> None:
    """In the first call, which makes the groups, and in a later one."""

    def body(rank: int, world: int) -> Any:
        place = Place(rank, world, *shape)
        packed = place.step(place.iterator(), IMPATIENT)
        for _ in range(before):
            packed.scatter_back(outputs_of(packed))
        if rank == world - 1:
            if how == "dies":
                os._exit(9)
            return None
        begun = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            packed.scatter_back(outputs_of(packed))
        return time.monotonic() - begun, str(caught.value)

    results = run_ranks(body, 4, timeout_s=60, return_failures=True)[:-1]
    for seconds, _ in results:
        assert seconds < 2 * IMPATIENT.data_timeout_s + 10
    messages = [message for _, message in results]
    if not before:
        assert "ranks [3] did not come within 2 s" in messages[2]
    elif shape == (1, 1):
        assert all("step 0: sending outputs back" in message and "rank 3 vanished" in message for message in messages)
    else:  # it is the second TP rank of the last stage
        assert re.search("among the tensor-parallel ranks .*: rank 1 vanished", messages[2])


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("algorithm", ["default_dynamic_cp", "balanced_hybrid_cp"])
def test_hybrid_context_parallelism(tp: int, cp: int, algorithm: str) -> None:
    def body(rank: int, world: int) -> str:
        place = Place(rank, world, tp, 1, cp)
        rng = np.random.default_rng(place.dp)
        items = [[{"tokens": torch.from_numpy(rng.integers(0, 250, n))} for n in (3 + step, 90, 40)] for step in (0, 1)]
        wrapper = HybridCPDataLoaderWrapper(
            iter(items) if place.reads else None, CONFIG, place.mesh, algorithm=algorithm
        )
        me = place.dp * cp + place.cp
        told = []
        with pytest.raises((RuntimeError, ExchangeError)) as caught:
            wrapper.scatter_back({})
        told.append(str(caught.value))
        for step in range(2):
            samples, groups = next(wrapper)
            outputs: dict[int, torch.Tensor] | None = None
            if samples is not None:
                outputs = {}
                for group in groups:
                    for i in group[me]:
                        ranks = [r for r, ids in enumerate(group) if i in ids]
                        tokens = samples[i]["tokens"]
                        width = 2 * len(ranks) if len(ranks) > 1 else 1
                        padded = torch.nn.functional.pad(tokens, (0, -len(tokens) % width))
                        edges = torch.tensor([0, len(padded)])
                        outputs[i] = padded[cp_partition_indices(edges, len(ranks), ranks.index(me))][None].float()
            wanted = [s["tokens"] for s in items[step]]
            check(wrapper.scatter_back(outputs), wanted)
            with pytest.raises((ValueError, ExchangeError)) as caught:
                wrapper.scatter_back(outputs and {i + int(rank == 0): out for i, out in outputs.items()})
            told.append(str(caught.value))
        return "; ".join(told)

    for told in run_ranks(body, 4 * tp, timeout_s=60):
        assert "no global batch yet" in told
        assert "has outputs of the samples" in told


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("algorithm", ["default_dynamic_cp", "balanced_hybrid_cp"])
def test_a_global_batch_without_samples_between_others(tp: int, algorithm: str) -> None:
    def body(rank: int, world: int) -> None:
        place = Place(rank, world, tp)
        items: list[list[dict[str, Any]]] = [[], [{"tokens": torch.arange(5)}], []]
        wrapper = HybridCPDataLoaderWrapper(
            iter(items) if place.reads else None, CONFIG, place.mesh, algorithm=algorithm
        )
        packs = iter([[item] * NUM_MICROBATCHES for item in items]) if place.reads else None
        for item in items:
            samples, _ = next(wrapper)
            outputs = None if samples is None else {i: s["tokens"][None].double() for i, s in samples.items()}
            check(wrapper.scatter_back(outputs), [s["tokens"] for s in item], torch.float64 if item else torch.float32)
            packed = wrap_data_iterator(packs and iter(next(packs)), CONFIG, NUM_MICROBATCHES, place.mesh)[0]
            check(packed.scatter_back(outputs_of(packed)), [s["tokens"] for s in item] * NUM_MICROBATCHES)

    run_ranks(body, 2 * tp, timeout_s=60)
