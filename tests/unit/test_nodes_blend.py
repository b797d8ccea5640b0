"""Blend: Megatron's rule, weights that mean what they say, ends that are clear."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper, Mapper

from tdp_megatron.datasets.blend import normalise_weights
from tdp_megatron.errors import StateMismatchError, TdpError
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead
from tdp_megatron.samples import with_values
from tdp_megatron.testing import check_resume_at_every_step, write_corpus


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("blend")
    return [write_corpus(folder / f"d{i}", [[i, j, 7] for j in range(n)]) for i, n in enumerate([10, 20, 5])]


def documents(prefix: str, **options: Any) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=8, **{"num_epochs": None, **options})


def plain_rule(weights: list[float], n: int) -> list[int]:
    """The largest deficit first, in plain Python."""
    counts, draws = [0] * len(weights), []
    for i in range(n):
        deficits = [w * max(i, 1) - c for w, c in zip(weights, counts, strict=True)]
        draws.append(deficits.index(max(deficits)))
        counts[draws[-1]] += 1
    return draws


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.5, 0.3, 0.2], [3, 1, 7], [1e-9, 1, 1e9], [0.001, 0.999, 0.5]])
def test_draws_follow_the_rule(prefixes: list[str], weights: list[float]) -> None:
    blend = Blend([documents(p) for p in prefixes], weights, num_samples=500)
    refs = [s.ref for s in blend]
    assert [r[0] for r in refs] == plain_rule(normalise_weights([float(w) for w in weights]).tolist(), 500)
    for i, prefix in enumerate(prefixes):  # each source goes on in its own order
        own = documents(prefix).take(500)
        drawn = [r[1] for r in refs if r[0] == i]
        assert drawn == own.refs[: len(drawn), 1].tolist()


def test_shares_are_within_one_sample_at_every_prefix(prefixes: list[str]) -> None:
    refs = Blend([documents(p) for p in prefixes], [0.2, 0.5, 0.3], num_samples=1000).take(1000).refs[:, 0]
    for i, weight in enumerate([0.2, 0.5, 0.3]):
        drawn = np.cumsum(refs == i)
        assert np.abs(drawn - weight * np.arange(1, 1001)).max() <= 1 + 1e-9


def test_a_source_of_weight_zero_is_skipped_and_reported(prefixes: list[str], caplog: pytest.LogCaptureFixture) -> None:
    blend = Blend([documents(p) for p in prefixes], [0, 1, 0], num_samples=30)
    assert {s.ref[0] for s in blend} == {1}
    assert "weight 0" in caplog.text
    assert prefixes[0] in caplog.text
    assert blend.counts.tolist() == [0, 30, 0]


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1, 1], ValueError, "2 weights for 3 sources"),
        ([1, 1, 1, 1], ValueError, "4 weights for 3 sources"),
        ([1, -1, 1], ValueError, "weight 1 of source 1 .* is -1.0"),
        ([1, 1, math.nan], ValueError, "weight 2 of source 2 .* is nan"),
        ([math.inf, 1, 1], ValueError, "weight 0 of source 0 .* is inf"),
        ([0, 0, 0], ValueError, "all 3 weights are zero"),
        (["1", 1, 1], TypeError, "must be a number, got '1'"),
        ([True, 1, 1], TypeError, "must be a number"),
        ("by_tokens", ValueError, "by_size"),
        ([1e308, 1e308, 1e308], ValueError, "infinite"),
    ],
)
def test_bad_weights(prefixes: list[str], weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Blend([documents(p) for p in prefixes], weights)


def test_no_sources() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        Blend([])


def test_by_size_draws_every_source_once(prefixes: list[str]) -> None:
    blend = Blend([documents(p, num_epochs=1) for p in prefixes], "by_size", num_samples=35)
    refs = [s.ref for s in blend]
    assert len(set(refs)) == len(refs) == 35
    with pytest.raises(TypeError, match="known size"):
        Blend([IterableWrapper([]), documents(prefixes[0])], "by_size")


def test_a_small_source_starts_its_next_epoch(prefixes: list[str]) -> None:
    refs = [s.ref for s in Blend([documents(prefixes[2]), documents(prefixes[1])], [0.9, 0.1], num_samples=100)]
    small = [r[1] for r in refs if r[0] == 0]
    assert all(sorted(small[i : i + 5]) == list(range(5)) for i in range(0, 85, 5))


def test_a_source_that_ends_is_an_error_when_a_number_was_asked_for(prefixes: list[str]) -> None:
    blend = Blend([documents(prefixes[2], num_epochs=1), documents(prefixes[1])], num_samples=100)
    with pytest.raises(TdpError, match="source 0 .* ended after 5 samples, at sample 10 of the 100"):
        list(blend)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_without_a_number_the_first_source_that_ends_ends_the_blend(prefixes: list[str], block: int) -> None:
    blend = Blend([documents(prefixes[2], num_epochs=1), documents(prefixes[1], num_epochs=1)])
    refs: list[list[int]] = []
    while len(part := blend.take(block)):
        refs += part.refs.tolist()
    assert [r[0] for r in refs] == plain_rule([0.5, 0.5], len(refs))
    assert len(refs) == 10
    assert blend.counts.tolist() == [5, 5]


def test_nested_blends_number_their_leaves(prefixes: list[str]) -> None:
    inner = Blend([documents(prefixes[0]), documents(prefixes[1])])
    blend = Blend([documents(prefixes[2]), inner], num_samples=40)
    assert blend.num_datasets == 3
    for sample in blend:
        assert sample.ref[0] == [1, 2, 0][int(sample["tokens"][0])]


def test_user_nodes_in_between_and_user_sources(prefixes: list[str]) -> None:
    def reverse(sample: Any) -> Any:
        return with_values(sample, tokens=sample["tokens"].flip(0))

    def make() -> Blend:
        mapped = Mapper(documents(prefixes[0]), reverse)
        own = IterableWrapper([{"tokens": torch.tensor([9, 9, n])} for n in range(50)])
        return Blend([mapped, own, documents(prefixes[1])], [1, 1, 1], num_samples=60)

    samples = list(make())
    assert [s.ref[0] for s in samples] == plain_rule([1 / 3] * 3, 60)
    assert [int(s["tokens"][2]) for s in samples if s.ref[0] == 0] == [0] * 20
    assert [s.ref[1] for s in samples if s.ref[0] == 1] == list(range(20))
    assert [int(s["tokens"][2]) for s in samples if s.ref[0] == 1] == list(range(20))
    # The refs of a plain mapping are counted, so they resume, too.
    check_resume_at_every_step(make, describe=lambda s: [s.ref, s["tokens"], s["labels"]])


def test_what_is_not_a_sample_is_refused(prefixes: list[str]) -> None:
    for item, error, message in [
        (5, TypeError, "gave int"),
        ({"text": "x"}, ValueError, "no key 'tokens'"),
        ({"tokens": torch.zeros(3)}, TypeError, "must hold integers"),
        ({"tokens": torch.zeros((3, 1), dtype=torch.long)}, ValueError, "one dimension"),
        ({"tokens": torch.arange(3), "labels": torch.arange(2)}, ValueError, "labels has shape"),
    ]:
        with pytest.raises(error, match=message):
            next(Blend([IterableWrapper([item])]))


def test_a_state_that_does_not_add_up_is_refused(prefixes: list[str]) -> None:
    blend = Blend([documents(p) for p in prefixes])
    blend.take(7)
    state = blend.state_dict()
    with pytest.raises(StateMismatchError, match="counts sum to 8, the position is 7"):
        Blend([documents(p) for p in prefixes]).reset({**state, "counts": [2, 3, 3]})
    with pytest.raises(StateMismatchError, match="weights was"):
        Blend([documents(p) for p in prefixes], [1, 2, 3]).reset(state)
    with pytest.raises(StateMismatchError, match="no states of 3 sources"):
        Blend([documents(p) for p in prefixes]).reset({**state, "sources": []})
