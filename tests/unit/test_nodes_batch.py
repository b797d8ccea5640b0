"""Batch: Megatron's sampler order, pads, memory that is used again, resume on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode, IterableWrapper, Mapper

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes import Batch, Blend, DocumentSample, GPTSample, IndexedRead
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import IGNORE_LABEL

S = 16
EOD = 7
rng = np.random.default_rng(5)
DOCUMENTS = [[*rng.integers(10, 500, n).tolist(), EOD] for n in [5, 40, 0, 17, 90, 3, 28, 61, 12, 33]]
KEYS = ("tokens", "labels", "loss_mask", "position_ids")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("batch") / "corpus", DOCUMENTS)


def samples(prefix: str, **options: Any) -> GPTSample:
    return GPTSample(IndexedRead(prefix), sequence_length=S, num_samples=30, eod_token=EOD, **options)


def describe(batch: dict[str, Any]) -> list[torch.Tensor]:
    return [batch[key].clone() for key in KEYS]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("options", [{}, {"eod_mask_loss": True, "reset_position_ids": True}])
def test_ranks_share_blocks_like_megatrons_sampler(prefix: str, mmap: bool, options: dict[str, Any]) -> None:
    def source() -> GPTSample:
        return GPTSample(IndexedRead(prefix, mmap=mmap), sequence_length=S, num_samples=30, eod_token=EOD, **options)

    one_by_one = list(source())
    per_rank = [list(map(describe, Batch(source(), micro_batch_size=2, dp_rank=r, dp_size=3))) for r in range(3)]
    assert [len(batches) for batches in per_rank] == [len(one_by_one) // 6] * 3
    for rank, batches in enumerate(per_rank):
        for step, batch in enumerate(batches):
            for key, tensor in zip(KEYS, batch, strict=True):
                expected = torch.stack([one_by_one[step * 6 + rank * 2 + i][key] for i in range(2)])
                assert tensor.dtype == expected.dtype
                assert torch.equal(tensor, expected), (rank, step, key)


def test_tokens_labels_masks_and_positions_by_plain_arithmetic(prefix: str) -> None:
    node = Batch(samples(prefix, eod_mask_loss=True, reset_position_ids=True), micro_batch_size=3)
    eods = 0
    for batch in node:
        tokens, labels, loss_mask, positions = (batch[key] for key in KEYS)
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        assert torch.equal(loss_mask, (tokens != EOD).float())
        for row, ids in zip(tokens.tolist(), positions.tolist(), strict=True):
            expected, n = [], 0
            for token in row:
                expected.append(n)
                n = 0 if token == EOD else n + 1
            assert ids == expected
            eods += row.count(EOD)
    assert eods > 10


@pytest.mark.parametrize("mmap", [True, False])
def test_positions_of_a_part_know_the_documents_before_it(prefix: str, mmap: bool) -> None:
    source = GPTSample(
        IndexedRead(prefix, mmap=mmap), sequence_length=S, num_samples=30, eod_token=EOD, reset_position_ids=True
    )
    whole = next(iter(source))
    for sample_id in range(20):
        reader = whole.reader
        full = {key: np.zeros(S, dtype=dtype) for key, dtype in reader.token_keys.items()}
        zero, one = np.zeros(1, dtype=np.int64), np.array([sample_id])
        reader.read_spans(one, zero, zero + S, zero, full)
        for start in range(S):
            part = {key: np.full(S, -5, dtype=array.dtype) for key, array in full.items()}
            reader.read_spans(one, zero + start, zero + (S - start), zero, part)
            for key, array in full.items():
                np.testing.assert_array_equal(part[key][: S - start], array[start:])
                assert (part[key][S - start :] == -5).all()


def test_documents_are_padded(prefix: str) -> None:
    source = DocumentSample(IndexedRead(prefix), max_seqlen=S, overflow="truncate", shuffle=False)
    node = Batch(source, micro_batch_size=4, sequence_length=20, pad_id=3, drop_last=False)
    batches = [{key: value.clone() for key, value in batch.items()} for batch in node]
    assert [len(batch["tokens"]) for batch in batches] == [4, 4, 2]
    rows = {key: torch.cat([batch[key] for batch in batches]) for key in KEYS}
    for i, document in enumerate(DOCUMENTS):
        cut = document[:S]
        n = len(cut)
        following = document[1 : S + 1]
        assert rows["tokens"][i].tolist() == cut + [3] * (20 - n)
        assert rows["labels"][i].tolist() == following + [IGNORE_LABEL] * (20 - len(following))
        assert rows["loss_mask"][i].tolist() == [1.0] * len(following) + [0.0] * (20 - len(following))
        assert rows["position_ids"][i].tolist() == list(range(20))


def test_a_last_partial_sample_is_padded(prefix: str) -> None:
    source = GPTSample(IndexedRead(prefix), sequence_length=S, drop_last_partial_sequence=False)
    rows = [row for batch in Batch(source, micro_batch_size=1) for row in batch["labels"].tolist()]
    total = sum(map(len, DOCUMENTS))
    assert sum(row.count(IGNORE_LABEL) for row in rows) == len(rows) * S - (total - 1)


def test_a_last_block_that_is_not_full(prefix: str) -> None:
    count = len(list(samples(prefix)))
    whole, left = divmod(count, 8)
    assert left, "the test needs a rest"
    dropped = [len(list(Batch(samples(prefix), micro_batch_size=4, dp_rank=r, dp_size=2))) for r in (0, 1)]
    assert dropped == [whole, whole]
    kept = [
        [len(b["tokens"]) for b in Batch(samples(prefix), micro_batch_size=4, dp_rank=r, dp_size=2, drop_last=False)]
        for r in (0, 1)
    ]
    # The ranks stay in step, and no sample is lost.
    assert [len(k) for k in kept] == [whole + 1] * 2
    assert sum(map(sum, kept)) == count


@pytest.mark.parametrize("kind", ["gpt", "blend", "documents", "user"])
def test_resume_at_every_step(prefix: str, kind: str) -> None:
    def source() -> BaseNode[Any]:
        documents = DocumentSample(IndexedRead(prefix), max_seqlen=S, num_epochs=3)
        if kind == "gpt":
            return samples(prefix)
        if kind == "blend":
            return Blend([samples(prefix), samples(prefix, random_seed=8)], [2, 1], num_samples=25)
        if kind == "documents":
            return documents
        return Mapper(documents, lambda sample: {"tokens": sample["tokens"] + 1, "name": str(sample.ref)})

    def make() -> Batch:
        return Batch(source(), micro_batch_size=2, dp_rank=1, dp_size=2, sequence_length=S)

    assert check_resume_at_every_step(make, describe=describe) >= 6


def test_resume_on_another_number_of_ranks(prefix: str) -> None:
    def rows(dp_size: int, state: dict[str, Any] | None) -> list[list[int]]:
        nodes = [Batch(samples(prefix), micro_batch_size=1, dp_rank=r, dp_size=dp_size) for r in range(dp_size)]
        for node in nodes:
            node.reset(state)
        tokens = []
        while True:
            try:
                tokens += [next(node)["tokens"][0].tolist() for node in nodes]
            except StopIteration:
                return tokens

    everything = rows(1, None)
    first = Batch(samples(prefix), micro_batch_size=1, dp_rank=0, dp_size=4)
    first.reset(None)
    for _ in range(3):
        next(first)
    state = first.state_dict()
    for dp_size in (1, 2, 3):
        continued = rows(dp_size, state)
        assert continued == everything[12 : 12 + len(continued)]
        assert len(continued) >= len(everything) - 12 - dp_size


def test_skipping_is_reading_without_looking(prefix: str) -> None:
    read = Batch(samples(prefix), micro_batch_size=2, dp_rank=0, dp_size=2)
    skipped = Batch(samples(prefix), micro_batch_size=2, dp_rank=0, dp_size=2)
    read.reset(None)
    for _ in range(4):
        next(read)
    skipped.skip_to(4)
    assert torch.equal(next(skipped)["tokens"], next(read)["tokens"])
    skipped.skip_to(6)  # inside what has been drawn already
    next(read)
    expected = next(read)["tokens"]
    restored = Batch(samples(prefix), micro_batch_size=2, dp_rank=0, dp_size=2)
    restored.reset(skipped.state_dict())
    assert torch.equal(next(skipped)["tokens"], expected)
    assert torch.equal(next(restored)["tokens"], expected)
    with pytest.raises(ValueError, match="cannot go back"):
        skipped.skip_to(2)


def test_memory_is_used_again_only_when_nobody_looks(prefix: str) -> None:
    node = Batch(samples(prefix), micro_batch_size=1)
    node.reset(None)
    first = next(node)
    kept_view = first["tokens"][0, 3:]
    expected = kept_view.clone()
    place = first["tokens"].data_ptr()
    del first
    others = [next(node) for _ in range(4)]
    assert place not in {batch["tokens"].data_ptr() for batch in others}
    assert torch.equal(kept_view, expected)
    del kept_view, others
    assert place in {next(node)["tokens"].data_ptr() for _ in range(3)}
    # More batches than are kept: they just get new memory.
    many = [next(node) for _ in range(12)]
    assert len({batch["tokens"].data_ptr() for batch in many}) == 12


def test_user_keys(prefix: str) -> None:
    def add(sample: Any) -> dict[str, Any]:
        n = len(sample["tokens"])
        return {"tokens": sample["tokens"], "weight": torch.full((n, 2), float(n)), "name": f"n{n}"}

    source = Mapper(DocumentSample(IndexedRead(prefix), max_seqlen=S, shuffle=False), add)
    batch = next(iter(Batch(source, micro_batch_size=2, sequence_length=S, token_keys=("weight",))))
    assert batch["name"] == ["n6", "n16"]
    assert batch["weight"].shape == (2, S, 2)
    assert batch["weight"][0, :, 0].tolist() == [6.0] * 6 + [0.0] * 10
    assert batch["position_ids"].tolist() == [list(range(S))] * 2
    assert batch["labels"][0].tolist() == [*DOCUMENTS[0][1:], *[IGNORE_LABEL] * 11]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: Batch(s, micro_batch_size=0), ValueError, "micro_batch_size must be at least 1"),
        (lambda s: Batch(s, micro_batch_size=True), TypeError, "micro_batch_size must be an int"),
        (lambda s: Batch(s, micro_batch_size=2.0), TypeError, "micro_batch_size must be an int"),
        (lambda s: Batch(s, micro_batch_size=1, global_batch_size=4.0), TypeError, "global_batch_size must be an int"),
        (lambda s: Batch(s, micro_batch_size=1, pad_id="x"), TypeError, "pad_id must be an int"),
        (lambda s: Batch(s, micro_batch_size=1, dp_rank=0.0), TypeError, "dp_rank must be an int"),
        (lambda s: Batch(s, micro_batch_size=1, sequence_length=2.5), TypeError, "sequence_length must be an int"),
        (lambda s: Batch(s, micro_batch_size=1, dp_rank=2, dp_size=2), ValueError, "dp_rank 2 is outside the 2"),
        (
            lambda s: Batch(s, micro_batch_size=4, dp_size=2, global_batch_size=20),
            ValueError,
            "not a multiple of micro_batch_size 4 x dp_size 2 = 8; nearest valid: 16 and 24",
        ),
        (lambda s: Batch(s, micro_batch_size=4, dp_size=2, global_batch_size=3), ValueError, "nearest valid: 8$"),
        (lambda s: Batch(IterableWrapper([]), micro_batch_size=1), ValueError, "give sequence_length"),
        (lambda s: Batch(s, micro_batch_size=1, sequence_length=0), ValueError, "at least 1, got 0"),
    ],
)
def test_bad_arguments(prefix: str, make: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(samples(prefix))


def test_bad_samples(prefix: str) -> None:
    long = DocumentSample(IndexedRead(prefix), max_seqlen=50, shuffle=False)
    node = Batch(long, micro_batch_size=2, sequence_length=S)
    for _ in range(2):  # the failure stays
        with pytest.raises(ValueError, match="sample 1 of dataset 0 has 41 tokens, a row 16; raise sequence_length"):
            next(node)
    with pytest.raises(ValueError, match="token files do not"):
        next(Batch(samples(prefix), micro_batch_size=1, token_keys=("weight",)))
    uneven = IterableWrapper([{"tokens": [1], "a": 1}, {"tokens": [2]}])
    with pytest.raises(ValueError, match="has no key 'a'"):
        next(Batch(uneven, micro_batch_size=2, sequence_length=4))
    with pytest.raises(ValueError, match="reset_position_ids needs eod_token"):
        GPTSample(IndexedRead(prefix), sequence_length=S, reset_position_ids=True)


def test_a_state_that_was_tampered_with(prefix: str) -> None:
    node = Batch(samples(prefix), micro_batch_size=2)
    node.reset(None)
    next(node)
    state = node.state_dict()
    for ahead in (-1, 3, 1.5, None, True):
        with pytest.raises(StateMismatchError, match="ahead must be a number of samples"):
            Batch(samples(prefix), micro_batch_size=2).reset({**state, "ahead": ahead})


def test_num_microbatches(prefix: str) -> None:
    assert Batch(samples(prefix), micro_batch_size=2, dp_size=3, global_batch_size=24).num_microbatches == 4


def test_large_reads_on_several_threads(tmp_path: Path) -> None:
    # Enough tokens for helpers to be used; the same reads on one thread are the reference.
    from tdp_megatron import _C

    documents = [np.random.default_rng(i).integers(0, 60000, 3000 + 17 * i) for i in range(120)]
    big = write_corpus(tmp_path / "big", documents)
    wide = {"sequence_length": 4096, "eod_token": 5, "eod_mask_loss": True, "reset_position_ids": True}

    def read() -> list[list[torch.Tensor]]:
        return [describe(b) for b in Batch(GPTSample(IndexedRead(big), **wide), micro_batch_size=40)]  # type: ignore[arg-type]

    try:
        _C.set_num_threads(1)
        expected = read()
        _C.set_num_threads(4)
        found = read()
    finally:
        _C.set_num_threads(0)
    assert len(expected) == len(found) == 2
    for a, b in zip(expected, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match=r"\[0, 64\]"):
        _C.set_num_threads(-1)
