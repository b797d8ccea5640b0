"""How long does it take to build the three indices of Megatron's sample order, and how much memory?

* ``megatron``: megatron-core's ``GPTDataset``, its index build alone, nothing written to disk.
* ``ours``: ``build_gpt_indices``; equal results are checked in the same run.

Documents have lognormal lengths of mean 600 tokens, samples 4096. The peak is resident memory beyond what the process
had, the lengths being in memory already.

    python benchmarks/index.py [--repeat 5] [--json FILE] [--smoke]
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Case, main, optional, peak_memory, timed

from tdp_megatron.datasets.gpt_indices import build_gpt_indices

SEQUENCE_LENGTH = 4096


def megatron_build(lengths: Any, num_samples: int | None) -> Any:
    """Megatron's build as a call, or None where it is not installed."""
    gpt, _ = optional("megatron.core.datasets.gpt_dataset")
    utils, _ = optional("megatron.core.datasets.utils")
    if gpt is None or utils is None:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    dataset = gpt.GPTDataset.__new__(gpt.GPTDataset)
    dataset.config = SimpleNamespace(
        mock=True,  # nothing is written
        path_to_cache=None,
        defer_npy_index_mmap=False,
        fast_cache_load=False,
        sequence_length=SEQUENCE_LENGTH,
        random_seed=1234,
        add_extra_token_to_sequence=True,
        drop_last_partial_validation_sequence=True,
    )
    dataset.dataset = SimpleNamespace(sequence_lengths=lengths, path_prefix="")
    dataset.indices = np.arange(len(lengths), dtype=np.int32)
    dataset.num_samples = num_samples
    dataset.index_split = utils.Split.train
    return dataset._build_document_sample_shuffle_indices


def cases(smoke: bool, repeat: int) -> Iterator[Case]:
    sizes = [(20_000, 1), (20_000, 3)] if smoke else [(10_000_000, 1), (10_000_000, 3), (30_000_000, 1)]
    for documents, epochs in sizes:
        lengths = np.random.default_rng(1).lognormal(6.0, 0.9, documents).astype(np.int32) + 1
        tokens = int(lengths.sum(dtype=np.int64))
        # The last epoch counts from 80 % of it on as one of the others.
        num_samples = None if epochs == 1 else int((epochs - 0.1) * tokens / SEQUENCE_LENGTH)

        def ours(lengths: Any = lengths, num_samples: int | None = num_samples) -> Any:
            return build_gpt_indices(
                lengths,
                range(len(lengths)),
                sequence_length=SEQUENCE_LENGTH,
                num_samples=num_samples,
                random_seed=1234,
            )

        built = ours()
        outputs = built.document_index.nbytes + built.sample_index.nbytes + built.shuffle_index.nbytes
        name = f"{documents / 1e6:g}M documents x {built.num_epochs}"
        ways: dict[str, Any] = {"ours": ours}
        notes: dict[str, Any] = {"outputs_mb": round(outputs / 1e6, 2)}
        theirs = megatron_build(lengths, num_samples)
        if theirs is not None:
            for a, b in zip(theirs(), (built.document_index, built.sample_index, built.shuffle_index), strict=True):
                np.testing.assert_array_equal(a, b)
            ways = {"megatron": theirs, **ways}
            notes["peak_mb_megatron"] = round(peak_memory(theirs) / 1e6, 2)
        else:
            notes["megatron"] = optional("megatron.core.datasets.gpt_dataset")[1]
        del built
        peak = peak_memory(ours)
        notes["peak_mb_ours"] = round(peak / 1e6, 2)
        notes["peak_over_outputs"] = round(peak / outputs, 3)
        yield Case(
            name, timed(ways, repeat), work=len(lengths) * epochs, unit="documents/s", peer="megatron", notes=notes
        )


if __name__ == "__main__":
    main(__doc__ or "", cases)
