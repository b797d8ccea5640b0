"""Pages asked for ahead of reads, and reads of very many files: the same batches, and not many files open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tdp_megatron import _C
from tdp_megatron.indexed.pool import OPEN_FILES
from tdp_megatron.nodes import Batch, Blend, DocumentSample, GPTSample, IndexedRead
from tdp_megatron.reading import READERS_AT_ONCE, read_block
from tdp_megatron.testing import write_corpus

S = 48


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(3)
    return write_corpus(
        tmp_path_factory.mktemp("ahead") / "corpus", [rng.integers(0, 60000, n) for n in rng.integers(0, 90, 400)]
    )


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    yield
    _C.set_read_ahead("slow")


def batches(prefix: str) -> list[dict[str, torch.Tensor]]:
    # Several ranks, so that the next read is not that of the next samples.
    found = list(Batch(GPTSample(IndexedRead(prefix), sequence_length=S), micro_batch_size=3, dp_rank=1, dp_size=2))
    documents = DocumentSample(IndexedRead(prefix), max_seqlen=30)
    return [*found, *Batch(documents, micro_batch_size=3, sequence_length=30)]


@pytest.mark.parametrize("when", ["always", "never", "slow"])
def test_asking_changes_nothing(prefix: str, when: str) -> None:
    expected = batches(prefix)
    descriptor = os.open(f"{prefix}.bin", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    _C.set_read_ahead(when)
    found = batches(prefix)
    assert len(found) == len(expected) > 60
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_another_mode() -> None:
    with pytest.raises(ValueError, match="must be 'slow', 'never' or 'always', got 'often'"):
        _C.set_read_ahead("often")


def test_a_read_of_very_many_files(tmp_path: Path) -> None:
    # More than may be open, more than one call reads; one of them is not mapped.
    count = 2 * READERS_AT_ONCE + 40
    sources = []
    for i in range(count):
        write_corpus(tmp_path / f"{i}", [np.arange(i, i + S + 1)])
        sources.append(GPTSample(IndexedRead(tmp_path / f"{i}", mmap=i != 50), sequence_length=S, num_samples=1))
    blend = Blend(sources, [1.0] * count)
    block = blend.take(count)
    flat = read_block(block)
    for row, begin in zip(flat.joined("tokens").reshape(count, S), block.refs[:, 0].tolist(), strict=True):
        np.testing.assert_array_equal(row, np.arange(begin, begin + S))
    assert sorted(block.refs[:, 0].tolist()) == list(range(count))
    assert len(OPEN_FILES) <= 64

    whole = next(Batch(Blend(sources, [1.0] * count), micro_batch_size=count))
    np.testing.assert_array_equal(whole["tokens"].reshape(-1), flat.joined("tokens"))


def test_a_reader_that_is_gone_leaves_nothing_open(prefix: str) -> None:
    node = Batch(GPTSample(IndexedRead(prefix), sequence_length=S), micro_batch_size=2)
    next(node)
    with_reader = len(OPEN_FILES)
    del node
    assert len(OPEN_FILES) < with_reader
