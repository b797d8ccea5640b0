"""How fast do fixed-length samples come out of token files?

Batches of 8 x 4096 tokens in a random order over a uint16 corpus of short (mean 600) and of long (mean 60,000)
documents in the page cache.

* ``megatron``: megatron-core's ``GPTDataset`` and torch's ``default_collate``.
* ``litdata``, ``grain``: LitData's ``TokensLoader`` and Grain's ``MapDataset`` over ArrayRecord, both over blocks of
  S + 1 tokens cut in advance and shuffled, tokens and labels as int64; no loss mask, no position ids, no documents.
  Grain reads in the process itself, records one by one. ``grain tokens`` is without labels. Left out where they are
  not installed (the extra ``peers``).
* ``batch``: ours, the nodes ``IndexedRead -> GPTSample -> Batch``: tokens, labels, loss mask, position ids.
* ``batch instant``: the same in the order that needs no index; ``batch documents``: with ``cu_seqlens`` of documents.
* ``read``: ours, the native read alone.
* ``limit``: contiguous tokens converted twice, loss mask and position ids filled, into memory in use already.

    python benchmarks/fetch.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import Case, main, optional, timed

from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.nodes import Batch, GPTSample, IndexedRead
from tdp_megatron.nodes.gpt_sample import Order
from tdp_megatron.ops import RowBuffers
from tdp_megatron.reading import native_readers

ROWS, WIDTH = 8, 4096
BATCH_TOKENS = ROWS * WIDTH


def write_corpus(prefix: str, mean: int, tokens: int) -> npt.NDArray[np.uint16]:
    rng = np.random.default_rng(mean)
    lengths = np.maximum(rng.lognormal(np.log(mean) - 0.405, 0.9, max(tokens // mean, 4)), 1).astype(np.int64)
    values = rng.integers(0, 50_000, int(lengths.sum())).astype(np.uint16)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_sequences(values, lengths, np.ones(len(lengths), dtype=np.int64))
        builder.finalize(f"{prefix}.idx")
    return values


def by_node(prefix: str, batches: int, order: Order = "megatron", documents: bool = False) -> Callable[[], Any]:
    source = GPTSample(IndexedRead(prefix), sequence_length=WIDTH, num_samples=10**6, order=order)
    node = Batch(source, micro_batch_size=ROWS, inter_document_masking=documents)
    node.reset(None)

    def run() -> None:
        for _ in range(batches):
            next(node)

    return run


def by_read(prefix: str, batches: int) -> Callable[[], Any]:
    block = GPTSample(IndexedRead(prefix), sequence_length=WIDTH, num_samples=10**6).take(10**6)
    readers = native_readers(block.readers)
    rows = RowBuffers(ROWS, WIDTH)
    at = [0]

    def run() -> None:
        for _ in range(batches):
            rows.read(readers, None, block.sample_ids, at[0])
            at[0] += ROWS

    return run


def limit(values: npt.NDArray[np.uint16], batches: int) -> Callable[[], Any]:
    tokens, labels = np.zeros(BATCH_TOKENS, dtype=np.int64), np.zeros(BATCH_TOKENS, dtype=np.int64)
    loss_mask = np.zeros(BATCH_TOKENS, dtype=np.float32)
    counted = np.tile(np.arange(WIDTH, dtype=np.int64), ROWS)
    position_ids = np.zeros_like(counted)

    def run() -> None:
        for i in range(batches):
            begin = i * BATCH_TOKENS % (len(values) - BATCH_TOKENS)
            part = values[begin : begin + BATCH_TOKENS]
            np.copyto(tokens, part)
            np.copyto(labels, part)
            loss_mask.fill(1.0)
            np.copyto(position_ids, counted)

    return run


class _Tokenizer:
    """What Megatron's configuration asks of a tokenizer."""

    eod, pad, vocab_size = 50_000, 50_001, 50_002
    unique_identifiers = {"class": "none"}  # noqa: RUF012


def megatron(prefix: str, batches: int) -> Callable[[], Any] | None:
    gpt, _ = optional("megatron.core.datasets.gpt_dataset")
    indexed, _ = optional("megatron.core.datasets.indexed_dataset")
    utils, _ = optional("megatron.core.datasets.utils")
    if gpt is None or indexed is None or utils is None:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    config = gpt.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=WIDTH,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=f"{prefix}-cache",
    )
    low_level = indexed.IndexedDataset(prefix)
    every = np.arange(len(low_level), dtype=np.int32)
    dataset = gpt.GPTDataset(low_level, prefix, every, 10**6, utils.Split.train, config)
    at = [0]

    def run() -> None:
        for _ in range(batches):
            torch.utils.data.default_collate([dataset[i] for i in range(at[0], at[0] + ROWS)])
            at[0] += ROWS

    return run


def litdata(folder: str, values: npt.NDArray[np.uint16], batches: int) -> Callable[[], Any] | str:
    module, reason = optional("litdata")
    if module is None:
        return reason
    try:
        from litdata.streaming.cache import Cache
        from litdata.streaming.item_loader import TokensLoader

        os.makedirs(folder)
        loader = TokensLoader(block_size=WIDTH + 1)
        cache = Cache(folder, chunk_bytes="16MB", item_loader=loader)
        blocks = len(values) // (WIDTH + 1)
        for i in range(blocks):
            cache[i] = torch.from_numpy(values[i * (WIDTH + 1) : (i + 1) * (WIDTH + 1)].astype(np.int32))
        cache.done()
        cache.merge()
        dataset = module.StreamingDataset(folder, item_loader=TokensLoader(block_size=WIDTH + 1), shuffle=True)
        stream = iter(module.StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0))
    except Exception as error:  # a peer that does not run is told, and does not stop the others
        return f"litdata did not run: {type(error).__name__}: {error}"

    def run() -> None:
        nonlocal stream
        for _ in range(batches):
            try:
                block = next(stream)
            except StopIteration:
                stream = iter(module.StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0))
                block = next(stream)
            block[:, :-1].long(), block[:, 1:].long()

    return run


def grain(folder: str, values: npt.NDArray[np.uint16], batches: int, labels: bool) -> Callable[[], Any] | str:
    module, reason = optional("grain")
    records, no_records = optional("array_record.python.array_record_module")
    if module is None or records is None:
        return reason or no_records
    try:
        path = os.path.join(folder, f"blocks-{labels}.array_record")
        os.makedirs(folder, exist_ok=True)
        writer = records.ArrayRecordWriter(path, "group_size:1")
        for i in range(len(values) // (WIDTH + 1)):
            writer.write(values[i * (WIDTH + 1) : (i + 1) * (WIDTH + 1)].tobytes())
        writer.close()
        dataset = module.MapDataset.source(module.sources.ArrayRecordDataSource(path)).seed(1234).shuffle().repeat()
        blocks = dataset.map(lambda record: np.frombuffer(record, dtype=np.uint16)).batch(ROWS)
        # Threads of its own would read ahead; in processor time they cost what they take.
        stream = iter(blocks.to_iter_dataset(module.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        next(stream)
    except Exception as error:
        return f"grain did not run: {type(error).__name__}: {error}"

    def run() -> None:
        for _ in range(batches):
            block = torch.from_numpy(next(stream).astype(np.int64))
            if labels:
                block[:, :-1].contiguous(), block[:, 1:].contiguous()

    return run


def cases(smoke: bool, repeat: int) -> Iterator[Case]:
    tokens, batches = (1_000_000, 5) if smoke else (60_000_000, 200)
    for name, mean in (("short documents", 600), ("long documents", 60_000)):
        with tempfile.TemporaryDirectory(prefix="tdp-bench-") as folder:
            prefix = os.path.join(folder, "corpus")
            values = write_corpus(prefix, mean, tokens)
            notes: dict[str, Any] = {}
            ways: dict[str, Callable[[], Any]] = {"limit": limit(values, batches)}
            theirs = megatron(prefix, batches)
            if theirs is None:
                notes["megatron"] = optional("megatron.core")[1] or "megatron-core has no GPTDataset here"
            else:
                ways["megatron"] = theirs
            blocks = os.path.join(folder, "grain")
            others = {
                "litdata": litdata(os.path.join(folder, "litdata"), values, batches),
                "grain": grain(blocks, values, batches, labels=True),
                "grain tokens": grain(blocks, values, batches, labels=False),
            }
            for peer, way in others.items():
                if isinstance(way, str):
                    notes[peer] = way
                else:
                    ways[peer] = way
            ways["batch"], ways["read"] = by_node(prefix, batches), by_read(prefix, batches)
            ways["batch instant"] = by_node(prefix, batches, order="instant")
            ways["batch documents"] = by_node(prefix, batches, documents=True)
            timings = timed(ways, repeat)
            for peer in set(others) & set(timings):
                notes[f"batch_times_{peer}"] = round(timings[peer].median / timings["batch"].median, 2)
            yield Case(name, timings, batches * BATCH_TOKENS, "tokens/s", "megatron", "limit", notes)


if __name__ == "__main__":
    main(__doc__ or "", cases)
