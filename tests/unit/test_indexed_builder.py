"""What the builder writes, refuses, and leaves behind when it fails or is killed."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import DType, IndexedDataset, IndexedDatasetBuilder, spool
from tdp_megatron.indexed.layout import iter_pointers


def build(prefix: Path, documents: list[list[int]], dtype: Any = np.int32) -> None:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        builder.add_documents(documents)
        builder.finalize(f"{prefix}.idx")


def read(prefix: Path, **options: Any) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix, **options)]


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(None, np.int32), (1, np.uint16), (65499, np.uint16), (65500, np.int32)]
)
def test_optimal_dtype(vocab_size: int | None, expected: type) -> None:
    assert DType.optimal_dtype(vocab_size) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], dtype=np.int64),
        np.array([1.0, 2.0, 3.0]),
        np.array([9, 1, 9, 2, 9, 3])[1::2],
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        array("q", [1, 2, 3]),
        [np.int64(1), np.uint8(2), 3],
    ],
)
def test_every_kind_of_tokens(tokens: Any, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
        builder.add_item(tokens)
        builder.end_document()
        builder.finalize(tmp_path / "x.idx")
    assert read(tmp_path / "x") == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.uint16, 70000),
        (np.uint16, 65536),
        (np.uint16, -1),
        (np.uint8, 256),
        (np.int8, 128),
        (np.int8, -129),
        (np.int16, 32768),
        (np.int32, 2**31),
        (np.int32, -(2**31) - 1),
        (np.int64, 2**63),
        (np.int64, 2**64),
        (np.int64, float(2**63)),
        (np.int32, 1.5),
        (np.int32, float("nan")),
        (np.int32, float("inf")),
        (np.float32, 1e39),
        (np.float32, 2**24 + 1),
    ],
)
def test_value_the_dtype_cannot_hold(dtype: type, value: Any, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", dtype) as builder:
        builder.add_document([1, 2], [2])
        with pytest.raises(ValueError, match=f"document 1: token id .* at position 1 does not fit {dtype.__name__}"):
            builder.add_document([1, value, 3], [3])
        # Nothing of it has been written: the file goes on as if it had never come.
        builder.add_document([4], [1])
        builder.finalize(tmp_path / "x.idx")
    assert read(tmp_path / "x") == [[1, 2], [4]]


def test_refused_value_is_named_with_its_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
        with pytest.raises(ValueError, match="document 2: token id 70000 at position 1"):
            builder.add_documents([[1], [], [1, 70000, 65536]])
        with pytest.raises(ValueError, match="document 3: token id 70000 at position 2"):
            builder.add_sequences([1, 2, 3, 4, 70000], [1, 1, 1, 2], [1, 0, 1, 2])
        with pytest.raises(ValueError, match="document 0: token id 99999"):
            builder.add_documents([[1], [2]], eod_token=99999)
        assert (builder.num_documents, builder.num_tokens) == (0, 0)


def test_refused_item_drops_its_whole_document(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16) as builder:
        builder.add_item([1])
        with pytest.raises(ValueError, match="70000"):
            builder.add_item([2, 70000])
        builder.add_item([3])
        builder.end_document()
        builder.finalize(tmp_path / "x.idx")
    assert read(tmp_path / "x") == [[3]]


@pytest.mark.parametrize("value", ["a", b"a", None, 1j])
def test_tokens_that_are_no_numbers(value: Any, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder, pytest.raises(TypeError, match="must be numbers"):
        builder.add_item([value])


def test_counts_that_do_not_add_up(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        with pytest.raises(ValueError, match="add up to 4, but there are 3 tokens"):
            builder.add_document([1, 2, 3], [4])
        with pytest.raises(ValueError, match="must not be negative"):
            builder.add_document([1, 2, 3], [4, -1])
        with pytest.raises(ValueError, match="2 sequences, but 1 lengths"):
            builder.add_sequences([1], [1], [2])
        with pytest.raises(ValueError, match="modes are stored only with multimodal"):
            builder.add_item([1], mode=1)
        with pytest.raises(ValueError, match="chunk_size"):
            builder.add_documents([[1]], chunk_size=0)
        with pytest.raises(ValueError, match="1 modes were given for 2"):
            builder.add_documents([[1], [2]], modes=[0])
        builder.add_item([1])
        with pytest.raises(ValueError, match="1 items follow the last end_document"):
            builder.finalize(tmp_path / "x.idx")
        with pytest.raises(ValueError, match="a document is open"):
            builder.add_document([1], [1])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [-129, 128])
def test_mode_outside_int8(mode: int, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "x.bin", multimodal=True)
    with builder, pytest.raises(ValueError, match="modes must fit int8"):
        builder.add_item([1], mode)


def test_dtype_the_format_has_no_code_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint32 cannot be stored"):
        IndexedDatasetBuilder(tmp_path / "x.bin", np.uint32)
    assert os.listdir(tmp_path) == []


def test_nothing_is_a_dataset_of_nothing(tmp_path: Path) -> None:
    build(tmp_path / "x", [])
    dataset = IndexedDataset(tmp_path / "x")
    assert (len(dataset), dataset.num_tokens, dataset.document_indices.tolist()) == (0, 0, [0])


def test_merge_of_two_files(tmp_path: Path) -> None:
    build(tmp_path / "a", [[1, 2], [3]])
    build(tmp_path / "b", [[], [4, 5]])
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_index(tmp_path / "a")
        builder.add_index(tmp_path / "b")
        builder.finalize(tmp_path / "x.idx")
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert read(tmp_path / "x") == [[1, 2], [3], [], [4, 5]]


def test_merge_of_another_dtype(tmp_path: Path) -> None:
    build(tmp_path / "a", [[1]], np.uint16)
    with (
        IndexedDatasetBuilder(tmp_path / "x.bin") as builder,
        pytest.raises(ValueError, match="uint16, this file int32"),
    ):
        builder.add_index(tmp_path / "a")


def test_lengths_beyond_int32_sums() -> None:
    # 8 GB that need not exist: the pointers are what overflowed elsewhere.
    lengths = np.array([(1 << 31) - 100, 123], dtype=np.int32)
    assert np.concatenate(list(iter_pointers(lengths, 4))).tolist() == [0, 8589934192]


def test_sequence_above_int32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdp_megatron.indexed.builder.MAX_SEQUENCE_LENGTH", 3)
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_document([1, 2, 3], [3])
        with pytest.raises(ValueError, match="4 tokens, the format stores at most 3; split it"):
            builder.add_document([1, 2, 3, 4], [4])
        builder.finalize(tmp_path / "x.idx")
    assert read(tmp_path / "x") == [[1, 2, 3]]


def test_many_documents_spill_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[int] = []
    write = spool.Spool._write

    def counting_write(self: spool.Spool, values: np.ndarray) -> None:
        spilled.append(len(values))
        write(self, values)

    monkeypatch.setattr(spool.Spool, "_write", counting_write)
    monkeypatch.setattr(spool.Spool.__init__, "__defaults__", (2048,))
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 4, 10_000)
    tokens = rng.integers(0, 1000, lengths.sum())
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16, multimodal=True) as builder:
        start = 0
        for first in range(0, len(lengths), 700):
            part = lengths[first : first + 700]
            builder.add_sequences(
                tokens[start : start + part.sum()], part, np.ones(len(part)), np.arange(len(part)) % 2
            )
            start += part.sum()
        builder.finalize(tmp_path / "x.idx")
    assert sum(spilled) > 20_000
    dataset = IndexedDataset(tmp_path / "x", multimodal=True)
    np.testing.assert_array_equal(dataset.sequence_lengths, lengths)
    np.testing.assert_array_equal(dataset.document_indices, np.arange(10_001))
    np.testing.assert_array_equal(dataset.read_pieces(np.zeros(1), np.array([len(tokens)])), tokens)


def test_error_in_the_block_leaves_the_old_pair(tmp_path: Path) -> None:
    build(tmp_path / "x", [[1, 2]])

    def fail() -> None:
        with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
            builder.add_document([3], [1])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert read(tmp_path / "x") == [[1, 2]]
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_a_finished_builder_is_finished(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "x.bin")
    builder.finalize(tmp_path / "x.idx")
    for call in (lambda: builder.add_item([1]), builder.end_document, lambda: builder.finalize(tmp_path / "x.idx")):
        with pytest.raises(ValueError, match="is finished"):
            call()


def test_a_dropped_builder_removes_its_file(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "x.bin")
    assert len(os.listdir(tmp_path)) == 1
    del builder
    assert os.listdir(tmp_path) == []


def test_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "x", [[1, 2]])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_document([3], [1])
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            builder.finalize(tmp_path / "x.idx")
        assert caught.value.filename == str(tmp_path / "x.bin")
    assert read(tmp_path / "x") == [[1, 2]]
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def finalize_and_die(prefix: Path, step: int) -> int:
    """Replace a pair in a forked process that ends without clean-up before its ``step``-th call that changes a file."""
    child = os.fork()
    if child == 0:
        calls = 0

        def dying(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == step:
                    os._exit(9)
                return function(*args, **kwargs)

            return call

        for name in ("fsync", "unlink", "replace", "rename"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            build(prefix, [[5], [6, 7, 8]])
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_every_step_of_finalize(tmp_path: Path) -> None:
    # As many tokens and sequences as before: sizes alone would not tell a mixed pair.
    old, new = [[1, 2], [3, 4]], [[5], [6, 7, 8]]
    prefix = tmp_path / "x"
    outcomes = []
    for step in range(1, 100):
        build(prefix, old)
        if finalize_and_die(prefix, step) == 0:
            break
        if IndexedDataset.exists(prefix):
            found = read(prefix)
            assert found in (old, new), step
            outcomes.append("old" if found == old else "new")
        else:
            with pytest.raises(FileNotFoundError, match="does not exist"):
                IndexedDataset(prefix)
            outcomes.append("none")
    assert read(prefix) == new
    assert set(outcomes) == {"old", "none", "new"}
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)
    # The next writer has removed what the killed ones left, the index of the last one included.
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_a_living_writer_keeps_its_temporary_file(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin") as first:
        first.add_document([1], [1])
        build(tmp_path / "x", [[2]])
        first.finalize(tmp_path / "x.idx")
    assert read(tmp_path / "x") == [[1]]


def test_index_replaced_while_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "x", [[1, 2], [3, 4]])
    import tdp_megatron.indexed.opening as module

    original = module.read_layout

    def replaced_meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(module, "read_layout", original)
        build(tmp_path / "x", [[5], [6, 7, 8]])
        return original(*args)

    monkeypatch.setattr(module, "read_layout", replaced_meanwhile)
    with pytest.raises(FormatError, match="replaced while it was being opened"):
        IndexedDataset(tmp_path / "x")
    assert read(tmp_path / "x") == [[5], [6, 7, 8]]
