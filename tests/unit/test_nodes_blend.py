"""Blend: Megatron's rule, weights that mean what they say, ends that are clear."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper, Mapper

from tdp_megatron.datasets.blend import normalise_weights
from tdp_megatron.datasets.weights import CallableWeights, PiecewiseLinearWeights
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
        ({0: 1, 1: 2, 2: 3}, TypeError, "weights must be a sequence"),
        ([1e308, 1e308, 1e308], ValueError, "infinite"),
    ],
)
def test_bad_weights(prefixes: list[str], weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Blend([documents(p) for p in prefixes], weights)


def test_counts_and_report_before_the_first_draw(prefixes: list[str]) -> None:
    blend = Blend([documents(p) for p in prefixes])
    assert blend.counts.tolist() == [0, 0, 0]
    assert [(r.drawn, r.actual, r.epochs) for r in Blend([documents(p) for p in prefixes]).report()] == [(0, 0, 0)] * 3
    blend.counts[:] = 5
    assert blend.counts.tolist() == [0, 0, 0]


def test_no_sources() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        Blend([])


def test_one_node_is_one_source(prefixes: list[str]) -> None:
    node = documents(prefixes[0])
    with pytest.raises(ValueError, match="two sources of the blend are one node"):
        Blend([node, documents(prefixes[1]), node])


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


def version_1(blend: Blend) -> dict[str, Any]:
    """The state as the first version wrote it: that of each source by itself."""
    return {**blend.state_dict(), "version": 1, "sources": [source.state_dict() for source in blend.sources]}


def test_a_state_that_does_not_add_up_is_refused(prefixes: list[str]) -> None:
    blend = Blend([documents(p) for p in prefixes])
    blend.take(7)
    state = blend.state_dict()
    with pytest.raises(StateMismatchError, match="counts sum to 8, the position is 7"):
        Blend([documents(p) for p in prefixes]).reset({**state, "counts": [2, 3, 3]})
    with pytest.raises(StateMismatchError, match="weights was"):
        Blend([documents(p) for p in prefixes], [1, 2, 3]).reset(state)
    for counts in ([7], [3, 2, 2, 0], [3, 2, 2.0], [8, -1, 0], [2**63, 0, 0], ["3", 2, 2], [True, 3, 3]):
        with pytest.raises(StateMismatchError, match="expected 3 integers from 0 up"):
            Blend([documents(p) for p in prefixes]).reset({**state, "counts": counts})
    old = version_1(blend)
    first, *others = old["sources"]
    for sources, counts in (
        ([{**first, "position": 4}, *others], old["counts"]),  # a source elsewhere
        (old["sources"], old["counts"][::-1]),  # the right sum, the wrong shares
    ):
        with pytest.raises(StateMismatchError, match=r"source 0 .* is at sample \d, but \d samples were drawn"):
            Blend([documents(p) for p in prefixes]).reset({**old, "sources": sources, "counts": counts})
    with pytest.raises(StateMismatchError, match="no states of 3 sources"):
        Blend([documents(p) for p in prefixes]).reset({**state, "sources": []})


# Weights that change over training


def ramp(n: int) -> list[float]:
    return [1.0, 1.0] if n < 40 else [2.0, 1.0]


def test_changed_weights_go_on_at_each_sources_own_place(tmp_path: Path) -> None:
    """100 documents each, 1:1 for 40 samples, then 2:1: nothing repeats before its epoch ends, nothing is lost."""
    pair = [write_corpus(tmp_path / f"p{i}", [[i, j, 7] for j in range(100)]) for i in (0, 1)]
    blend = Blend([documents(p) for p in pair], CallableWeights(ramp), num_samples=160)
    refs = blend.take(160).refs
    assert [int((refs[:40, 0] == i).sum()) for i in (0, 1)] == [20, 20]
    assert [int((refs[40:, 0] == i).sum()) for i in (0, 1)] == [80, 40]
    for i, prefix in enumerate(pair):
        drawn = refs[refs[:, 0] == i, 1].tolist()
        assert drawn == documents(prefix).take(len(drawn)).refs[:, 1].tolist()
        assert len(set(drawn)) == len(drawn)


def scheduled(prefixes: list[str], kind: str, num_samples: int | None = 90) -> Blend:
    schedule: Any = PiecewiseLinearWeights([(10, [1, 0, 0]), (50, [0.2, 0.5, 0.3]), (60, [0, 1, 1])])
    if kind == "function":
        schedule = CallableWeights(lambda n: [1 + n % 7, 2, 3], name="saw")
    return Blend([documents(p) for p in prefixes], schedule, num_samples=num_samples)


@pytest.mark.parametrize("kind", ["linear", "function"])
def test_changing_weights_resume_at_every_step_and_in_blocks_of_any_size(prefixes: list[str], kind: str) -> None:
    assert check_resume_at_every_step(lambda: scheduled(prefixes, kind), describe=lambda s: s.ref) == 90
    whole = scheduled(prefixes, kind).take(90).refs.tolist()
    for size in (1, 7, 64):
        blend, refs = scheduled(prefixes, kind), []
        while len(part := blend.take(size)):
            refs += part.refs.tolist()
        assert refs == whole


def test_shares_follow_the_line(prefixes: list[str]) -> None:
    blend = scheduled(prefixes, "linear", num_samples=None)
    refs = blend.take(2000).refs[:, 0]
    assert set(refs[:10].tolist()) == {0}  # the weights before the first point are those of the first point
    assert 0 not in refs[62:].tolist()
    targets = np.cumsum([np.interp(range(2000), [10, 50, 60], [1, 0.2, 0])], axis=1)[0]
    assert np.abs(np.cumsum(refs == 0) - targets).max() <= 1.0 + 1e-9
    report = blend.report()
    assert [r.requested for r in report] == [0.0, 0.5, 0.5]
    assert [r.drawn for r in report] == blend.counts.tolist()
    assert sum(r.actual for r in report) == pytest.approx(1)
    assert report[1].epochs == report[1].drawn / 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PiecewiseLinearWeights([]), "at least one point"),
        (lambda: PiecewiseLinearWeights([(5, [1]), (5, [2])]), "must rise"),
        (lambda: PiecewiseLinearWeights([(0, [1, 1]), (5, [2])]), "1 weights for 2 sources"),
        (lambda: PiecewiseLinearWeights([(0, [1, -1])]), "is -1.0"),
        (lambda: CallableWeights(lambda n: [0.0, 0.0]).weights(0, 1), "all 2 weights are zero"),
        (lambda: CallableWeights(lambda n: [1.0, math.nan]).weights(0, 1), "is nan"),
        (lambda: Blend([IterableWrapper([])], PiecewiseLinearWeights([(0, [1, 1])])), "2 weights for 1 sources"),
    ],
)
def test_bad_changing_weights(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_changed_schedule_is_a_state_mismatch(prefixes: list[str]) -> None:
    blend = scheduled(prefixes, "linear")
    blend.take(5)
    with pytest.raises(StateMismatchError, match="weights was"):
        scheduled(prefixes, "function").reset(blend.state_dict())


# Ends, and passing over samples


def ending(prefixes: list[str], stop: Any, kind: str = "ours") -> Blend:
    sources: list[Any] = [documents(p, num_epochs=1) for p in prefixes]
    if kind == "user":
        sources[1] = Mapper(sources[1], lambda s: s)
    return Blend(sources, [0.5, 0.3, 0.2], stop=stop)


@pytest.mark.parametrize("kind", ["ours", "user"])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle"])
def test_ends_do_not_depend_on_the_block_size_and_resume(prefixes: list[str], stop: Any, kind: str) -> None:
    def refs(size: int) -> list[Any]:
        blend, drawn = ending(prefixes, stop, kind), []
        while len(drawn) < 200 and len(part := blend.take(size)):
            drawn += part.refs.tolist()
        return drawn[:200]

    whole = refs(1)
    assert refs(13) == refs(200) == whole
    counts = [sum(r[0] == i for r in whole) for i in range(3)]
    if stop == "first_exhausted":
        assert counts[0] == 10
        assert len(whole) < 35
    elif stop == "all_exhausted":
        assert counts == [10, 20, 5]
    else:
        assert len(whole) == 200
        assert counts == [100, 60, 40]
    check_resume_at_every_step(lambda: ending(prefixes, stop, kind), describe=lambda s: s.ref, max_items=60)


def test_a_cycling_blend_begins_anew_where_it_had_begun_a_source_again() -> None:
    def numbers(n: int) -> list[int]:
        return [int(sample["tokens"][0]) for sample in blend.take(n)]

    blend = Blend([IterableWrapper([{"tokens": [i]} for i in range(5)])], stop="cycle")
    assert numbers(4) == [0, 1, 2, 3]
    state = blend.state_dict()
    assert numbers(3) == [4, 0, 1]
    blend.reset(state)
    assert numbers(3) == [4, 0, 1]
    blend.reset(None)
    assert numbers(7) == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("asked", [None, 12, 15, 100])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_blend_within_a_blend_gives_all_it_has(prefixes: list[str], asked: int | None, block: int) -> None:
    """It ends when its sources do, also where it was asked for more, and the outer one loses nothing by that."""
    inner = Blend(
        [documents(prefixes[0], num_epochs=1), documents(prefixes[2], num_epochs=1)],
        num_samples=asked,
        stop="all_exhausted",
    )
    outer = Blend([inner, documents(prefixes[1], num_epochs=1)], stop="all_exhausted")
    outer.reset(None)
    inner_has = min(15, asked or 15)
    assert inner.num_remaining() == inner_has
    assert outer.num_remaining() == inner_has + 20
    refs = []
    while len(part := outer.take(block)):
        refs += part.refs.tolist()
    assert len(refs) == inner_has + 20
    assert len({tuple(ref) for ref in refs}) == len(refs)
    assert outer.num_remaining() == 0


def test_a_source_that_gives_less_than_it_said_is_an_error(prefixes: list[str]) -> None:
    class Boasting(DocumentSample):
        def num_remaining(self) -> int | None:
            return 1000

    boasting = Boasting(IndexedRead(prefixes[0]), max_seqlen=8)
    with pytest.raises(TdpError, match="gave 10 samples instead of 15, but its num_remaining said 1000"):
        Blend([boasting, documents(prefixes[1])]).take(30)


def test_cycling_an_empty_source_is_an_error() -> None:
    with pytest.raises(TdpError, match="gave nothing after it was begun again"):
        next(Blend([IterableWrapper([])], stop="cycle"))


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle"])
@pytest.mark.parametrize("n", [0, 1, 9, 17])
def test_skip_to_is_like_drawing(prefixes: list[str], stop: Any, n: int) -> None:
    drawn = ending(prefixes, stop)
    drawn.take(3 + n)
    skipped = ending(prefixes, stop)
    skipped.take(3)
    skipped.skip_to(3 + n)
    assert skipped.state_dict() == drawn.state_dict()
    assert skipped.take(5).refs.tolist() == drawn.take(5).refs.tolist()


@pytest.mark.parametrize("kind", ["plain", "linear", "user"])
def test_skip_to_in_endless_blends(prefixes: list[str], kind: str) -> None:
    def make() -> Blend:
        if kind == "linear":
            return scheduled(prefixes, "linear", None)
        sources: list[Any] = [documents(p) for p in prefixes]
        if kind == "user":
            sources[0] = Mapper(sources[0], lambda s: s)
        return Blend(sources, [5, 2, 1])

    drawn, skipped = make(), make()
    drawn.take(5000)
    skipped.skip_to(5000)
    assert skipped.state_dict() == drawn.state_dict()
    with pytest.raises(ValueError, match="cannot go back from sample 5000 to 10"):
        skipped.skip_to(10)


@pytest.mark.parametrize("order", ["megatron", "instant"])
@pytest.mark.parametrize("at", [5000, 14_990, 15_000])
def test_skipping_far_through_sources_that_end(prefixes: list[str], order: Any, at: int) -> None:
    """Past what is looked through at once, and to where one of them has nothing left."""

    def make() -> Blend:
        return Blend([documents(p, num_epochs=e) for p, e in zip(prefixes, (500, 250, 1000), strict=True)], order=order)

    drawn, skipped = make(), make()
    drawn.take(at)
    skipped.skip_to(at)
    assert skipped.state_dict() == drawn.state_dict()
    assert skipped.take(4000).refs.tolist() == drawn.take(4000).refs.tolist()
    assert skipped.state_dict() == drawn.state_dict()


def test_users_sources_are_asked_for_no_more_than_is_drawn(prefixes: list[str]) -> None:
    """What is drawn in vain is lost; and each is asked for one sample after the other, in the order of the blend."""
    asked: list[int] = []

    def make() -> Blend:
        def noted(i: int) -> Any:
            return lambda sample: (asked.append(i), sample)[1]

        sources: list[Any] = [Mapper(documents(p, num_epochs=1), noted(i)) for i, p in enumerate(prefixes)]
        return Blend([*sources, documents(prefixes[1])], [3, 2, 1, 2])

    whole = make().take(1000).refs[:, 0].tolist()
    expected = [i for i in whole if i < 3]
    assert asked == expected
    asked.clear()
    skipped = make()
    skipped.skip_to(len(whole) - 3)
    assert asked == [i for i in whole[:-3] if i < 3]
    assert skipped.take(100).refs[:, 0].tolist() == whole[-3:]


def test_ctrl_c_while_it_searches_leaves_a_blend_where_it_was(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blend = scheduled(prefixes, "linear", None)
    blend.take(20)
    state = blend.state_dict()
    draw = PiecewiseLinearWeights.draw

    def interrupted(self: Any, begin: int, *arguments: Any) -> Any:
        if begin > 500_000:
            raise KeyboardInterrupt
        return draw(self, begin, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PiecewiseLinearWeights, "draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            blend.skip_to(2_000_000)
    assert blend.state_dict() == state
    whole = scheduled(prefixes, "linear", None)
    whole.take(20)
    assert blend.take(50).refs.tolist() == whole.take(50).refs.tolist()


def test_states_of_the_first_version_are_read(prefixes: list[str]) -> None:
    for make in (lambda: scheduled(prefixes, "linear", None), lambda: ending(prefixes, "cycle", "user")):
        blend = make()
        blend.take(31)
        again = make()
        again.reset(json.loads(json.dumps(version_1(blend))))
        assert again.state_dict() == blend.state_dict()
        assert again.take(40).refs.tolist() == blend.take(40).refs.tolist()
    with pytest.raises(StateMismatchError, match="Blend: the saved state has version 3, this library reads 2"):
        make().reset({**blend.state_dict(), "version": 3})


def test_the_state_of_a_thousand_sources_is_small_and_its_own(prefixes: list[str]) -> None:
    def make(first_seed: int = 0) -> Blend:
        sources: list[Any] = [documents(prefixes[i % 3], seed=first_seed + i // 900) for i in range(1000)]
        inner = Blend([documents(p) for p in prefixes])
        return Blend([*sources, Mapper(documents(prefixes[0]), lambda s: s), inner])

    blend = make()
    blend.take(3000)
    state = json.loads(json.dumps(blend.state_dict()))
    assert set(state["sources"]["own"]) == {"1000", "1001"}
    assert len(json.dumps(state)) < 50 * 1002
    again = make()
    again.reset(state)
    assert again.state_dict() == blend.state_dict()
    assert again.take(500).refs.tolist() == blend.take(500).refs.tolist()
    with pytest.raises(StateMismatchError, match="seed was 0 and is 1"):
        make(1).reset(state)
    # A checkpoint that is loaded in place must not change what the next state is made of.
    loaded = blend.state_dict()
    columns = loaded["sources"]["alike"]["keys"]["fingerprint"]["keys"]
    columns["seed"]["each"][0] = 99
    columns["max_seqlen"]["same"] = 7
    assert blend.state_dict()["sources"] != loaded["sources"]
    again.reset(blend.state_dict())


def test_skipping_reads_nothing_and_beyond_the_end_is_an_error(prefixes: list[str]) -> None:
    source = documents(prefixes[1], num_epochs=2)
    source.skip_to(39)
    assert len(source.take(5)) == 1
    with pytest.raises(ValueError, match="sample 41 is beyond the end; 0 samples are left after 40"):
        source.skip_to(41)
    with pytest.raises(ValueError, match="the blend ends at sample"):
        ending(prefixes, "first_exhausted").skip_to(100)
