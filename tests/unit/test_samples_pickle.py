"""Samples go through pickle and copies, as worker processes want it, whatever reads them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.nodes import GPTSample, IndexedRead
from tdp_megatron.samples import block_from_items, with_values
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import Sample


def of_a_user(folder: Path) -> Sample:
    items = [{"tokens": torch.arange(4 + i), "advantage": torch.rand(4 + i), "name": f"s{i}"} for i in range(3)]
    block = block_from_items(items, 0, 0)
    block.readers[0].declare_token_keys(["advantage"])  # type: ignore[attr-defined]
    return block[1]


def of_a_file(folder: Path) -> Sample:
    prefix = write_corpus(folder / "d", [np.arange(50)])
    return GPTSample(IndexedRead(prefix), sequence_length=8, num_samples=5).take(3)[2]


def changed(folder: Path) -> Sample:
    return with_values(of_a_file(folder), name="x", advantage=torch.ones(8, 2))


@pytest.mark.parametrize("make", [of_a_user, of_a_file, changed])
@pytest.mark.parametrize("again", [lambda sample: pickle.loads(pickle.dumps(sample)), copy.deepcopy])
def test_copies_read_the_same(
    make: Callable[[Path], Sample], again: Callable[[Sample], Sample], tmp_path: Path
) -> None:
    sample = make(tmp_path)
    found = again(sample)
    assert (found.ref, found.seqlen, found.num_loss_tokens) == (sample.ref, sample.seqlen, sample.num_loss_tokens)
    assert found.keys() == sample.keys()
    for key, value in sample.items():
        other: Any = found[key]
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
    assert dict(found.reader.token_keys) == dict(sample.reader.token_keys)


def test_messages_of_a_copy_name_the_sample() -> None:
    block = block_from_items([{"tokens": torch.arange(3)}], 2, 7)
    reader = pickle.loads(pickle.dumps(block.readers[0]))
    with pytest.raises(ValueError, match="sample 7 of source 2 has no key 'advantage'"):
        reader.declare_token_keys(["advantage"])
