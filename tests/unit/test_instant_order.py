"""The order without an index: nodes, resume, epochs, and a start that does not grow with the data."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron import _C
from tdp_megatron.datasets.instant import InstantBlend, InstantChunks
from tdp_megatron.indexed import IndexedDataset
from tdp_megatron.nodes import Batch, Blend, DocumentSample, GPTSample, IndexedRead
from tdp_megatron.testing import check_resume_at_every_step, write_corpus

S = 16
LENGTHS = [5, 0, 17, 1, 40, 8, 0, 33, 22, 9, 64, 2, 31] * 12
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Every token of the file is another number, so that a token says where it comes from.
    ends = np.cumsum(LENGTHS)
    documents = [np.arange(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]
    return write_corpus(tmp_path_factory.mktemp("instant") / "corpus", documents)


def source(prefix: str, **options: Any) -> GPTSample:
    return GPTSample(IndexedRead(prefix), sequence_length=S, order="instant", **options)


@pytest.mark.parametrize("mmap", [True, False])
def test_an_epoch_holds_every_token_once(prefix: str, mmap: bool) -> None:
    node = GPTSample(IndexedRead(prefix, mmap=mmap), sequence_length=S, order="instant")
    rows = torch.stack([sample["tokens"] for sample in node])
    assert len(rows) == (TOKENS - 1) // S
    tokens = rows.flatten().tolist()
    assert len(set(tokens)) == len(tokens)
    assert len(tokens) > TOKENS - 2 * S
    for sample in node:
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert sample["loss_mask"].tolist() == [1.0] * S  # the label of the last token is in the next chunk


def test_documents_stay_whole_and_neighbours_part(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    chunks = InstantChunks(dataset, 0, len(dataset), S, 1, seed=3, window=8)
    zero = np.zeros(1, dtype=np.int64)
    order = np.argsort(chunks.chunks(np.arange(chunks.samples_per_epoch), 0))
    stream = np.concatenate(
        [dataset.read_pieces(*chunks.pieces(zero + i, zero, zero + S)[:2]) for i in order]
    )  # the chunks laid end to end again
    ends = np.cumsum(LENGTHS)
    owner = np.searchsorted(ends, stream, side="right")
    visits = owner[np.flatnonzero(np.diff(owner, prepend=-1))]
    assert len(visits) == len(set(visits)), "a document is in pieces"
    assert np.mean(np.diff(visits) == 1) < 0.5, "documents follow each other as in the file"
    windows = visits // 8
    assert (np.diff(windows) >= 0).all(), "a document has left its window"


def test_epochs_and_seeds_differ_and_repeat(prefix: str) -> None:
    size = (TOKENS - 1) // S

    def epoch(number: int, seed: int = 1) -> list[list[int]]:
        node = source(prefix, num_samples=3 * size, random_seed=seed)
        node.reset(None)
        node.skip_to(number * size)
        return [sample["tokens"].tolist() for sample in node.take(size)]

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=2)
    firsts = [{row[0] for row in epoch(number)} for number in range(3)]
    assert firsts[0] != firsts[1], "the documents of a window have the same order in every epoch"


def test_any_part_of_any_sample(prefix: str) -> None:
    size = (TOKENS - 1) // S
    node = source(prefix, num_samples=2 * size, eod_token=7, eod_mask_loss=True, reset_position_ids=True)
    block = node.take(2 * size)
    whole = [block[i] for i in range(len(block))]
    reader = block.readers[0]
    # Spans of two epochs in one call, in no order.
    rng = np.random.default_rng(0)
    ids = rng.permutation(2 * size)[:40].astype(np.int64)
    starts = rng.integers(0, S, 40)
    lengths = np.array([int(rng.integers(1, S - start + 1)) for start in starts])
    places = np.cumsum(lengths) - lengths
    out = {key: np.zeros(int(lengths.sum()), dtype=dtype) for key, dtype in reader.token_keys.items()}
    reader.read_spans(ids, starts, lengths, places, out)
    for i, start, length, place in zip(ids.tolist(), starts, lengths, places, strict=True):
        for key, array in out.items():
            expected = whole[i][key][start : start + length].numpy()
            np.testing.assert_array_equal(array[place : place + length], expected, err_msg=key)


@pytest.mark.parametrize("blended", [False, True])
def test_resume_at_every_step(prefix: str, blended: bool) -> None:
    def make() -> Batch:
        if not blended:
            return Batch(source(prefix, num_samples=60), micro_batch_size=2, dp_rank=1, dp_size=2)
        sources = [source(prefix, num_samples=100, random_seed=seed) for seed in (1, 2, 3)]
        blend = Blend(sources, [5, 3, 1], num_samples=60, order="instant")
        return Batch(blend, micro_batch_size=2, dp_rank=1, dp_size=2)

    def describe(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["tokens"].clone()

    assert check_resume_at_every_step(make, describe=describe) == 15


def test_a_blend_is_random_access(prefix: str) -> None:
    def blend() -> Blend:
        sources = [source(prefix, num_samples=10**9, random_seed=seed) for seed in (1, 2, 3)]
        return Blend(sources, [0.7, 0.2, 0.1], num_samples=10**9, order="instant")

    read, skipped = blend(), blend()
    read.take(1234)
    skipped.skip_to(1234)
    assert skipped.state_dict() == read.state_dict()
    far = blend()
    far.skip_to(987_654_321)
    assert np.abs(far.counts - 987_654_321 * np.array([0.7, 0.2, 0.1])).max() < 1e-6 * 987_654_321
    expected = InstantBlend([0.7, 0.2, 0.1])
    assert far.counts.tolist() == expected.counts(987_654_321).tolist()
    block = far.take(500)
    datasets, samples = expected.locate(np.arange(987_654_321, 987_654_821))
    np.testing.assert_array_equal(block.refs[:, 0], datasets)
    np.testing.assert_array_equal(block.refs[:, 1], samples)


def test_a_source_that_ends(prefix: str) -> None:
    size = (TOKENS - 1) // S
    node = Blend([source(prefix), source(prefix, random_seed=9)], [2, 1], order="instant")
    assert size + size // 2 - 1 <= len(list(node)) <= size + size // 2 + 1


def sparse_pair(prefix: str, sequences: int, length: int) -> list[int]:
    """A pair of files whose data is a hole; returns its entry of a manifest."""
    lengths = np.full(sequences, length, dtype="<i4")
    pointers = np.arange(sequences, dtype="<i8") * length * 2
    documents = np.arange(sequences + 1, dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, sequences, sequences + 1)
    content = head + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    Path(f"{prefix}.idx").write_bytes(content)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(sequences * length * 2)
    return [sequences, sequences + 1, 8, sequences * length * 2, len(content)]


def test_a_trillion_tokens_in_five_thousand_files_start_at_once(tmp_path: Path) -> None:
    entry = sparse_pair(str(tmp_path / "part0"), 100, 2_000_000)
    manifest = {str(tmp_path / "part0"): entry}
    for i in range(1, 5000):
        manifest[str(tmp_path / f"part{i}")] = entry  # none of these exists: nothing may look at them
    weights = np.random.default_rng(0).random(5000) + 0.01
    begin = time.process_time()
    sources = [
        GPTSample(
            IndexedRead(path, sequences_per_dataset=manifest), sequence_length=4096, num_samples=10**9, order="instant"
        )
        for path in manifest
    ]
    blend = Blend(sources, weights.tolist(), num_samples=10**9, order="instant")
    block = blend.take(1024)
    blend.skip_to(10**8)
    spent = time.process_time() - begin
    assert sum(s.samples_per_epoch for s in sources) * 4096 > 0.999e12
    assert len(np.unique(block.refs[:, 0])) > 500
    first = sources[0].take(3)
    assert first[0]["tokens"].tolist() == [0] * 4096
    # No limit on time here: what is fast is measured in benchmarks/startup.py. That it is not minutes shows that
    # nothing grows with the data.
    assert spent < 60


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: GPTSample(IndexedRead(p), sequence_length=S, order="random"), "order must be one of megatron, ins"),
        (lambda p: source(p, drop_last_partial_sequence=False), "whole samples only"),
        (lambda p: source(p, num_samples=5).source and len(source(p + "x")), "does not exist"),
        (lambda p: len(GPTSample(IndexedRead(p), sequence_length=TOKENS, order="instant")), "one sample needs"),
        (lambda p: Blend([source(p)], order="random"), "order must be 'megatron' or 'instant'"),
        (lambda p: Blend([source(p)], order="instant", stop="cycle"), "first_exhausted"),
        (lambda p: InstantBlend([1.0, -1.0]), "not negative"),
        (lambda p: InstantBlend([0.0]), "not all zero"),
        (lambda p: InstantBlend([float("nan")]), "finite"),
        (lambda p: InstantChunks(IndexedDataset(p), 0, 10**6, S, 1, 1), "are not inside"),
        (lambda p: InstantChunks(IndexedDataset(p), 0, 5, S, 1, 1, window=0), "at least 1"),
        (lambda p: _C.permute(np.array([5]), 5, 1), r"outside \[0, 5\)"),
        (lambda p: _C.permute(np.array([0]), 0, 1), "size must be in"),
        (lambda p: _C.blend_period(np.array([0, 0])), "must sum to"),
        (lambda p: _C.blend_period(np.array([-1, 3])), r"shares\[0\] is -1"),
    ],
)
def test_bad_arguments(prefix: str, make: Any, message: str) -> None:
    with pytest.raises((ValueError, IndexError, FileNotFoundError), match=message):
        make(prefix)


def test_an_index_that_contradicts_itself() -> None:
    lengths, pointers = np.full(8, 4, dtype=np.int32), np.arange(8, dtype=np.int64) * 8
    whole = (0, 8, 0, 64, 2, 4, 1)
    zero = np.zeros(1, dtype=np.int64)
    assert _C.instant_pieces(lengths, pointers, *whole, zero, zero + 32)[1].sum() == 32
    with pytest.raises(IndexError, match="contradict each other at sequence 0"):
        _C.instant_pieces(lengths + 1, pointers, *whole, zero, zero + 32)
    with pytest.raises(IndexError, match="negative length"):
        _C.instant_pieces(lengths - 5, pointers, *whole, zero, zero + 32)
    with pytest.raises(IndexError, match=r"tokens 33\.\. of 32"):
        _C.instant_pieces(lengths, pointers, *whole, zero + 33, zero + 1)
    with pytest.raises(ValueError, match=r"sequences \[0, 9\) of 8"):
        _C.instant_pieces(lengths, pointers, 0, 9, 0, 64, 2, 4, 1, zero, zero + 1)


def test_documents_keep_their_own_order(prefix: str) -> None:
    # DocumentSample has no index either: the order of an epoch is one shuffle of its documents.
    assert len(list(DocumentSample(IndexedRead(prefix), max_seqlen=S))) > 0
