"""How fast do samples come out of files that are not in memory?

Batches of 8 x 4096 tokens in a random order over a uint16 corpus on the disk of the temporary folder, whose pages are
dropped from the page cache before every round. Wall time: waiting for the disk takes no processor time.

* ``touched``: pages are waited for one by one, as they are touched.
* ``asked``: ours, which notices the waiting and asks for the pages of a batch, and of the next one, together.
* ``in memory``: the same once all pages are there.

    python benchmarks/cold.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from common import Case, Timing, main
from fetch import BATCH_TOKENS, ROWS, WIDTH, write_corpus

from tdp_megatron import _C
from tdp_megatron.nodes import Batch, GPTSample, IndexedRead


def drop_pages(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(prefix: str, batches: int, when: str, send: Connection) -> None:
    """Send the seconds of a round, and the bytes it brought from the disk."""
    _C.set_read_ahead(when)
    node = Batch(GPTSample(IndexedRead(prefix), sequence_length=WIDTH, random_seed=7), micro_batch_size=ROWS)
    node.reset(None)
    before, begin = bytes_read(), time.perf_counter()
    for _ in range(batches):
        next(node)
    send.send((time.perf_counter() - begin, bytes_read() - before))


def one_round(prefix: str, batches: int, when: str) -> tuple[float, int]:
    """In a process of its own: pages that are mapped are not dropped."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=read, args=(prefix, batches, when, sender))
    process.start()
    sender.close()
    seconds, num_bytes = receiver.recv()
    process.join()
    return float(seconds), int(num_bytes)


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cases(smoke: bool, repeat: int) -> Iterator[Case]:
    tokens, batches = (1_000_000, 5) if smoke else (400_000_000, 400)
    with tempfile.TemporaryDirectory(prefix="tdp-bench-") as folder:
        prefix = os.path.join(folder, "corpus")
        write_corpus(prefix, 600, tokens)
        rounds: dict[str, list[tuple[float, int]]] = {"touched": [], "asked": [], "in memory": []}
        for _ in range(repeat):
            for way, when in (("touched", "never"), ("asked", "slow")):
                drop_pages(f"{prefix}.bin")
                rounds[way].append(one_round(prefix, batches, when))
            rounds["in memory"].append(one_round(prefix, batches, "slow"))
        timings, notes = {}, {}
        for way, found in rounds.items():
            seconds = [round_seconds for round_seconds, _ in found]
            timings[way] = Timing(statistics.median(seconds), min(seconds), max(seconds))
            volume = statistics.median(num_bytes for _, num_bytes in found)
            notes[f"{way}: bytes from the disk per byte used"] = round(volume / (batches * BATCH_TOKENS * 2), 2)
        yield Case("cold", timings, batches * BATCH_TOKENS, "tokens/s", "touched", notes=notes)


if __name__ == "__main__":
    main(__doc__ or "", cases)
