"""``verify`` and ``check_vocab``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder, check_vocab, verification, verify


def build(prefix: Path, documents: list[list[Any]], dtype: type) -> IndexedDataset:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        builder.add_documents(documents)
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return IndexedDataset(prefix)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_SCAN_TOKENS", 2)
    build(tmp_path / "x", [[5, 9, 3], [], [7]], np.uint16)
    report = verify(tmp_path / "x", vocab_size=10)
    assert (report.documents, report.empty_documents, report.sequences, report.empty_sequences) == (4, 1, 3, 1)
    assert (report.tokens, report.min_token, report.max_token, report.dtype) == (4, 3, 9, "uint16")


def test_report_without_tokens(tmp_path: Path) -> None:
    build(tmp_path / "x", [[]], np.int32)
    report = verify(tmp_path / "x", vocab_size=1)
    assert (report.tokens, report.min_token, report.max_token) == (0, None, None)


def test_token_outside_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_SCAN_TOKENS", 2)
    dataset = build(tmp_path / "x", [[0, 1], [], [2, 8, 3]], np.int32)
    check_vocab(dataset, 8)
    check_vocab(dataset, 9, scan=True)
    with pytest.raises(FormatError, match="byte 12: token 8 of sequence 2 is outside the vocabulary of 8 ids"):
        check_vocab(dataset, 8, scan=True)
    with pytest.raises(FormatError, match="token 8 of sequence 2"):
        verify(tmp_path / "x", vocab_size=8)
    with pytest.raises(FormatError, match="token -1 of sequence 0"):
        check_vocab(build(tmp_path / "y", [[-1]], np.int32), 8, scan=True)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(np.uint8, 256), (np.int8, 128), (np.int16, 32768), (np.uint16, 65536), (np.int32, 2**31), (np.int64, 2**63)],
)
def test_dtype_against_vocabulary(dtype: type, largest: int, tmp_path: Path) -> None:
    dataset = build(tmp_path / "x", [[1]], dtype)
    check_vocab(dataset, largest)
    with pytest.raises(FormatError, match=f"holds ids below {largest}, the vocabulary has {largest + 1}"):
        check_vocab(dataset, largest + 1)


def test_values_that_are_no_ids(tmp_path: Path) -> None:
    dataset = build(tmp_path / "x", [[1.5]], np.float32)
    with pytest.raises(FormatError, match="float32 values, not token ids"):
        check_vocab(dataset, 10)
    assert verify(tmp_path / "x").max_token == 1.5


def test_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        check_vocab(build(tmp_path / "x", [[1]], np.int32), 0)
