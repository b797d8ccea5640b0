"""Random documents come back from both readers, in every dtype."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import DType, IndexedDataset, IndexedDatasetBuilder, verify


def values(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype.kind == "f":
        return st.floats(width=8 * dtype.itemsize, allow_nan=False)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def corpora(draw: st.DrawFn) -> tuple[np.dtype[Any], list[list[list[Any]]]]:
    dtype = np.dtype(draw(st.sampled_from(sorted(DType.__members__))))
    sequences = st.lists(values(dtype), max_size=6)
    return dtype, draw(st.lists(st.lists(sequences, max_size=3), max_size=8))


@given(corpus=corpora(), multimodal=st.booleans(), whole=st.booleans())
@settings(max_examples=150, deadline=None)
def test_round_trip(corpus: tuple[np.dtype[Any], list[list[list[Any]]]], multimodal: bool, whole: bool) -> None:
    dtype, documents = corpus
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        with IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal) as builder:
            for document in documents:
                modes = [len(sequence) % 3 if multimodal else 0 for sequence in document]
                if whole:
                    flat = [token for sequence in document for token in sequence]
                    builder.add_document(flat, [len(sequence) for sequence in document], modes)
                else:
                    for sequence, mode in zip(document, modes, strict=True):
                        builder.add_item(sequence, mode)
                    builder.end_document()
            assert builder.num_documents == len(documents)
            builder.finalize(f"{prefix}.idx")
        sequences = [sequence for document in documents for sequence in document]
        ends = np.cumsum([0] + [len(document) for document in documents])
        for mmap in (True, False):
            dataset = IndexedDataset(prefix, multimodal=multimodal, mmap=mmap)
            assert dataset.dtype == dtype
            assert dataset.document_indices.tolist() == ends.tolist()
            assert dataset.sequence_lengths.tolist() == [len(sequence) for sequence in sequences]
            items = [item[0] if multimodal else item for item in dataset]
            assert [item.tolist() for item in items] == sequences
            if multimodal:
                assert dataset.sequence_modes is not None
                assert dataset.sequence_modes.tolist() == [len(sequence) % 3 for sequence in sequences]
            flat = dataset.read_pieces(dataset.sequence_pointers[::-1], dataset.sequence_lengths[::-1])
            assert flat.tolist() == [token for sequence in sequences[::-1] for token in sequence]
        report = verify(prefix, multimodal=multimodal)
        assert report.tokens == sum(len(sequence) for sequence in sequences)
        assert report.empty_sequences == sum(not sequence for sequence in sequences)
        assert report.empty_documents == sum(not document for document in documents)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_damage_never_gives_other_tokens(data: st.DataObject) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6]]
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        with IndexedDatasetBuilder(f"{prefix}.bin", np.int64) as builder:
            builder.add_documents(documents)
            builder.finalize(f"{prefix}.idx")
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        start = data.draw(st.integers(0, len(content)))
        content[start : data.draw(st.integers(start, len(content)))] = data.draw(st.binary(max_size=40))
        Path(f"{prefix}.idx").write_bytes(content)
        try:
            dataset = IndexedDataset(prefix)
        except FormatError:
            return
        # Eight bytes are eight bytes: only the code itself could tell int64 from float64.
        if dataset.dtype == np.int64:
            assert [sequence.tolist() for sequence in dataset] == documents
        else:
            assert dataset.dtype == np.float64


@pytest.mark.parametrize("code", range(-1, 12))
def test_dtype_codes(code: int) -> None:
    if 1 <= code <= 8:
        dtype = DType.dtype_from_code(code)
        assert DType.code_from_dtype(dtype) == code
        assert DType.size(code) == DType.size(dtype) == dtype.itemsize
    else:
        with pytest.raises(ValueError, match=f"dtype code {code} is unknown"):
            DType.dtype_from_code(code)
