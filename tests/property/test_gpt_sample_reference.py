"""The native pass over a whole sample against the plain assembly, on random files and settings."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tdp_megatron.datasets import GPTDataset, GPTDatasetConfig, Split, TokenizerSpec
from tdp_megatron.datasets.gpt_sample import assemble
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    dtype=st.sampled_from([np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64]),
    sequence_length=st.integers(1, 25),
    extra=st.booleans(),
    eod_mask_loss=st.booleans(),
    reset_position_ids=st.booleans(),
    attention_mask=st.booleans(),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    drop_last=st.booleans(),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_native_and_plain_samples_are_equal(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dtype: Any,
    sequence_length: int,
    extra: bool,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    attention_mask: bool,
    num_samples: int | None,
    drop_last: bool,
) -> None:
    lengths = [*lengths, 40]
    path = tmp_path_factory.mktemp("sample") / "data"
    rng = np.random.default_rng(len(lengths))
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
    for length in lengths:
        builder.add_document(rng.integers(0, 5, length).astype(dtype), [length])
    builder.finalize(f"{path}.idx")
    config = GPTDatasetConfig(
        random_seed=2,
        sequence_length=sequence_length,
        blend=(["x"], None),
        split="0,1,0",
        path_to_cache="",
        tokenizer=TokenizerSpec(eod=3, pad=2),
        reset_position_ids=reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=attention_mask,
        add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=drop_last,
    )
    low_level = IndexedDataset(path)
    dataset = GPTDataset(low_level, "x", range(len(low_level)), num_samples, Split.valid, config)
    native = 0
    for idx in range(len(dataset)):
        native += dataset._read_plain(idx) is not None
        tokens, counts, _ = dataset._query(idx)
        expected = assemble(tokens, counts, dataset._rules, None)
        found = dataset[idx]
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name].dtype == torch.from_numpy(value).dtype, name
            np.testing.assert_array_equal(found[name].numpy(), value, err_msg=f"{idx} {name}")
    assert native == max(len(dataset) - 1, 0)
