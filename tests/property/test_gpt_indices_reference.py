"""The native index build against the plain NumPy one, and the native shuffle against ``RandomState``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron import _C
from tdp_megatron.datasets.gpt_indices import build_gpt_indices, epoch_plan

seeds = st.integers(0, 2**32 - 1)


def reference_indices(
    lengths: npt.NDArray[np.int32],
    indices: npt.NDArray[np.int32],
    seqlen: int,
    num_samples: int | None,
    seed: int,
    x: int,
) -> tuple[npt.NDArray[Any], list[tuple[int, int]], npt.NDArray[Any]]:
    tokens = int(lengths[indices].sum(dtype=np.int64))
    plan = epoch_plan(tokens, seqlen, num_samples, extra_token=x, drop_last=True)
    rng = np.random.RandomState(seed)
    epochs = plan.num_epochs
    parts = [epochs - 1, 1] if plan.separate_final_epoch else [epochs]
    document_index = np.concatenate([np.tile(indices, part) for part in parts])
    begin = 0
    for part in parts:
        rng.shuffle(document_index[begin : begin + part * len(indices)])
        begin += part * len(indices)
    # Token by token: the place of every token, then every seqlen-th of them. A sample begins in the document that holds
    # the token before its first one when x is 1.
    place = np.repeat(np.arange(len(document_index)), lengths[document_index])
    start = np.cumsum(lengths[document_index]) - lengths[document_index]
    rows = [(0, 0)]
    for i in range(1, plan.num_samples + 1):
        document = int(place[i * seqlen + x - 1])
        rows.append((document, int(i * seqlen - start[document])))
    shuffle_index = np.arange(plan.num_samples, dtype=np.uint32)
    boundary = plan.samples_before_final if plan.separate_final_epoch else plan.num_samples
    rng.shuffle(shuffle_index[:boundary])
    if plan.separate_final_epoch:
        rng.shuffle(shuffle_index[boundary:])
    return document_index, rows, shuffle_index


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.data(),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 200)),
    seeds,
    st.booleans(),
)
def test_indices_equal_the_plain_build(
    sizes: list[int], data: st.DataObject, seqlen: int, num_samples: int | None, seed: int, extra: bool
) -> None:
    lengths = np.array(sizes, dtype=np.int32)
    begin = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(begin + 1, len(sizes)))
    chosen = np.arange(begin, end, dtype=np.int32)
    keywords: dict[str, Any] = {
        "sequence_length": seqlen,
        "num_samples": num_samples,
        "random_seed": seed,
        "add_extra_token_to_sequence": extra,
    }
    if not lengths[chosen].sum():
        with pytest.raises(ValueError, match="no token"):
            build_gpt_indices(lengths, chosen, **keywords)
        return
    documents, rows, shuffle = reference_indices(lengths, chosen, seqlen, num_samples, seed, int(extra))
    for indices in (chosen, range(begin, end)):
        built = build_gpt_indices(lengths, indices, **keywords)
        np.testing.assert_array_equal(built.document_index, documents)
        if len(rows) > 1:
            np.testing.assert_array_equal(built.sample_index, np.array(rows))
        np.testing.assert_array_equal(built.shuffle_index, shuffle)
        assert (built.document_index.dtype, built.shuffle_index.dtype) == (np.int32, np.uint32)


# Around the powers of two the mask changes; around 256 the block of draws ends.
@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.integers(0, 5000), st.sampled_from([255, 256, 257, 258, 511, 512, 513, 1025, 65535, 65536, 65537, 131073])
    ),
    seeds,
    st.sampled_from([np.int32, np.uint32, np.int64]),
)
def test_shuffle_is_numpys(n: int, seed: int, dtype: type[np.integer[Any]]) -> None:
    expected = np.arange(n, dtype=dtype)
    values = expected.copy()
    theirs, ours = np.random.RandomState(seed), _C.LegacyRandom(seed)
    for _ in range(2):  # the second one starts in the middle of a block of the generator
        theirs.shuffle(expected)
        ours.shuffle(values)
        np.testing.assert_array_equal(values, expected)


@settings(deadline=None, max_examples=40)
@given(st.one_of(st.lists(seeds, min_size=1, max_size=9), st.integers(620, 630).map(lambda n: list(range(n)))))
def test_shuffle_with_a_key_is_numpys(key: list[int]) -> None:
    words = np.array(key, dtype=np.uint32)
    expected = np.arange(700)
    values = expected.copy()
    np.random.RandomState(words).shuffle(expected)
    _C.LegacyRandom(words).shuffle(values)
    np.testing.assert_array_equal(values, expected)


def test_a_shuffle_refuses_what_it_would_have_to_copy() -> None:
    rng = _C.LegacyRandom(1)
    for bad in (np.arange(10)[::2], np.arange(10.0), np.arange(10, dtype=np.int16), list(range(10))):
        with pytest.raises(TypeError):
            rng.shuffle(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dimension"):
        rng.shuffle(np.zeros((2, 3), dtype=np.int32))
    frozen = np.arange(10)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        rng.shuffle(frozen)
    with pytest.raises(ValueError, match="must not be empty"):
        _C.LegacyRandom(np.zeros(0, dtype=np.uint32))
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"\[0, 2\*\*32\)"):
            _C.LegacyRandom(seed)


def test_indices_take_a_range_of_step_one_only() -> None:
    with pytest.raises(ValueError, match="step 1"):
        build_gpt_indices(
            np.ones(9, dtype=np.int32), range(0, 9, 2), sequence_length=2, num_samples=None, random_seed=1
        )
