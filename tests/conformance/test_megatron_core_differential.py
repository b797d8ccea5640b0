"""Random inputs through megatron-core and through this package, in one process: everything must be equal.

2,000 examples; ``TDP_DIFFERENTIAL_EXAMPLES=50000`` for more.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tdp_megatron.datasets import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    Split,
    TokenizerSpec,
)
from tdp_megatron.datasets.blended import exhaustive_blend, sized_blend
from tdp_megatron.indexed import IndexedDatasetBuilder

EXAMPLES = int(os.environ.get("TDP_DIFFERENTIAL_EXAMPLES", "2000"))


def examples(share: float) -> Any:
    return settings(
        max_examples=max(1, int(share * EXAMPLES)),
        deadline=None,
        database=None,
        # The same examples in every run of the default size, others in long runs.
        derandomize="TDP_DIFFERENTIAL_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


class LowLevel:
    """Sequences in memory with what both packages ask of an indexed dataset."""

    path_prefix = "in/memory"
    dtype = np.dtype(np.int32)

    def __init__(self, lengths: list[int], vocabulary: int, seed: int) -> None:
        self.sequence_lengths = np.array(lengths, dtype=np.int32)
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        self.sequence_pointers = (ends - self.sequence_lengths) * 4
        small = int(ends[-1]) < 1 << 20
        self.tokens = np.random.default_rng(seed).integers(0, vocabulary, int(ends[-1]) if small else 0, dtype=np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        begin = int(self.sequence_pointers[idx]) // 4 + offset
        return self.tokens[begin : begin + (int(self.sequence_lengths[idx]) - offset if length is None else length)]

    def read_pieces(self, byte_offsets: Any, counts: Any) -> Any:
        parts = [self.tokens[b // 4 : b // 4 + n] for b, n in zip(byte_offsets.tolist(), counts.tolist(), strict=True)]
        return np.concatenate(parts)


def config_pair(megatron: SimpleNamespace, tokenizer: Any, **fields: Any) -> tuple[Any, Any]:
    common = {
        "blend": (["in/memory"], None),
        "split": "1,1,1",
        "tokenizer": tokenizer,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        **fields,
    }
    theirs = megatron.GPTDatasetConfig(**common)
    ours = GPTDatasetConfig(**common, pad_masking="megatron")
    # Neither keeps a cache for mock data.
    theirs.mock = ours.mock = True
    return theirs, ours


lengths_strategy = st.one_of(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=60),
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=120),
    st.lists(st.integers(0, 400), min_size=1, max_size=8),
)


@given(
    lengths=lengths_strategy,
    sequence_length=st.integers(1, 40),
    num_samples=st.one_of(st.none(), st.integers(0, 3), st.integers(4, 300)),
    seed=st.integers(0, 2**32 - 1),
    extra=st.booleans(),
    drop_last=st.booleans(),
    split=st.sampled_from(list(Split)),
    part=st.tuples(st.integers(0, 60), st.integers(1, 120)),
    flags=st.tuples(*[st.booleans()] * 4),
    pad=st.sampled_from([None, 0, 1, 7]),
    allow=st.booleans(),
    reads=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
)
@examples(1.0)
def test_gpt_datasets(
    megatron: SimpleNamespace,
    lengths: list[int],
    sequence_length: int,
    num_samples: int | None,
    seed: int,
    extra: bool,
    drop_last: bool,
    split: Split,
    part: tuple[int, int],
    flags: tuple[bool, bool, bool, bool],
    pad: int | None,
    allow: bool,
    reads: list[int],
) -> None:
    tokenizer = TokenizerSpec(eod=0, vocab_size=8, pad=pad, special_tokens_dict={"bos_token": 7} if allow else {})
    if pad is None:
        tokenizer = WithoutPad(tokenizer)  # type: ignore[assignment]
    theirs, ours = config_pair(
        megatron,
        tokenizer,
        random_seed=seed,
        sequence_length=sequence_length,
        add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=drop_last,
        allow_ambiguous_pad_tokens=allow,
        reset_position_ids=flags[0],
        reset_attention_mask=flags[1],
        eod_mask_loss=flags[2],
        create_attention_mask=flags[3],
    )
    low_level = LowLevel(lengths, 8, seed)
    begin = min(part[0], len(lengths) - 1)
    indices = np.arange(begin, min(begin + part[1], len(lengths)), dtype=np.int32)
    arguments = (low_level, "in/memory", indices, num_samples)
    if not low_level.sequence_lengths[indices].sum():
        with pytest.raises(ValueError, match="no token"):  # megatron-core does not come back from this
            GPTDataset(*arguments, split, ours)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = megatron.GPTDataset(*arguments, megatron.Split[split.name], theirs)
        except AssertionError:
            expected = None
    found = GPTDataset(*arguments, split, ours)
    if expected is None:
        assert_padded_at_an_empty_document(found)
        return
    assert found.unique_description == expected.unique_description
    assert found.unique_description_hash == expected.unique_description_hash
    assert found._pad_token_id == expected._pad_token_id
    assert len(found) == len(expected)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    if len(found):
        for idx in [*(read % len(found) for read in reads), len(found) - 1, None]:
            ours_sample, their_sample = found[idx], expected[idx]
            assert set(ours_sample) == set(their_sample)
            for field, value in their_sample.items():
                assert ours_sample[field].dtype == value.dtype, field
                assert torch.equal(ours_sample[field], value), (idx, field)


def assert_padded_at_an_empty_document(found: GPTDataset) -> None:
    """megatron-core refuses a partial last sample where the last document is empty; here it is padded like others."""
    config = found.config
    assert found.index_split is Split.valid
    assert not config.drop_last_partial_validation_sequence
    assert config.add_extra_token_to_sequence
    low_level = found.dataset
    assert low_level.sequence_lengths[found.document_index[-1]] == 0
    stream = np.concatenate([low_level.get(int(document)) for document in found.document_index])
    size = config.sequence_length
    assert len(found) == -(-(len(stream) - 1) // size)
    for idx in range(len(found)):
        row = int(found.shuffle_index[idx])
        text, _, _ = found._query(idx)
        np.testing.assert_array_equal(text, stream[row * size : row * size + size + 1])


class WithoutPad:
    """A tokenizer that raises for its pad id."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.eod, self.vocab_size, self.unique_identifiers = spec.eod, spec.vocab_size, spec.unique_identifiers
        self.special_tokens_dict = dict(spec.special_tokens_dict)

    @property
    def pad(self) -> int:
        raise NotImplementedError


@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 2), st.integers(2**31 - 5, 2**31 - 1), st.integers(10**7, 10**9)),
        min_size=1,
        max_size=6,
    ),
    sequence_length=st.integers(10**7, 2**31 - 2),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    seed=st.integers(0, 2**32 - 1),
    extra=st.booleans(),
)
@examples(0.1)
def test_giant_sequences(
    megatron: SimpleNamespace,
    lengths: list[int],
    sequence_length: int,
    num_samples: int | None,
    seed: int,
    extra: bool,
) -> None:
    lengths = [*lengths, 10**8]
    theirs, ours = config_pair(
        megatron,
        WithoutPad(TokenizerSpec.null(8)),
        random_seed=seed,
        sequence_length=sequence_length,
        add_extra_token_to_sequence=extra,
    )
    low_level = LowLevel(lengths, 8, 0)
    arguments = (low_level, "in/memory", np.arange(len(lengths), dtype=np.int32), num_samples)
    expected = megatron.GPTDataset(*arguments, megatron.Split.train, theirs)
    found = GPTDataset(*arguments, Split.train, ours)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_the_longest_sequence_length(megatron: SimpleNamespace) -> None:
    """With the extra token a sample has 2^31 tokens, which megatron-core counts in int32."""
    size = 2**31 - 1
    theirs, ours = config_pair(megatron, WithoutPad(TokenizerSpec.null(8)), random_seed=0, sequence_length=size)
    arguments = (LowLevel([0, size - 4, 0, 10**8], 8, 0), "in/memory", np.arange(4, dtype=np.int32), None)
    with pytest.raises(AssertionError):
        megatron.GPTDataset(*arguments, megatron.Split.train, theirs)
    found = GPTDataset(*arguments, Split.train, ours)
    place, offset = found.sample_index[1].tolist()
    before = found.dataset.sequence_lengths[found.document_index[:place]]
    assert len(found) == 1
    assert int(before.sum(dtype=np.int64)) + offset == size


weights_strategy = st.one_of(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40),
    st.lists(st.integers(1, 5).map(float), min_size=1, max_size=12),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-9]), min_size=1, max_size=20),
)


@given(weights=weights_strategy, size=st.one_of(st.integers(0, 5), st.integers(6, 2000)))
@examples(0.5)
def test_sized_blends(megatron: SimpleNamespace, weights: list[float], size: int) -> None:
    normalised = megatron.utils.normalize(megatron.utils.normalize(weights))
    expected = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    megatron.helpers.build_blending_indices(*expected, normalised, len(weights), size, False)
    found = sized_blend(normalised, size)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@given(sizes=st.lists(st.one_of(st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=15))
@examples(0.25)
def test_exhaustive_blends(megatron: SimpleNamespace, sizes: list[int]) -> None:
    expected = np.zeros(sum(sizes), dtype=np.int16), np.zeros(sum(sizes), dtype=np.int64)
    megatron.helpers.build_exhaustive_blending_indices(*expected, sizes, len(sizes))
    found = exhaustive_blend(sizes)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def write(prefix: Path, lengths: list[int], seed: int) -> str:
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in lengths:
        builder.add_document(rng.integers(0, 8, length, dtype=np.int32), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def files(folder: Path) -> dict[str, bytes]:
    names = (p for p in folder.iterdir() if not p.name.endswith("manifest.json"))
    return {p.name: p.read_bytes() for p in names}


@given(
    corpora=st.lists(st.lists(st.integers(0, 60), min_size=6, max_size=30), min_size=1, max_size=4),
    weights=st.one_of(st.none(), st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)),
    sizes=st.one_of(st.just([None, None, None]), st.lists(st.integers(0, 150), min_size=3, max_size=3)),
    split=st.sampled_from(["1,1,1", "60,25,15", "100,0,0", "50,50,0", "0,1,1", None]),
    seed=st.integers(0, 2**32 - 1),
    sequence_length=st.integers(2, 30),
    extra=st.booleans(),
    surplus=st.sampled_from([0.0, 0.005, 0.5]),
    threads=st.integers(1, 3),
)
@examples(0.05)
def test_builders_with_files_and_caches(
    megatron: SimpleNamespace,
    tmp_path_factory: pytest.TempPathFactory,
    corpora: list[list[int]],
    weights: list[float] | None,
    sizes: list[int | None],
    split: str | None,
    seed: int,
    sequence_length: int,
    extra: bool,
    surplus: float,
    threads: int,
) -> None:
    root = tmp_path_factory.mktemp("blend")
    # Between any two there is one of seven tokens, so that no split is empty: those are tested apart.
    corpora = [[n for n in lengths for n in (n, 7)] for lengths in corpora]
    prefixes = [write(root / f"c{i}", lengths, i) for i, lengths in enumerate(corpora)]
    if weights is not None:
        weights = weights[: len(prefixes)]
        sizes = [size or 5 for size in sizes]
    blend = (prefixes, weights)
    where = {"blend": blend, "split": split} if split else {"blend_per_split": [blend, blend, None]}
    fields: dict[str, Any] = {
        **where,
        "random_seed": seed,
        "sequence_length": sequence_length,
        "add_extra_token_to_sequence": extra,
        "mid_level_dataset_surplus": surplus,
        "num_dataset_builder_threads": threads,
        "tokenizer": TokenizerSpec.null(8),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    their_error: Exception | None = None
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # It asks for the rank even where torch.distributed is not initialised.
        patch.setattr(torch.distributed, "get_rank", lambda *_: 0)
        config = megatron.GPTDatasetConfig(**fields, path_to_cache=str(root / "theirs"))
        try:
            theirs = megatron.BlendedMegatronDatasetBuilder(megatron.GPTDataset, sizes, lambda: True, config).build()
        except (AssertionError, IndexError) as error:
            their_error = error
    config = GPTDatasetConfig(**fields, path_to_cache=str(root / "ours"))
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    if isinstance(their_error, IndexError):
        with pytest.raises(ValueError, match="mid_level_dataset_surplus"):
            builder.build()
        return
    if their_error is not None:  # a dataset without a sample: its weight is 0, which only megatron-core refuses
        assert weights is None
        return
    ours = builder.build()
    assert files(root / "ours") == files(root / "theirs")
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
            continue
        assert type(mine).__name__ == type(other).__name__
        assert len(mine) == len(other)
        assert mine.unique_description_hash == other.unique_description_hash
        if not len(mine):
            continue
        for idx in (0, len(mine) // 2, len(mine) - 1):
            first, second = mine[idx], other[idx]
            assert set(first) == set(second)
            for field, value in second.items():
                assert bool(np.array_equal(first[field], value)), field


@pytest.mark.parametrize("ours_first", [True, False])
def test_caches_go_both_ways(megatron: SimpleNamespace, tmp_path: Path, ours_first: bool) -> None:
    """Whoever comes second uses the files of the first, and changes none of them."""
    prefixes = [write(tmp_path / f"c{i}", [5 * i + j % 13 for j in range(40)], i) for i in range(3)]
    fields: dict[str, Any] = {
        "blend": (prefixes, [0.2, 0.3, 0.5]),
        "split": "60,30,10",
        "random_seed": 7,
        "sequence_length": 16,
        "tokenizer": TokenizerSpec.null(8),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": str(tmp_path / "cache"),
    }

    def build_ours() -> list[Any]:
        config = GPTDatasetConfig(**fields)
        return BlendedMegatronDatasetBuilder(GPTDataset, [90, 20, 5], lambda: True, config).build()

    def build_theirs() -> list[Any]:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(torch.distributed, "get_rank", lambda *_: 0)
            config = megatron.GPTDatasetConfig(**fields)
            return megatron.BlendedMegatronDatasetBuilder(
                megatron.GPTDataset, [90, 20, 5], lambda: True, config
            ).build()

    def stamps() -> dict[str, tuple[int, int]]:
        found = {}
        for path in (tmp_path / "cache").iterdir():
            if not path.name.endswith("manifest.json"):
                found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
        return found

    first = build_ours() if ours_first else build_theirs()
    before = stamps()
    with pytest.MonkeyPatch.context() as patch:
        if ours_first:
            patch.setattr(megatron.helpers, "build_sample_idx", refuse)
            patch.setattr(megatron.helpers, "build_blending_indices", refuse)
            second = build_theirs()
        else:
            patch.setattr(GPTDataset, "_build", refuse)
            patch.setattr(BlendedDataset, "_build", refuse)
            second = build_ours()
    assert stamps() == before
    assert len(before) == 3 * (3 * 4 + 3)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        assert not other.dataset_index.flags.owndata  # a map of the file
        for idx in range(len(one)):
            for field, value in one[idx].items():
                assert bool(np.array_equal(value, other[idx][field])), field


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the cache of the first was not used")


def test_float32_rounding_of_the_last_partial_sample(megatron: SimpleNamespace) -> None:
    """A deliberate difference: 16,777,218 tokens are 4,097 samples of 4,096, float32 makes them 4,096."""
    theirs, ours = config_pair(
        megatron,
        WithoutPad(TokenizerSpec.null(8)),
        random_seed=1,
        sequence_length=4096,
        drop_last_partial_validation_sequence=False,
    )
    low_level = LowLevel([16_777_218], 8, 0)
    arguments = (low_level, "in/memory", np.arange(1, dtype=np.int32), None)
    assert len(megatron.GPTDataset(*arguments, megatron.Split.valid, theirs)) == 4096
    assert len(GPTDataset(*arguments, Split.valid, ours)) == 4097 == math.ceil((16_777_218 - 1) / 4096)
