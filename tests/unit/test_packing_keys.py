"""Keys of the samples that say which of them share a microbatch, in Pack and StreamPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode, IterableWrapper, Mapper

from tdp_megatron.errors import ScheduleError
from tdp_megatron.nodes import DocumentSample, GlobalBatch, IndexedRead, Pack, StreamPack
from tdp_megatron.samples import with_values
from tdp_megatron.schedule import CostModel, validate
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import ParallelLayout

LAYOUT = ParallelLayout(2, 1, 64, tail_multiple=1)
COST = CostModel(a=1e-5, b=1e-8)

#: Ways a sample may hold a number.
KINDS = [
    int,
    np.int32,
    np.uint8,
    torch.tensor,
    lambda n: torch.tensor([n]),
    lambda n: np.array([n]),
    lambda n: np.array(n, dtype=np.int16),
]


def conversations() -> list[dict[str, Any]]:
    """24 turns of conversations of 3; every fourth sample is of speaker 1."""
    rng = np.random.default_rng(1)
    return [
        {
            "tokens": torch.arange(int(n)),
            "conversation_id": KINDS[i % len(KINDS)](i // 3),
            "speaker": KINDS[i % len(KINDS)](1) if i % 4 == 0 else -1,
        }
        for i, n in enumerate(rng.integers(1, 20, 24))
    ]


def keys_of(batch: GlobalBatch) -> dict[str, list[int]]:
    samples = conversations()
    chosen = [samples[number] for _, number in batch.refs.tolist()]
    return {
        "together": [int(np.asarray(s["conversation_id"]).item()) for s in chosen],
        "apart": [int(np.asarray(s["speaker"]).item()) for s in chosen],
    }


@pytest.mark.parametrize("algorithm", ["auto", "dp_balanced", "lpt"])
@pytest.mark.parametrize("check_plans", [False, True])
def test_pack_keeps_keys(algorithm: str, check_plans: bool) -> None:
    options: dict[str, Any] = {"global_batch_size": 12, "algorithm": algorithm, "check_plans": check_plans}
    node = Pack(
        IterableWrapper(conversations()), LAYOUT, together_key="conversation_id", apart_key="speaker", **options
    )
    plain = Pack(IterableWrapper(conversations()), LAYOUT, **options)
    broken = 0
    for batch, without in zip(node, plain, strict=True):
        validate(batch.plan, **keys_of(batch))
        try:
            validate(without.plan, **keys_of(without))
        except ScheduleError:
            broken += 1
    assert broken  # or there was nothing to keep


@pytest.mark.parametrize("waves_per_batch", [1, 2])
def test_stream_pack_keeps_keys_and_resumes(waves_per_batch: int) -> None:
    def make() -> StreamPack:
        return StreamPack(
            IterableWrapper(conversations()),
            LAYOUT,
            window=7,
            waves_per_batch=waves_per_batch,
            cost=COST,
            together_key="conversation_id",
            apart_key="speaker",
            check_plans=True,
        )

    def describe(batch: GlobalBatch) -> list[Any]:
        return [batch.refs.tolist(), batch.plan.digest()]

    seen: list[int] = []
    for batch in make():
        validate(batch.plan, **keys_of(batch))
        seen += batch.refs[:, 1].tolist()
    assert sorted(seen) == list(range(24))
    check_resume_at_every_step(make, describe=describe)


def test_stream_pack_checks_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr("tdp_megatron.nodes.stream_pack.validate", lambda plan, **keys: checked.append(keys))
    options: dict[str, Any] = {"window": 7, "apart_key": "speaker"}
    for check, count in ((False, 0), (True, 1)):
        next(StreamPack(IterableWrapper(conversations()), LAYOUT, check_plans=check, **options))
        assert len(checked) == count
    assert checked[0]["equal_count"]
    assert set(checked[0]["apart"].tolist()) <= {-1, 1}


NODES = {
    "pack": lambda source, **keys: Pack(source, LAYOUT, global_batch_size=2, **keys),
    "stream": lambda source, **keys: StreamPack(source, LAYOUT, window=2, **keys),
}


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "sample 1 of source 0 has the key 'group' with the value None, which is no integer"),
        ("7", TypeError, "with the value '7', which is no integer; together_key names 'group'"),
        (1.0, TypeError, "with the value 1.0, which is no integer"),
        (True, TypeError, "with the value True, which is no integer"),
        (np.bool_(True), TypeError, "which is no integer"),
        (torch.tensor(2.0), TypeError, "which is no integer"),
        (torch.tensor([1, 2]), TypeError, "which is no integer"),
        (np.zeros(0, dtype=np.int64), TypeError, "which is no integer"),
        ([3], TypeError, "which is no integer"),
        (-2, ValueError, "with the value -2; keys go from 0"),
        (1 << 63, ValueError, "with the value 9223372036854775808"),
        ("absent", ValueError, "sample 1 of source 0 has no key 'group' with one value per sample"),
    ],
)
def test_values_that_are_no_keys(kind: str, value: Any, error: type[Exception], message: str) -> None:
    samples: list[dict[str, Any]] = [{"tokens": torch.arange(3), "group": 0}, {"tokens": torch.arange(3)}]
    if not (isinstance(value, str) and value == "absent"):
        samples[1]["group"] = value
    with pytest.raises(error, match=message):
        next(NODES[kind](IterableWrapper(samples), together_key="group"))


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("name", ["", 3, ("a", "b"), b"a"])
@pytest.mark.parametrize("key", ["together_key", "apart_key"])
def test_names_that_are_none(kind: str, name: Any, key: str) -> None:
    with pytest.raises(TypeError, match=f"{key} must be the name of a key"):
        NODES[kind](IterableWrapper([]), **{key: name})


def test_the_largest_key_is_kept_exactly() -> None:
    near = [2**63 - 1, 2**63 - 2, 2**63 - 1]
    source = IterableWrapper([{"tokens": torch.arange(30), "group": g} for g in near])
    batch = next(Pack(source, LAYOUT, global_batch_size=3, together_key="group"))
    validate(batch.plan, together=near)


def test_a_key_per_token_is_none_per_sample() -> None:
    samples = [{"tokens": torch.arange(3), "group": torch.zeros(3, dtype=torch.int64)}] * 2
    with pytest.raises(ValueError, match="has no key 'group' with one value per sample"):
        next(Pack(IterableWrapper(samples), LAYOUT, global_batch_size=2, token_keys=["group"], apart_key="group"))


def test_token_files_get_a_key_from_a_mapper(tmp_path: Any) -> None:
    prefix = write_corpus(tmp_path / "d", [np.arange(n) for n in range(1, 13)])

    def source() -> BaseNode[Any]:
        return DocumentSample(IndexedRead(prefix), max_seqlen=64, num_epochs=1)

    with pytest.raises(ValueError, match="token files have none; a Mapper with with_values adds it"):
        next(Pack(source(), LAYOUT, global_batch_size=12, together_key="bucket"))
    mapped = Mapper(source(), lambda sample: with_values(sample, bucket=sample.seqlen % 3))
    batch = next(Pack(mapped, LAYOUT, global_batch_size=12, together_key="bucket"))
    validate(batch.plan, together=batch.seqlens % 3)
