"""Batches read natively against plain arithmetic: documents of any length, any integer type, any rules, many files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from tdp_megatron import _C
from tdp_megatron.datasets import GPTDataset, GPTDatasetConfig, Split, TokenizerSpec
from tdp_megatron.datasets.instant import InstantChunks, InstantReader
from tdp_megatron.datasets.readers import RunReader, TokenFileReader
from tdp_megatron.indexed import IndexedDataset
from tdp_megatron.nodes import Batch, Blend, DocumentSample, GPTSample, IndexedRead
from tdp_megatron.reading import read_spans_by_reader
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import IGNORE_LABEL, SampleBlock

EOD = 3
DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
# Around the stretches that are converted at a time, and much shorter ones.
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513, 1023, 1024, 1025, 1600]))


def make_file(folder: Path, lengths: list[int], dtype: Any, seed: int) -> tuple[str, list[npt.NDArray[Any]]]:
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 12, n).astype(dtype) for n in lengths]
    name = f"{np.dtype(dtype).name}-{seed}-{hash(tuple(lengths))}"
    return write_corpus(folder / name, documents, dtype=dtype), documents


def expected_span(
    sample: npt.NDArray[Any], start: int, length: int, *, no_loss: int, reset: int
) -> dict[str, npt.NDArray[Any]]:
    """What a span of a sample is; ``sample`` has the token behind its end as well, where there is one."""
    text = sample.astype(np.int64)
    tokens = text[start : start + length]
    labels = np.full(length, IGNORE_LABEL, dtype=np.int64)
    known = text[start + 1 : start + length + 1]
    labels[: len(known)] = known
    loss_mask = np.ones(length, dtype=np.float32)
    if no_loss >= 0:
        loss_mask[tokens == no_loss] = 0.0
    loss_mask[len(known) :] = 0.0
    positions = np.arange(start, start + length)
    if reset >= 0:
        position, everything = 0, []
        for token in text[: start + length]:
            everything.append(position)
            position = 0 if token == reset else position + 1
        positions = np.array(everything[start:], dtype=np.int64)
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}


@SETTINGS
@given(data=st.data())
def test_spans_of_runs_in_many_files(tmp_path: Path, data: st.DataObject) -> None:
    readers: list[TokenFileReader] = []
    texts: list[list[npt.NDArray[Any]]] = []
    rules = []
    for seed in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(LENGTHS.filter(bool), min_size=1, max_size=4))
        prefix, documents = make_file(tmp_path, lengths, data.draw(st.sampled_from(DTYPES)), seed)
        dataset = IndexedDataset(prefix, mmap=data.draw(st.booleans()))
        rule = (data.draw(st.sampled_from([None, EOD])), data.draw(st.sampled_from([None, EOD])))
        counts = np.array(lengths, dtype=np.int64)
        readers.append(RunReader(dataset, np.array(dataset.sequence_pointers, dtype=np.int64), counts, *rule))
        texts.append(documents)
        rules.append([-1 if r is None else r for r in rule])
    spans = []
    for _ in range(data.draw(st.integers(1, 6))):
        reader = data.draw(st.integers(0, len(readers) - 1))
        sample = data.draw(st.integers(0, len(texts[reader]) - 1))
        size = len(texts[reader][sample])
        start = data.draw(st.integers(0, size))
        spans.append((reader, sample, start, data.draw(st.integers(0, size - start))))
    reader_of, samples, starts, lengths_ = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    block = SampleBlock(tuple(readers), reader_of, samples, lengths_, lengths_, np.stack([reader_of, samples], axis=1))
    # Holes between the spans must stay as they are.
    places = np.cumsum(lengths_ + 3) - lengths_
    total = int(places[-1] + lengths_[-1]) + 3
    out: dict[str, npt.NDArray[Any]] = {
        key: np.full(total, 77, dtype=np.float32 if key == "loss_mask" else np.int64)
        for key in ("tokens", "labels", "loss_mask", "position_ids")
    }
    read_spans_by_reader(block, np.arange(len(spans)), starts, lengths_, places, out)
    wanted = {key: np.full_like(array, 77) for key, array in out.items()}
    for (reader, sample, start, length), place in zip(spans, places.tolist(), strict=True):
        no_loss, reset = rules[reader]
        values = expected_span(texts[reader][sample], start, length, no_loss=no_loss, reset=reset)
        for key, value in values.items():
            wanted[key][place : place + length] = value
    for key, array in out.items():
        np.testing.assert_array_equal(array, wanted[key], err_msg=key)


@SETTINGS
@given(
    lengths=st.lists(LENGTHS, min_size=2, max_size=12).filter(lambda n: sum(n) > 60),
    width=st.sampled_from([1, 7, 16, 513]),
    extra=st.booleans(),
    reset=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(["megatron", "instant"]),
)
def test_batches_are_the_samples(
    tmp_path: Path, lengths: list[int], width: int, extra: bool, reset: bool, dtype: Any, order: Any
) -> None:
    prefix, _ = make_file(tmp_path, lengths, dtype, 0)
    options: dict[str, Any] = {
        "sequence_length": min(width, sum(lengths) - 1),
        "num_samples": 24,
        "add_extra_token_to_sequence": extra,
        "eod_token": EOD,
        "eod_mask_loss": reset,
        "reset_position_ids": reset,
        "order": order,
    }
    rows = 0
    slow = GPTSample(IndexedRead(prefix, mmap=False), **options)
    fast = Batch(GPTSample(IndexedRead(prefix), **options), micro_batch_size=2)
    for batch in itertools.islice(fast, 12):
        # Read from the pieces alone, whose bytes are checked by test_spans_of_runs_in_many_files.
        for row in range(2):
            sample = next(slow)
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                np.testing.assert_array_equal(batch[key][row], sample[key], err_msg=key)
            rows += 1
    assert rows == 24


@settings(SETTINGS, max_examples=20)
@given(lengths=st.lists(LENGTHS, min_size=2, max_size=12).filter(lambda n: sum(n) > 600), extra=st.booleans())
def test_documents_are_those_of_the_dataset(tmp_path: Path, lengths: list[int], extra: bool) -> None:
    # GPTDataset's inter_document_masking, which golden data pin, is the reference.
    prefix, _ = make_file(tmp_path, lengths, np.uint16, 0)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=TokenizerSpec.null(100),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=extra,
        inter_document_masking=True,
        path_to_cache=str(tmp_path / "cache"),
    )
    low_level = IndexedDataset(prefix)
    dataset = GPTDataset(low_level, prefix, range(len(low_level)), 40, Split.train, config)
    for mmap in (True, False):
        source = GPTSample(
            IndexedRead(prefix, mmap=mmap), sequence_length=16, num_samples=40, add_extra_token_to_sequence=extra
        )
        number = 0
        for batch in itertools.islice(Batch(source, micro_batch_size=3, inter_document_masking=True), 20):
            for row in range(3):
                sample = dataset[number]
                for key in ("tokens", "position_ids", "cu_seqlens", "max_seqlen"):
                    np.testing.assert_array_equal(batch[key][row], sample[key], err_msg=f"{key} of sample {number}")
                    assert batch[key].dtype == sample[key].dtype
                number += 1
        assert number == min(len(dataset) // 3, 20) * 3


@SETTINGS
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), width=st.integers(1, 12))
def test_ends_of_documents_by_plain_arithmetic(lengths: list[int], width: int) -> None:
    zero = np.zeros(1, dtype=np.int64)
    index = np.array([[0, 0], [len(lengths) - 1, lengths[-1]]], dtype=np.int32)
    counts = np.array(lengths, dtype=np.int32)
    pointers = (np.cumsum(counts) - counts).astype(np.int64)
    documents = np.arange(len(lengths), dtype=np.int32)
    reader = _C.gpt_reader(None, 1, counts, pointers, documents, index, zero, 0, IGNORE_LABEL, -1, -1)
    positions, cu_seqlens = np.full(width, -1, dtype=np.int64), np.full(width + 1, -1, dtype=np.int32)
    longest = _C.read_documents(reader, 0, positions, cu_seqlens)

    ends = [min(end, width) for end in np.cumsum(lengths).tolist()]
    ends[-1] = width
    if len(ends) > width:
        ends = sorted({end for end in ends if end})
    assert cu_seqlens.tolist() == [0, *ends, *[width] * (width - len(ends))]
    assert longest == max(np.diff([0, *ends]))
    document = np.searchsorted(ends, np.arange(width), side="right")
    begins = np.array([0, *ends])[document]
    np.testing.assert_array_equal(positions, np.arange(width) - begins)


def test_documents_of_other_samples(tmp_path: Path) -> None:
    prefix, _ = make_file(tmp_path, [5, 0, 30, 12, 9, 40], np.uint16, 0)
    # Whole documents are one each, the pads behind them included.
    whole = DocumentSample(IndexedRead(prefix), max_seqlen=20, shuffle=False)
    batch = next(Batch(whole, micro_batch_size=2, sequence_length=20, inter_document_masking=True))
    assert batch["cu_seqlens"].tolist() == [[0, *[20] * 20]] * 2
    assert batch["max_seqlen"].tolist() == [20, 20]
    assert batch["position_ids"].tolist() == [list(range(20))] * 2
    # The order without an index: documents are the pieces of a sample.
    dataset = IndexedDataset(prefix)
    chunks = InstantChunks(dataset, 0, 6, 16, 1, 1234)
    native = InstantReader(chunks).native()
    source = GPTSample(IndexedRead(prefix), sequence_length=16, order="instant")
    batch = next(Batch(source, micro_batch_size=4, inter_document_masking=True))
    for row in range(4):
        lengths = native.document_lengths(row)
        assert lengths.sum() == 17
        ends = np.minimum(np.cumsum(lengths), 16)
        assert batch["cu_seqlens"][row].tolist() == [0, *ends, *[16] * (16 - len(ends))]
    # Several files in one batch.
    other, _ = make_file(tmp_path, [7, 7, 7, 7, 7, 7], np.int32, 1)

    def blend() -> Blend:
        sources = [GPTSample(IndexedRead(p), sequence_length=8, num_samples=30) for p in (prefix, other)]
        return Blend(sources, [0.5, 0.5])

    together = next(Batch(blend(), micro_batch_size=6, inter_document_masking=True))
    assert len(set(together["max_seqlen"].tolist())) > 1
    one_by_one = list(Batch(blend(), micro_batch_size=1, inter_document_masking=True))[:6]
    for key, value in together.items():
        np.testing.assert_array_equal(value, np.concatenate([batch[key] for batch in one_by_one]), err_msg=key)


def test_documents_of_users_samples() -> None:
    from torchdata.nodes import IterableWrapper

    users = IterableWrapper([{"tokens": [1, 2]}])
    with pytest.raises(ValueError, match="inter_document_masking needs samples of token files"):
        next(Batch(users, micro_batch_size=1, sequence_length=4, inter_document_masking=True))


def mix(a: int, b: int) -> int:
    def finalise(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    return finalise((finalise((a + 0x9E3779B97F4A7C15) % 2**64) + b) % 2**64)


@SETTINGS
@given(
    size=st.integers(1, 700),
    window=st.sampled_from([1, 2, 15, 16, 17, 64, 255, 257, 600]),
    key=st.integers(0, 2**64 - 1),
)
def test_windows_are_permuted_place_by_place(size: int, window: int, key: int) -> None:
    # One token per sequence, so that pieces are sequences; permute() walks every place on its own.
    lengths, pointers = np.ones(size, dtype=np.int32), np.arange(size, dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    found, _, _ = _C.instant_pieces(lengths, pointers, 0, size, 0, size, 1, window, key, zero, zero + size)
    expected = []
    for number, begin in enumerate(range(0, size, window)):
        count = min(window, size - begin)
        expected.append(begin + _C.permute(np.arange(count, dtype=np.int64), count, mix(key, number)))
    np.testing.assert_array_equal(found, np.concatenate(expected))
