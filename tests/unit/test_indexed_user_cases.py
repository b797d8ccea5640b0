"""Files that went wrong for users of Megatron-LM and its relatives, with the numbers they reported."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder
from tdp_megatron.indexed.header import HEADER_SIZE
from tdp_megatron.testing import write_corpus


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """5 documents of 10 int32 tokens."""
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.int32) as builder:
        builder.add_documents(np.arange(50).reshape(5, 10))
        builder.finalize(tmp_path / "x.idx")
    return tmp_path / "x"


def patch(prefix: Path, offset: int, content: bytes) -> None:
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    data[offset : offset + len(content)] = content
    prefix.with_suffix(".idx").write_bytes(data)


def test_tokens_that_uint16_cannot_hold(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
        builder.add_documents([[5]])
        with pytest.raises(ValueError, match="document 1: token id 70000 at position 1 does not fit uint16"):
            builder.add_documents([[1, 70000, 65536]])
        builder.finalize(tmp_path / "x.idx")
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "x")] == [[5]]


def test_data_cut_to_100_bytes(prefix: Path) -> None:
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(FormatError, match="bin has 100 bytes, index needs 200"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("byte", range(8))
def test_one_byte_of_a_pointer_flipped(prefix: Path, byte: int) -> None:
    offset = HEADER_SIZE + 5 * 4 + 2 * 8 + byte
    flipped = prefix.with_suffix(".idx").read_bytes()[offset] ^ 0xFF
    patch(prefix, offset, bytes([flipped]))
    with pytest.raises(FormatError, match="pointers must be the prefix sum of the lengths; sequence 2"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("code", [1, 2, 3, 5, 6, 8])
def test_dtype_of_another_width(prefix: Path, code: int) -> None:
    patch(prefix, 17, bytes([code]))
    with pytest.raises(FormatError):
        IndexedDataset(prefix)


@pytest.mark.parametrize("count", [2**62, 2**63, 2**64 - 1, 2**31, 7])
@pytest.mark.parametrize("offset", [18, 26])
def test_counts_beyond_the_file_allocate_nothing(prefix: Path, count: int, offset: int) -> None:
    patch(prefix, offset, struct.pack("<Q", count))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"byte 18: .*{count}"):
            IndexedDataset(prefix)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("chunk_size", [1, 2, 1000])
def test_lengths_count_the_end_of_document(tmp_path: Path, dtype: type, chunk_size: int) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", dtype) as builder:
        builder.add_documents([[1, 2, 3], [4], []], eod_token=9, chunk_size=chunk_size)
        builder.finalize(tmp_path / "x.idx")
    dataset = IndexedDataset(tmp_path / "x")
    assert [sequence.tolist() for sequence in dataset] == [[1, 2, 3, 9], [4, 9], [9]]
    assert dataset.sequence_lengths.sum() * np.dtype(dtype).itemsize == os.path.getsize(tmp_path / "x.bin")


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    def peak(documents: int) -> int:
        tokens, ones = np.arange(50_000, dtype=np.uint16), np.ones(50_000, dtype=np.int64)
        tracemalloc.start()
        try:
            with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
                for _ in range(documents // 50_000):
                    builder.add_sequences(tokens, ones, ones)
                builder.finalize(tmp_path / "x.idx")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(2_000_000), peak(8_000_000)
    assert len(IndexedDataset(tmp_path / "x")) == 8_000_000
    assert large < 1.25 * small < 64 << 20


@pytest.mark.parametrize("document", [[1, 70000, 65536], np.array([1, 70000]), np.array([-1])], ids=str)
def test_the_test_helper_wraps_no_ids_either(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ValueError, match="uint16"):
        write_corpus(tmp_path / "d", [[1], document])
    assert list(tmp_path.iterdir()) == []
    prefix = write_corpus(tmp_path / "d", [[], np.zeros(0), [70000]], dtype=np.int32)
    assert [sequence.tolist() for sequence in IndexedDataset(prefix)] == [[], [], [70000]]
