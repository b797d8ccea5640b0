"""How long does a blend of many files take to be ready?

A blend of 1000 small prefixes, built through ``BlendedMegatronDatasetBuilder``, CPU seconds after the imports, each in
a process of its own:

* ``cold``: no index caches yet.
* ``warm``: the caches are there.
* ``fast``: with ``fast_cache_load``, ``defer_npy_index_mmap`` and the counts of all files in a manifest.

* ``instant``: 5000 files of 1e12 tokens in the order that needs no index, from the manifest to the first 1024 samples
  planned; at a later position as well.

``megatron`` is megatron-core, ``ours`` the same classes of this package. ``import`` is what importing costs beyond
``import torch``. ``fds`` are descriptors held when the blend is ready, ``first sample`` the time until the first
sample has been read as well.

    python benchmarks/startup.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Case, Timing, main, optional, timed

from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.nodes import Blend, GPTSample, IndexedRead

_MODULES = {
    "megatron": (
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "megatron.core.datasets.gpt_dataset",
    ),
    "ours": ("tdp_megatron.datasets.builder", "tdp_megatron.datasets.gpt"),
}

_BUILD = """
import importlib, json, os, sys, time, warnings, logging
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
builder_module, gpt_module, folder, prefixes, fast, manifest, samples = json.loads(sys.argv[1])
import torch
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
begin = time.process_time()
builder = importlib.import_module(builder_module)
gpt = importlib.import_module(gpt_module)
imported = time.process_time() - begin
class Tokenizer:
    eod, pad, vocab_size = 65000, 64999, 65001
    unique_identifiers = {"class": "none"}
extra = {}
if fast:
    extra = dict(fast_cache_load=True, defer_npy_index_mmap=True, sequences_per_dataset=json.load(open(manifest)))
config_class = getattr(gpt, "GPTDatasetConfig", None)
if config_class is None:
    config_class = importlib.import_module("tdp_megatron.datasets.config").GPTDatasetConfig
config = config_class(
    random_seed=1, sequence_length=64, blend_per_split=[(prefixes, [1.0] * len(prefixes)), None, None],
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    create_attention_mask=False, path_to_cache=folder, num_dataset_builder_threads=1, **extra)
begin = time.process_time()
train = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
built = time.process_time() - begin
held = len(os.listdir("/proc/self/fd"))
train[0]
print(json.dumps([imported, built, held, time.process_time() - begin]))
"""


def write_prefixes(folder: str, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    prefixes = []
    for i in range(count):
        prefix = os.path.join(folder, f"part{i:05d}")
        with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
            builder.add_sequences(rng.integers(0, 60_000, 4000).astype(np.uint16), [400] * 10, [1] * 10)
            builder.finalize(f"{prefix}.idx")
        prefixes.append(prefix)
    return prefixes


def build(who: str, cache: str, prefixes: list[str], manifest: str, *, fast: bool) -> list[float] | str:
    """[import, build, descriptors, until the first sample] of one process, or how it failed."""
    arguments = [*_MODULES[who], cache, prefixes, fast, manifest, 20 * len(prefixes)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, json.dumps(arguments)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return [float(x) for x in json.loads(done.stdout.strip().splitlines()[-1])]


def cases(smoke: bool, repeat: int) -> Iterator[Case]:
    who = ["megatron", "ours"] if optional("megatron.core.datasets.gpt_dataset")[0] else ["ours"]
    with tempfile.TemporaryDirectory(prefix="tdp-bench-") as folder:
        prefixes = write_prefixes(folder, 8 if smoke else 1000)
        short = os.path.join(folder, "counts.json")
        Path(short).write_text(json.dumps({prefix: [10, 11] for prefix in prefixes}))
        full = os.path.join(folder, "manifest.json")
        sizes = {p: [10, 11, 8, os.path.getsize(f"{p}.bin"), os.path.getsize(f"{p}.idx")] for p in prefixes}
        Path(full).write_text(json.dumps(sizes))
        imports: dict[str, list[float]] = {name: [] for name in who}
        for kind in ("cold", "warm", "fast"):
            spent: dict[str, list[float]] = {name: [] for name in who}
            notes: dict[str, Any] = {}
            for number in range(1 if smoke else repeat):
                for name in who:
                    # Cold ones are not deleted in between: creating files beside thousands that were just deleted is
                    # several times slower on ext4, for whoever does it.
                    cache = os.path.join(folder, f"cache-{name}-{number if kind == 'cold' else 0}")
                    Path(f"{cache}.store").unlink(missing_ok=True)
                    manifest = full if name == "ours" else short
                    measured = build(name, cache, prefixes, manifest, fast=kind == "fast")
                    if isinstance(measured, str):
                        notes[f"{name} failed"] = measured
                        continue
                    imports[name].append(measured[0])
                    spent[name].append(measured[1])
                    notes[f"fds {name}"] = int(measured[2])
                    notes[f"first sample {name}"] = f"{measured[3]:.3f} s"
            yield Case(f"{len(prefixes)} prefixes {kind}", _timings(spent), peer="megatron", notes=notes)
        yield Case("import beyond torch", _timings(imports), peer="megatron")
    count = 50 if smoke else 5000
    entry = [100_000, 100_001, 8, 400_000_000, 34 + 12 * 100_000 + 8 * 100_001]
    manifest = {f"/nowhere/part{i:05d}": entry for i in range(count)}
    weights = (np.random.default_rng(0).random(count) + 0.01).tolist()

    def instant(position: int) -> None:
        sources = [
            GPTSample(
                IndexedRead(prefix, sequences_per_dataset=manifest),
                sequence_length=4096,
                num_samples=10**9,
                order="instant",
            )
            for prefix in manifest
        ]
        blend = Blend(sources, weights, num_samples=10**9, order="instant")
        blend.skip_to(position)
        blend.take(1024)

    ways = {"ours, position 0": lambda: instant(0), "ours, position 500M": lambda: instant(500_000_000)}
    yield Case(f"{count} prefixes instant", timed(ways, repeat, warm_up=0))


def _timings(spent: dict[str, list[float]]) -> dict[str, Timing]:
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in spent.items() if s}


if __name__ == "__main__":
    main(__doc__ or "", cases)
