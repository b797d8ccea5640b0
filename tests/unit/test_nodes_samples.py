"""IndexedRead, GPTSample, DocumentSample: the right tokens, labels and provenance."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.datasets.documents import epoch_order
from tdp_megatron.errors import FormatError, StateMismatchError
from tdp_megatron.nodes import Blend, DocumentSample, GPTSample, IndexedRead
from tdp_megatron.testing import check_resume_at_every_step, write_corpus
from tdp_megatron.types import IGNORE_LABEL, Sample

rng = np.random.default_rng(3)
DOCUMENTS = [rng.integers(0, 1000, n).tolist() for n in [5, 0, 17, 1, 40, 8, 0, 3, 22, 9]]
TOKENS = [t for d in DOCUMENTS for t in d]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "with space, comma é", DOCUMENTS)


def describe(sample: Sample) -> list[Any]:
    return [sample.ref, sample.seqlen, sample["tokens"], sample["labels"], sample["loss_mask"], sample["position_ids"]]


@pytest.mark.parametrize("mmap", [True, False])
def test_indexed_read_gives_sequences_in_file_order(prefix: str, mmap: bool) -> None:
    node = IndexedRead(prefix, mmap=mmap)
    samples = list(node)
    assert [s["tokens"].tolist() for s in samples] == DOCUMENTS
    assert [s.ref for s in samples] == [(0, i) for i in range(len(DOCUMENTS))]
    last = samples[-1]
    assert last["labels"].tolist() == [*DOCUMENTS[-1][1:], IGNORE_LABEL]
    assert last["loss_mask"].tolist() == [1.0] * (len(DOCUMENTS[-1]) - 1) + [0.0]
    assert sum(s.num_loss_tokens for s in samples) == sum(int(s["loss_mask"].sum()) for s in samples)


def test_a_sample_is_lazy_and_a_mapping(prefix: str) -> None:
    sample = next(iter(DocumentSample(IndexedRead(prefix), max_seqlen=100, shuffle=False)))
    assert sample.seqlen == 5
    assert not sample.is_materialised
    assert "lazy" in repr(sample)
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert sample.is_materialised
    assert sample["tokens"].dtype == sample["labels"].dtype == sample["position_ids"].dtype == torch.int64
    assert sample["loss_mask"].dtype == torch.float32
    assert "nothing" not in sample


def test_splits_by_sequence(prefix: str) -> None:
    counts = [len(list(IndexedRead(prefix, split="5,3,2", split_name=name))) for name in ("train", "valid", "test")]
    assert counts == [5, 3, 2]
    assert list(IndexedRead(prefix, split="1,0,1", split_name="valid")) == []


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_gpt_samples_follow_the_indices(prefix: str, extra: bool, mmap: bool) -> None:
    """Every sample is S tokens of its shuffled documents laid end to end, from the sample index's own arithmetic."""
    node = GPTSample(
        IndexedRead(prefix, mmap=mmap),
        sequence_length=8,
        num_samples=33,
        add_extra_token_to_sequence=extra,
        drop_last_partial_sequence=False,
    )
    samples = list(node)
    indices = node._reader.indices  # type: ignore[union-attr]
    stream = [t for d in indices.document_index.tolist() for t in DOCUMENTS[d]]
    assert len(samples) == len(node) >= 33
    for sample, row in zip(samples, indices.shuffle_index.tolist(), strict=True):
        tokens = stream[row * 8 : row * 8 + 8 + extra]
        inputs = tokens[: len(tokens) - extra]
        assert sample["tokens"].tolist() == inputs
        assert sample.seqlen == len(inputs)
        assert sample["labels"].tolist() == (tokens[1:] if extra else [*tokens[1:], IGNORE_LABEL])
        assert sample.num_loss_tokens == int(sample["loss_mask"].sum())
    assert {s.seqlen for s in samples} > {8}  # the last partial one is there, too


def test_eod_mask_loss(prefix: str) -> None:
    eod = DOCUMENTS[0][2]
    node = DocumentSample(IndexedRead(prefix), max_seqlen=100, shuffle=False, eod_token=eod, eod_mask_loss=True)
    sample = next(iter(node))
    assert sample["loss_mask"].tolist() == [0.0 if t == eod or i == 4 else 1.0 for i, t in enumerate(DOCUMENTS[0])]
    assert sample.num_loss_tokens == -1


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_overlong_documents(prefix: str, overflow: Any) -> None:
    node = DocumentSample(IndexedRead(prefix), max_seqlen=16, overflow=overflow, shuffle=False)
    samples = list(node)
    pieces: list[list[int]] = []
    for document in DOCUMENTS:
        runs = [document[i : i + 16] for i in range(0, len(document), 16)]
        if overflow == "split" or len(document) <= 16:
            pieces += runs
        elif overflow == "truncate":
            pieces.append(runs[0])
    assert [s["tokens"].tolist() for s in samples] == pieces
    table = node.table
    assert (table.num_documents, table.num_empty, table.num_overlong) == (10, 2, 3)
    assert sum(len(p) for p in pieces) + table.num_dropped_tokens == len(TOKENS)
    for sample in samples:  # a run that does not end its document knows its next token
        document = DOCUMENTS[int(table.documents[sample.ref[1]])]
        begin = document.index(sample["tokens"][0].item())
        end = begin + sample.seqlen
        last = document[end] if end < len(document) else IGNORE_LABEL
        assert sample["labels"].tolist() == [*document[begin + 1 : end], last]
        assert sample.num_loss_tokens == int(sample["loss_mask"].sum())


def test_overlong_documents_can_be_refused(prefix: str) -> None:
    node = DocumentSample(IndexedRead(prefix), max_seqlen=16, overflow="error")
    with pytest.raises(ValueError, match="document 4 has 40 tokens"):
        next(node)


def test_epochs_are_permutations_that_differ(prefix: str) -> None:
    node = DocumentSample(IndexedRead(prefix), max_seqlen=16, num_epochs=3, seed=5)
    ids = [s.ref[1] for s in node]
    size = node.samples_per_epoch
    epochs = [ids[i * size : (i + 1) * size] for i in range(3)]
    assert len(ids) == 3 * size
    assert all(sorted(e) == list(range(size)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_epoch_order_never_changes() -> None:
    """A saved position is only worth something if this holds for ever."""
    assert epoch_order(8, 1234, 0, shuffle=True).tolist() == [3, 4, 2, 1, 7, 6, 0, 5]
    assert epoch_order(8, 1234, 1, shuffle=True).tolist() == [7, 6, 1, 4, 5, 2, 3, 0]


def nodes(prefix: str) -> dict[str, Any]:
    return {
        "indexed": lambda: IndexedRead(prefix),
        "gpt": lambda: GPTSample(IndexedRead(prefix), sequence_length=7, num_samples=40),
        "documents": lambda: DocumentSample(IndexedRead(prefix), max_seqlen=16, num_epochs=2),
        "endless": lambda: DocumentSample(IndexedRead(prefix), max_seqlen=16, num_epochs=None),
        "blend": lambda: Blend(
            [
                DocumentSample(IndexedRead(prefix), max_seqlen=16, num_epochs=None),
                GPTSample(IndexedRead(prefix), sequence_length=7, num_samples=40),
            ],
            [0.7, 0.3],
            num_samples=30,
        ),
    }


@pytest.mark.parametrize("name", ["indexed", "gpt", "documents", "endless", "blend"])
def test_resume_at_every_step(prefix: str, name: str) -> None:
    assert check_resume_at_every_step(nodes(prefix)[name], describe=describe, max_items=45) > 9


@pytest.mark.parametrize("name", ["indexed", "gpt", "documents", "blend"])
def test_blocks_are_the_same_samples(prefix: str, name: str) -> None:
    make = nodes(prefix)[name]
    one_by_one = [(s.ref, s.seqlen, s["tokens"].tolist()) for s in make()]
    node, blocks = make(), []
    for size in [1, 0, 5, 3, 100, 7]:
        blocks += [(s.ref, s.seqlen, s["tokens"].tolist()) for s in node.take(size)]
    assert blocks == one_by_one
    with pytest.raises(ValueError, match="negative"):
        node.take(-1)


def test_nodes_pickle_before_reset_and_share_nothing(prefix: str) -> None:
    for make in nodes(prefix).values():
        node = make()
        twin, copied = pickle.loads(pickle.dumps(node)), copy.deepcopy(node)
        first = next(node)["tokens"]
        assert torch.equal(next(twin)["tokens"], first)
        assert torch.equal(next(copied)["tokens"], first)


def test_a_state_of_another_configuration_names_the_field(prefix: str) -> None:
    def make(seed: int = 1, length: int = 7) -> GPTSample:
        return GPTSample(IndexedRead(prefix), sequence_length=length, random_seed=seed)

    node = make()
    next(node)
    with pytest.raises(StateMismatchError, match="random_seed was 1 and is 2"):
        make(seed=2).reset(node.state_dict())
    with pytest.raises(StateMismatchError, match="sequence_length was 7 and is 8"):
        make(length=8).reset(node.state_dict())
    with pytest.raises(StateMismatchError, match="node was 'GPTSample' and is 'IndexedRead'"):
        IndexedRead(prefix).reset(node.state_dict())
    with pytest.raises(StateMismatchError, match="version 99"):
        make().reset({**node.state_dict(), "version": 99})
    with pytest.raises(StateMismatchError, match="no 'position'"):
        make().reset({k: v for k, v in node.state_dict().items() if k != "position"})
    with pytest.raises(StateMismatchError, match="position must be"):
        make().reset({**node.state_dict(), "position": -1})


def test_a_state_of_other_data_is_refused(prefix: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [*DOCUMENTS[:-1], DOCUMENTS[-1][:-1]])
    node = IndexedRead(prefix)
    next(node)
    with pytest.raises(StateMismatchError, match="tokens was"):
        IndexedRead(other).reset(node.state_dict())


def test_the_same_data_elsewhere_is_accepted(prefix: str, tmp_path: Path) -> None:
    moved = write_corpus(tmp_path / "moved", DOCUMENTS)
    node = IndexedRead(prefix)
    next(node)
    again = IndexedRead(moved)
    again.reset(node.state_dict())
    assert next(again).ref == (0, 1)


def test_errors_stay_until_reset(tmp_path: Path) -> None:
    node = IndexedRead(tmp_path / "missing")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="missing"):
            next(node)
    write_corpus(tmp_path / "missing", DOCUMENTS)
    node.reset(None)
    assert next(node).seqlen == 5


def test_the_end_stays_the_end(prefix: str) -> None:
    node = IndexedRead(prefix)
    list(node)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(node)


def test_a_vocabulary_the_file_cannot_come_from(prefix: str) -> None:
    with pytest.raises(FormatError, match="uint16"):
        next(IndexedRead(prefix, vocab_size=151_669))
    assert next(IndexedRead(prefix, vocab_size=50_257)).seqlen == 5


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: GPTSample(s, sequence_length=0), ValueError, "sequence_length must be at least 1"),
        (lambda s: GPTSample(s, sequence_length=4, num_samples=0), ValueError, "num_samples must be at least 1"),
        (lambda s: GPTSample(s, sequence_length=4, random_seed=-1), ValueError, "random_seed must be in"),
        (lambda s: GPTSample(s, sequence_length=4, eod_mask_loss=True), ValueError, "needs eod_token"),
        (lambda s: GPTSample([1, 2], sequence_length=4), TypeError, "must be an IndexedRead"),
        (lambda s: DocumentSample(s, max_seqlen=0), ValueError, "max_seqlen must be at least 1"),
        (lambda s: DocumentSample(s, max_seqlen=4, overflow="cut"), ValueError, "overflow must be one of"),
        (lambda s: DocumentSample(s, max_seqlen=4, num_epochs=0), ValueError, "num_epochs must be at least 1"),
        (lambda s: GPTSample(s, sequence_length=4.0), TypeError, "sequence_length must be an int, got 4.0"),
        (lambda s: GPTSample(s, sequence_length=4, num_samples=2.5), TypeError, "num_samples must be an int"),
        (lambda s: GPTSample(s, sequence_length=4, random_seed=1.5), TypeError, "random_seed must be an int"),
        (lambda s: DocumentSample(s, max_seqlen=True), TypeError, "max_seqlen must be an int"),
        (lambda s: DocumentSample(s, max_seqlen=4, num_epochs=1.5), TypeError, "num_epochs must be an int"),
        (lambda s: DocumentSample(s, max_seqlen=4, seed=None), TypeError, "seed must be an int"),
        (lambda s: IndexedRead("x", split="-1,2"), ValueError, "negative"),
        (lambda s: IndexedRead("x", split_name="dev"), ValueError, "train, valid, test"),
    ],
)
def test_bad_arguments(prefix: str, make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(IndexedRead(prefix))


def test_a_split_too_small_is_an_error_not_a_loop(prefix: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        next(GPTSample(IndexedRead(prefix, split="99,1,0", split_name="valid"), sequence_length=4, num_samples=9))
    with pytest.raises(ValueError, match="one sample needs 513"):
        next(GPTSample(IndexedRead(prefix), sequence_length=512))
    with pytest.raises(ValueError, match="give no sample"):
        next(DocumentSample(IndexedRead(prefix, split="99,1,0", split_name="valid"), max_seqlen=4))
