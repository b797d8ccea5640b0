"""Five thousand prefixes in a process that may have 256 files open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tdp_megatron.indexed import IndexedDatasetBuilder

COUNT = 5000

CODE = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, TokenizerSpec
prefixes, entry, cache = json.load(open(sys.argv[1]))

def read(threads=1, **fields):
    config = GPTDatasetConfig(
        random_seed=5, sequence_length=8, blend_per_split=[(prefixes, [1.0] * len(prefixes)), None, None],
        tokenizer=TokenizerSpec.null(100), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=cache, num_dataset_builder_threads=threads, **fields)
    train = BlendedMegatronDatasetBuilder(GPTDataset, [2 * len(prefixes), 0, 0], lambda: True, config).build()[0]
    held = len(os.listdir("/proc/self/fd"))
    # Samples from every prefix, more of them than may be open at once.
    total = sum(int(train[i]["tokens"].sum()) for i in range(0, len(train), 3))
    return len(train), len(set(train.dataset_index[::3].tolist())), total, held

cold = read(threads=2)
warm = read()
fast = read(fast_cache_load=True, defer_npy_index_mmap=True, sequences_per_dataset={p: entry for p in prefixes})
print(json.dumps([cold, warm, fast]))
"""


def test_cold_warm_and_fast_under_a_small_limit(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "x.bin", dtype=np.uint16) as builder:
        for length in (3, 9, 14):
            builder.add_document(range(1, length + 1), [length])
        builder.finalize(tmp_path / "x.idx")
    prefixes = []
    for i in range(COUNT):
        prefix = tmp_path / f"part{i}"
        for suffix in (".bin", ".idx"):
            os.link(tmp_path / f"x{suffix}", f"{prefix}{suffix}")
        prefixes.append(str(prefix))
    sizes = [os.path.getsize(tmp_path / f"x{suffix}") for suffix in (".bin", ".idx")]
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps([prefixes, [3, 4, 8, *sizes], str(tmp_path / "cache")]))
    command = [sys.executable, "-c", CODE, str(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    cold, warm, fast = json.loads(done.stdout)
    assert cold[:3] == warm[:3] == fast[:3]
    assert cold[0] == 2 * COUNT
    assert cold[1] > 3000
    for held in (cold[3], warm[3], fast[3]):
        assert held <= 64
