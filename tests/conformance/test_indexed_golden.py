"""Files, reads and slices as Megatron-LM has them (commit d98e8a64, Aug 2026, NumPy 2.4.6)."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.indexed import DType, IndexedDataset, IndexedDatasetBuilder, verify

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, Any] = json.loads((DATA / "indexed_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["datasets"]}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(DATA / "indexed_golden.npz", allow_pickle=False) as stored:
        return dict(stored)


def write_megatron_files(arrays: dict[str, np.ndarray], case_id: str, folder: Path) -> str:
    for suffix in ("bin", "idx"):
        (folder / f"{case_id}.{suffix}").write_bytes(arrays[f"{case_id}/{suffix}"].tobytes())
    return str(folder / case_id)


def assert_same_files(prefix: Path, case: dict[str, Any]) -> None:
    for suffix, digest in case["sha256"].items():
        assert hashlib.sha256(Path(f"{prefix}{suffix}").read_bytes()).hexdigest() == digest, suffix


def test_every_case_is_here() -> None:
    assert len(CASES) == 21
    assert {case["dtype"] for case in CASES.values()} == set(DType.__members__)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("case_id", CASES)
def test_reading_megatron_files(case_id: str, mmap: bool, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    case = CASES[case_id]
    prefix = write_megatron_files(arrays, case_id, tmp_path)
    dataset = IndexedDataset(prefix, multimodal=case["multimodal"], mmap=mmap)
    assert dataset.dtype == np.dtype(case["dtype"])
    assert DType.code_from_dtype(dataset.dtype) == case["dtype_code"]
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        expected = arrays[f"{case_id}/{name}"]
        assert getattr(dataset, name).dtype == expected.dtype
        np.testing.assert_array_equal(getattr(dataset, name), expected)
    flat = arrays[f"{case_id}/flat_tokens"]
    ends = np.cumsum(dataset.sequence_lengths)
    for i, sequence in enumerate(np.split(flat, ends[:-1])):
        item = dataset[i]
        if case["multimodal"]:
            item, mode = item
            assert mode == arrays[f"{case_id}/sequence_modes"][i]
        assert item.dtype == flat.dtype
        np.testing.assert_array_equal(item, sequence)
    np.testing.assert_array_equal(dataset.read_pieces(dataset.sequence_pointers, dataset.sequence_lengths), flat)
    assert verify(prefix, multimodal=case["multimodal"]).tokens == len(flat)


@pytest.mark.parametrize("case_id", CASES)
def test_builder_writes_megatrons_bytes(case_id: str, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    case = CASES[case_id]
    lengths = arrays[f"{case_id}/sequence_lengths"]
    documents = arrays[f"{case_id}/document_indices"]
    sequences = np.split(arrays[f"{case_id}/flat_tokens"], np.cumsum(lengths)[:-1])
    modes = arrays.get(f"{case_id}/sequence_modes", np.zeros(len(lengths), dtype=np.int8))

    item_by_item = tmp_path / "items"
    with IndexedDatasetBuilder(f"{item_by_item}.bin", np.dtype(case["dtype"]), case["multimodal"]) as builder:
        for first, last in itertools.pairwise(documents):
            for i in range(first, last):
                builder.add_item(sequences[i], int(modes[i]))
            builder.end_document()
        builder.finalize(f"{item_by_item}.idx")
    assert_same_files(item_by_item, case)

    whole = tmp_path / "documents"
    with IndexedDatasetBuilder(f"{whole}.bin", np.dtype(case["dtype"]), case["multimodal"]) as builder:
        for first, last in itertools.pairwise(documents):
            tokens = np.concatenate([*sequences[first:last], np.empty(0, dtype=case["dtype"])])
            builder.add_document(tokens, lengths[first:last].tolist(), modes[first:last].tolist())
        builder.finalize(f"{whole}.idx")
    assert_same_files(whole, case)


@pytest.mark.parametrize("kind", ["lists", "awkward"])
def test_add_documents_with_eod_in_chunks(kind: str, tmp_path: Path) -> None:
    case = CASES["add_documents_eod_chunk2"]
    documents: Any = case["docs"]
    if kind == "awkward":
        awkward = pytest.importorskip("awkward", reason="awkward is not installed")
        documents = awkward.Array(documents)
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.dtype(case["dtype"])) as builder:
        builder.add_documents(documents, eod_token=case["eod_token"], chunk_size=case["chunk_size"])
        builder.finalize(tmp_path / "x.idx")
    assert_same_files(tmp_path / "x", case)


def test_merge(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    case = CASES["merge_add_index"]
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.dtype(case["dtype"])) as builder:
        for part in case["merged"]:
            builder.add_index(write_megatron_files(arrays, part, tmp_path))
        builder.finalize(tmp_path / "x.idx")
    assert_same_files(tmp_path / "x", case)


@pytest.mark.parametrize("mmap", [True, False])
def test_get(mmap: bool, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    prefix = write_megatron_files(arrays, GOLDEN["get"]["dataset"], tmp_path)
    dataset = IndexedDataset(prefix, mmap=mmap)
    refused = 0
    for idx, offset, length, tokens in GOLDEN["get"]["rows"]:
        seqlen = int(dataset.sequence_lengths[idx])
        if offset + (length or 0) > seqlen:
            # Megatron reads on into the next sequence.
            refused += 1
            with pytest.raises(IndexError, match=f"sequence {idx} has {seqlen} tokens; offset {offset}"):
                dataset.get(idx, offset, length)
        else:
            assert dataset.get(idx, offset, length).tolist() == tokens
    assert refused == 8


@pytest.mark.parametrize("mmap", [True, False])
def test_slice(mmap: bool, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    prefix = write_megatron_files(arrays, GOLDEN["slice"]["dataset"], tmp_path)
    dataset = IndexedDataset(prefix, mmap=mmap)
    for spelled, expected in GOLDEN["slice"]["results"].items():
        which = slice(*ast.literal_eval(spelled))
        if "error" in expected:
            with pytest.raises(ValueError, match="step 2"):
                dataset[which]
        else:
            assert [sequence.tolist() for sequence in dataset[which]] == expected
