"""Files that are not what they should be are refused, with the place and the reason."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder
from tdp_megatron.indexed.header import HEADER_SIZE, MAGIC

DOCUMENTS = [[list(range(10))], [[1, 2], [3]], [], [[7] * 5]]
LENGTHS = [10, 2, 1, 5]
POINTERS_AT = HEADER_SIZE + 4 * len(LENGTHS)
DOCUMENTS_AT = POINTERS_AT + 8 * len(LENGTHS)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        for document in DOCUMENTS:
            for sequence in document:
                builder.add_item(sequence)
            builder.end_document()
        builder.finalize(tmp_path / "x.idx")
    return tmp_path / "x"


def idx(prefix: Path) -> Path:
    return prefix.with_suffix(".idx")


def patch(prefix: Path, offset: int, layout: str, *values: int) -> None:
    data = bytearray(idx(prefix).read_bytes())
    struct.pack_into(layout, data, offset, *values)
    idx(prefix).write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (9, "<Q", 2, "byte 9: expected version 1, found 2"),
        (17, "<B", 0, "byte 17: dtype code 0 is unknown"),
        (17, "<B", 9, "byte 17: dtype code 9 is unknown"),
        (17, "<B", 8, "should start at byte 20, found 40"),
        (18, "<Q", 5, "byte 18: 5 sequences and 5 document indices need 134 bytes, the file has 122"),
        (18, "<Q", 2**62, "byte 18: 4611686018427387904 sequences"),
        (18, "<Q", 2**64 - 1, "byte 18: 18446744073709551615 sequences"),
        (26, "<Q", 0, "byte 18: 4 sequences and 0 document indices need 82 bytes"),
        (26, "<Q", 2**61, "byte 18: 4 sequences and 2305843009213693952 document"),
        (HEADER_SIZE + 4, "<i", -2, "byte 38: length of sequence 1 is negative: -2"),
        (HEADER_SIZE + 4, "<i", 3, "sequence 2 should start at byte 52, found 48"),
        (HEADER_SIZE + 12, "<i", 6, "bin has 72 bytes, index needs 76"),
        (HEADER_SIZE + 12, "<i", 2**31 - 1, "bin has 72 bytes, index needs"),
        (POINTERS_AT, "<q", 4, f"byte {POINTERS_AT}: pointers must be the prefix sum"),
        (POINTERS_AT + 16, "<q", 49, "sequence 2 should start at byte 48, found 49"),
        (POINTERS_AT + 16, "<q", -(2**63), "sequence 2 should start at byte 48"),
        (DOCUMENTS_AT, "<q", 1, f"byte {DOCUMENTS_AT}: document_indices\\[0\\] must be 0, found 1"),
        (DOCUMENTS_AT + 8, "<q", 4, "must not decrease, but \\[2\\] is 3 after 4"),
        (DOCUMENTS_AT + 8, "<q", -1, "must not decrease, but \\[1\\] is -1 after 0"),
        (DOCUMENTS_AT + 32, "<q", 5, "must be the number of sequences 4, found 5"),
    ],
)
def test_wrong_field(prefix: Path, offset: int, layout: str, value: int, message: str) -> None:
    patch(prefix, offset, layout, value)
    for mmap in (True, False):
        with pytest.raises(FormatError, match=message):
            IndexedDataset(prefix, mmap=mmap)


def test_wrong_chunk_far_into_a_large_index(tmp_path: Path) -> None:
    n = 200_000
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint8) as builder:
        builder.add_sequences(np.ones(n, dtype=np.uint8), np.ones(n), np.ones(n))
        builder.finalize(tmp_path / "x.idx")
    good = (tmp_path / "x.idx").read_bytes()
    for k in (65_535, 65_536, 65_537, 131_072, n - 1):
        patch(tmp_path / "x", HEADER_SIZE + 4 * n + 8 * k, "<q", 7)
        with pytest.raises(FormatError, match=f"sequence {k} should start at byte {k}, found 7"):
            IndexedDataset(tmp_path / "x")
        (tmp_path / "x.idx").write_bytes(good)
        patch(tmp_path / "x", HEADER_SIZE + 12 * n + 8 * k, "<q", -1)
        with pytest.raises(FormatError, match=rf"must not decrease, but \[{k}\] is -1"):
            IndexedDataset(tmp_path / "x")
        (tmp_path / "x.idx").write_bytes(good)
    assert len(IndexedDataset(tmp_path / "x")) == n


@pytest.mark.parametrize("size", [0, 1, 35, 71, 73, 144])
def test_bin_of_another_size(prefix: Path, size: int) -> None:
    content = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes((content + b"\0" * size)[:size])
    with pytest.raises(FormatError, match=f"bin has {size} bytes, index needs 72"):
        IndexedDataset(prefix)


def outcome(prefix: Path) -> Any:
    """The tokens of every sequence, or None where opening is refused."""
    try:
        dataset = IndexedDataset(prefix)
    except FormatError:
        return None
    return dataset.dtype, [sequence.tolist() for sequence in dataset]


def test_truncation_at_every_byte(prefix: Path) -> None:
    content = idx(prefix).read_bytes()
    for size in range(len(content)):
        idx(prefix).write_bytes(content[:size])
        assert outcome(prefix) is None, size


def test_every_bit_flip(prefix: Path) -> None:
    content = idx(prefix).read_bytes()
    good = outcome(prefix)
    assert good is not None
    undetected = set()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        idx(prefix).write_bytes(flipped)
        found = outcome(prefix)
        assert found in (None, good), f"bit {bit} of byte {bit // 8} gives other tokens"
        if found is not None:
            undetected.add(bit // 8)
    # The format cannot tell where one document ends if the order stays possible; everything else is noticed.
    assert undetected <= set(range(DOCUMENTS_AT + 8, DOCUMENTS_AT + 32))


@pytest.mark.parametrize(
    ("content", "looks_like"),
    [
        (b"", "an empty file"),
        (gzip.compress(b"x", mtime=0), "a gzip file"),
        (b"\x28\xb5\x2f\xfd" + b"\1" * 60, "a zstd file"),
        (b"TNTIDX\0\0" + b"\1" * 60, "fairseq"),
        (b"\x93NUMPY\1\0" + b"v" * 60, "NumPy .npy"),
        (b"PK\3\4" + b"\0" * 60, "a zip archive"),
        (pickle.dumps([1, 2, 3]), "a Python pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b'{"text": "a"}\n', "JSON text"),
        (b"\n [1, 2]", "JSON text"),
        (b"once upon a time", "plain text"),
        (b"\0" * 100, "zero bytes"),
        (struct.pack("<ii", 3, 1) + struct.pack("<3q", 0, 8, 16), "another layout: int32 count 3, int32 dimension 1"),
        (struct.pack("<ii", 3, 1) + struct.pack("<4i", 0, 8, 16, 20), "4 offsets of 4 bytes"),
        (bytes(range(200, 240)), "an unknown layout: first bytes c8 c9"),
        (b"\xff", "an unknown layout"),
    ],
)
def test_file_of_another_layout(prefix: Path, content: bytes, looks_like: str) -> None:
    idx(prefix).write_bytes(content)
    with pytest.raises(FormatError, match="byte 0: expected the magic") as caught:
        IndexedDataset(prefix)
    assert looks_like in str(caught.value)
    assert str(idx(prefix)) in str(caught.value)


@pytest.mark.parametrize("size", [1, 8, 9, 20, 33])
def test_file_that_ends_in_its_header(prefix: Path, size: int) -> None:
    idx(prefix).write_bytes((MAGIC + struct.pack("<QBQQ", 1, 4, 0, 1))[:size])
    with pytest.raises(FormatError, match=f"ends inside the header: {size} bytes"):
        IndexedDataset(prefix)


def test_modes_against_the_flag(prefix: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has no mode per sequence; open it with multimodal=False"):
        IndexedDataset(prefix, multimodal=True)
    with IndexedDatasetBuilder(tmp_path / "m.bin", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [1, 2], [0, -1])
        builder.finalize(tmp_path / "m.idx")
    with pytest.raises(FormatError, match="has a mode per sequence; open it with multimodal=True"):
        IndexedDataset(tmp_path / "m")
    dataset = IndexedDataset(tmp_path / "m", multimodal=True)
    assert [(tokens.tolist(), int(mode)) for tokens, mode in dataset] == [([1], 0), ([2, 3], -1)]
    sequences, modes = dataset[:]
    assert ([s.tolist() for s in sequences], modes.tolist()) == ([[1], [2, 3]], [0, -1])


@pytest.mark.parametrize(
    ("remove", "named", "message"),
    [
        ((".idx",), "x", "x.idx does not exist .*only .*x.bin is there"),
        ((".bin",), "x", "x.bin does not exist .*only .*x.idx is there"),
        ((".bin", ".idx"), "x", "x.idx does not exist .*nor its partner"),
        ((), "x.bin", "path_prefix is given without .bin"),
        ((), "x.idx", "path_prefix is given without .idx"),
    ],
)
def test_missing_file(prefix: Path, remove: tuple[str, ...], named: str, message: str) -> None:
    for suffix in remove:
        prefix.with_suffix(suffix).unlink()
    assert IndexedDataset.exists(prefix) == (not remove)
    with pytest.raises(FileNotFoundError, match=message):
        IndexedDataset(prefix.parent / named)


def test_huge_sparse_file_is_opened(tmp_path: Path) -> None:
    lengths = np.array([(1 << 31) - 100, 123], dtype=np.int32)
    pointers = np.array([0, 8589934192])
    content = MAGIC + struct.pack("<QBQQ", 1, 4, 2, 3) + lengths.tobytes() + pointers.tobytes()
    (tmp_path / "x.idx").write_bytes(content + np.array([0, 1, 2]).tobytes())
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(8589934192 + 4 * 123)
        file.seek(8589934192 + 4 * 100)
        file.write(struct.pack("<i", 77))
    for mmap in (True, False):
        dataset = IndexedDataset(tmp_path / "x", mmap=mmap)
        assert dataset.num_tokens == (1 << 31) + 23
        assert dataset.get(1, 100, 2).tolist() == [77, 0]


def test_header_facts_in_json(prefix: Path) -> None:
    fingerprint = IndexedDataset(prefix).fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert {k: fingerprint[k] for k in ("sequences", "documents", "tokens", "dtype")} == {
        "sequences": 4,
        "documents": 4,
        "tokens": 18,
        "dtype": "int32",
    }


@pytest.mark.parametrize("change", ["length", "count", "dtype", "documents"])
def test_fingerprint_tells_data_apart(change: str, tmp_path: Path) -> None:
    variants: dict[str, tuple[list[list[int]], type]] = {
        "base": ([[1, 2], [3]], np.int32),
        "length": ([[1], [2, 3]], np.int32),
        "count": ([[1, 2], [3], [4]], np.int32),
        "dtype": ([[1, 2], [3]], np.uint16),
    }
    prints: list[dict[str, int | str]] = []
    for name in ("base", change):
        documents, dtype = variants.get(name, variants["base"])
        with IndexedDatasetBuilder(tmp_path / "x.bin", dtype) as builder:
            builder.add_documents(documents)
            if name == "documents":
                builder.end_document()
            builder.finalize(tmp_path / "x.idx")
        prints.append(IndexedDataset(tmp_path / "x").fingerprint())
    assert prints[0] != prints[1]
    assert "x" not in {value for value in prints[0].values() if isinstance(value, str)}
