"""The legacy shuffle on one stream: golden data of Megatron-LM commit d98e8a64 (Aug 2026), NumPy 2.4.6, x86-64."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tdp_megatron import _C
from tdp_megatron.datasets.gpt_indices import _shuffled_documents, _shuffled_samples

GOLDEN = np.load(Path(__file__).parent / "data" / "rng_indices.npz")


def test_document_index_and_two_shuffles_on_one_stream() -> None:
    keys = sorted({name.rpartition("/")[0] for name in GOLDEN.files})
    assert len(keys) == 96
    for key in keys:
        match = re.fullmatch(r"d(\d+)_e(\d+)_s([01])_r(\d+)", key)
        assert match is not None
        documents, epochs, separate, seed = map(int, match.groups())
        shuffle = _C.LegacyRandom(seed).shuffle
        # One epoch is never kept apart, whatever is asked.
        built = _shuffled_documents(range(10, 10 + documents), epochs, bool(separate), shuffle)
        np.testing.assert_array_equal(built, GOLDEN[f"{key}/doc"], err_msg=key)
        np.testing.assert_array_equal(_shuffled_samples(13, 0, shuffle), GOLDEN[f"{key}/shuf_a"], err_msg=key)
        np.testing.assert_array_equal(_shuffled_samples(13, 9, shuffle), GOLDEN[f"{key}/shuf_b"], err_msg=key)
