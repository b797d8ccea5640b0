"""Memory of batches that is used again: never under a batch that somebody still looks at."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode

from tdp_megatron import _C
from tdp_megatron.nodes import Batch, Blend, DocumentSample, GPTSample, IndexedRead, Prefetch
from tdp_megatron.ops import BatchBuffers, RowBuffers
from tdp_megatron.testing import write_corpus

S = 64
KEYS = ("tokens", "labels", "loss_mask", "position_ids")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 60000, n) for n in rng.integers(1, 200, 300)]
    return write_corpus(tmp_path_factory.mktemp("buffers") / "corpus", documents)


def gpt(prefix: str, **options: Any) -> GPTSample:
    return GPTSample(IndexedRead(prefix), sequence_length=S, num_samples=400, **options)


GRAPHS: dict[str, Callable[[str], BaseNode[dict[str, torch.Tensor]]]] = {
    "rows": lambda p: Batch(gpt(p), micro_batch_size=2),
    "documents apart": lambda p: Batch(gpt(p), micro_batch_size=2, inter_document_masking=True),
    "instant": lambda p: Batch(gpt(p, order="instant"), micro_batch_size=2),
    "blend": lambda p: Batch(Blend([gpt(p), gpt(p, random_seed=5)], [0.5, 0.5]), micro_batch_size=2),
    "not mapped": lambda p: Batch(
        GPTSample(IndexedRead(p, mmap=False), sequence_length=S, num_samples=400), micro_batch_size=2
    ),
    "padded documents": lambda p: Batch(
        DocumentSample(IndexedRead(p), max_seqlen=S), micro_batch_size=2, sequence_length=S
    ),
    "another thread": lambda p: Prefetch(Batch(gpt(p), micro_batch_size=2), depth=3),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("num_kept", [1, 2, 7, 8, 9, 30])
def test_the_last_batches_never_change(prefix: str, graph: str, num_kept: int) -> None:
    node = GRAPHS[graph](prefix)
    node.reset(None)
    kept: deque[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = deque(maxlen=num_kept)
    for _ in range(60):
        batch = next(node)
        kept.append((batch, {key: tensor.clone() for key, tensor in batch.items()}))
        del batch
        for then, copy in kept:
            for key, value in copy.items():
                assert torch.equal(then[key], value), key
    if isinstance(node, Prefetch):
        node.shutdown()


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch["tokens"],
        lambda batch: batch["labels"][1, 5:9],
        lambda batch: batch["loss_mask"].view(-1)[3:],
        lambda batch: batch["position_ids"].t(),
        lambda batch: batch["tokens"].detach(),
        lambda batch: batch["tokens"].numpy(),
        lambda batch: batch["tokens"].numpy()[0, 2:],
        lambda batch: memoryview(batch["labels"].numpy()),
        lambda batch: batch["tokens"].untyped_storage(),
        lambda batch: torch.from_dlpack(batch["tokens"]),
        lambda batch: np.from_dlpack(batch["tokens"]),
        lambda batch: batch["tokens"].view(torch.uint8),
        lambda batch: lambda: batch["tokens"],
    ],
)
def test_any_view_keeps_its_batch(prefix: str, keep: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    def content(view: Any) -> list[Any]:
        found = view() if callable(view) else view
        return list(found) if isinstance(found, torch.UntypedStorage) else np.asarray(found).reshape(-1).tolist()

    node = Batch(gpt(prefix), micro_batch_size=2)
    node.reset(None)
    next(node)
    view = keep(next(node))
    expected = content(view)
    gc.collect()
    for _ in range(20):
        next(node)
    assert content(view) == expected


def test_what_is_written_into_a_batch_is_gone_in_the_next(prefix: str) -> None:
    node, untouched = (Batch(gpt(prefix), micro_batch_size=2) for _ in range(2))
    for batch, expected in zip(node, untouched, strict=True):
        for key in KEYS:
            assert torch.equal(batch[key], expected[key])
            batch[key].fill_(-7)


@pytest.mark.parametrize("graph", ["rows", "not mapped"])
def test_memory_of_dropped_batches_is_used_again(prefix: str, graph: str) -> None:
    node = GRAPHS[graph](prefix)
    node.reset(None)
    places = set()
    for _ in range(30):
        places.add(next(node)["tokens"].data_ptr())
    assert len(places) == 1
    held = [next(node) for _ in range(20)]
    assert len({batch["tokens"].data_ptr() for batch in held}) == 20
    del held
    assert {next(node)["tokens"].data_ptr() for _ in range(10)} == places


def test_vectors_do_not_cross_cache_lines(prefix: str) -> None:
    node = Batch(gpt(prefix), micro_batch_size=3)
    held = [next(node) for _ in range(8)]
    assert all(batch[key].data_ptr() % 64 == 0 for batch in held for key in KEYS)


def test_two_threads_get_different_memory(prefix: str) -> None:
    # The lock of the interpreter is given up while a set is filled.
    rows = RowBuffers(2, S, pin=False)
    block = gpt(prefix).take(400)
    reader = block.readers[0]
    expected = [RowBuffers(2, S, pin=False).read([reader.native()], None, block.sample_ids, 2 * i) for i in range(100)]  # type: ignore[attr-defined]
    wrong: list[int] = []

    def work(begin: int) -> None:
        kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=2)
        for i in range(begin, 100, 3):
            kept.append((i, rows.read([reader.native()], None, block.sample_ids, 2 * i)))  # type: ignore[attr-defined]
            wrong.extend(j for j, batch in kept if any(not torch.equal(batch[k], expected[j][k]) for k in KEYS))

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_outputs_are_refused(prefix: str) -> None:
    block = gpt(prefix).take(4)
    reader = block.readers[0].native()  # type: ignore[attr-defined]
    good = {key: np.zeros((2, S), dtype=np.float32 if key == "loss_mask" else np.int64) for key in KEYS}
    documents = {"cu_seqlens": np.zeros((2, S + 1), dtype=np.int32), "max_seqlen": np.zeros(2, dtype=np.int32)}

    def read(readers: Any = (reader,), index: Any = None, first: int = 0, **changes: Any) -> None:
        _C.read_rows(list(readers), index, block.sample_ids, first, **{**good, **changes})

    read(**documents)
    read_only = good["labels"].copy()
    read_only.flags.writeable = False
    for changes, error, message in [
        ({"labels": np.zeros((2, S - 1), dtype=np.int64)}, ValueError, "labels must have shape"),
        ({"tokens": np.zeros(2 * S, dtype=np.int64)}, ValueError, "tokens must have two dimensions"),
        ({"tokens": np.zeros((2, S), dtype=np.int32)}, TypeError, "incompatible"),
        ({"labels": read_only}, ValueError, "not writeable"),
        ({"first": 3}, ValueError, "2 rows from sample 3 on, there are 4"),
        ({"first": -1}, ValueError, "2 rows from sample -1 on"),
        ({"cu_seqlens": documents["cu_seqlens"]}, ValueError, "cu_seqlens and max_seqlen go together"),
        ({**documents, "max_seqlen": np.zeros(3, dtype=np.int32)}, ValueError, "max_seqlen has 3 elements"),
        ({"readers": ()}, ValueError, "only where there is one reader, there are 0"),
        ({"readers": (reader, reader)}, ValueError, "only where there is one reader, there are 2"),
        ({"index": np.array([0, 1])}, IndexError, r"reader_index\[1\] is 1, there are 1 readers"),
        ({"index": np.array([0])}, ValueError, "reader_index has 1 elements, expected 2"),
    ]:
        with pytest.raises(error, match=message):
            read(**changes)  # type: ignore[arg-type]
    unmapped = GPTSample(IndexedRead(prefix, mmap=False), sequence_length=S).take(2).readers[0]
    with pytest.raises(ValueError, match="no file in memory to read from"):
        read(readers=(unmapped.native(),))  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to pin memory for")
def test_pinned_batches_survive_their_copies(prefix: str) -> None:
    node = Batch(gpt(prefix), micro_batch_size=2)
    plain = RowBuffers(2, S, pin=False)
    block = gpt(prefix).take(400)
    reader = block.readers[0].native()  # type: ignore[attr-defined]
    copies = []
    for _ in range(60):
        batch = next(node)
        assert all(tensor.is_pinned() for tensor in batch.values())
        copies.append({key: tensor.to("cuda", non_blocking=True) for key, tensor in batch.items()})
        del batch
    torch.cuda.synchronize()
    for i, copy in enumerate(copies):
        expected = plain.read([reader], None, block.sample_ids, 2 * i)
        assert all(torch.equal(copy[key].cpu(), expected[key]) for key in KEYS)


def test_buffers_with_no_room(prefix: str) -> None:
    specs = {"a": (np.dtype(np.int64), (2, 3)), "b": (np.dtype(np.uint8), (2, 3, 4))}
    buffers = BatchBuffers(specs, most=0, pin=False)
    arrays, tensors = buffers.take()
    assert {key: array.shape for key, array in arrays.items()} == {"a": (2, 3), "b": (2, 3, 4)}
    arrays["b"][1, 2, 3] = 9
    assert int(tensors["b"][1, 2, 3]) == 9
    assert buffers.take()[1]["a"].data_ptr() != tensors["a"].data_ptr()
