"""Megatron's sample order: golden data of Megatron-LM commit d98e8a64 (Aug 2026), NumPy 2.4.6, x86-64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron import _C
from tdp_megatron.datasets.gpt_indices import build_gpt_indices
from tdp_megatron.datasets.splits import SPLIT_NAMES, parse_split, split_bounds, split_matrix

DATA = Path(__file__).parent / "data"
GPT_CASES = json.loads((DATA / "gpt_indices.json").read_text())
SPLIT_CASES = json.loads((DATA / "splits.json").read_text())["single"]
SAMPLE_CASES = json.loads((DATA / "sample_index.json").read_text())["cases"]
BLEND = json.loads((DATA / "blending.json").read_text())


def expand(case: dict[str, Any]) -> list[tuple[str, int | None, str]]:
    """(key prefix, num_samples, split name) of each build of a case; three splits or train alone."""
    if isinstance(case["num_samples"], list):
        return [(f"{case['id']}/{name}", case["num_samples"][i], name) for i, name in enumerate(SPLIT_NAMES)]
    return [(str(case["id"]), case["num_samples"], "train")]


def test_gpt_indices_are_megatrons_bit_for_bit() -> None:
    golden = np.load(DATA / "gpt_indices.npz")
    lengths = np.load(DATA / "gpt_corpora_lengths.npz")
    builds = refused = 0
    for case in GPT_CASES:
        sequence_lengths = lengths[case["prefix"]]
        rejected_by_megatron = "result" in case
        errors = 0
        for key, num_samples, name in expand(case):
            begin, end = split_bounds(case["split"], name, len(sequence_lengths))
            try:
                built = build_gpt_indices(
                    sequence_lengths,
                    np.arange(begin, end, dtype=np.int32),
                    sequence_length=case["sequence_length"],
                    num_samples=num_samples,
                    random_seed=case["random_seed"],
                    add_extra_token_to_sequence=case["add_extra_token_to_sequence"],
                    drop_last_partial_sequence=name != "valid"
                    or case.get("drop_last_partial_validation_sequence", True),
                )
            except ValueError:
                errors += 1
                continue
            if rejected_by_megatron:
                continue
            for part in ("document", "sample", "shuffle"):
                ours = getattr(built, f"{part}_index")
                assert ours.dtype == golden[f"{key}/{part}"].dtype, key
                np.testing.assert_array_equal(ours, golden[f"{key}/{part}"], err_msg=f"{key}/{part}")
            builds += 1
        assert (errors > 0) == rejected_by_megatron, case
        refused += rejected_by_megatron
    assert (builds, refused) == (464 + 3 * 16, 16)


@pytest.mark.parametrize("case", SAMPLE_CASES, ids=lambda c: c["key"])
def test_sample_index(case: dict[str, Any]) -> None:
    golden = np.load(DATA / "sample_index.npz")
    sizes = golden[f"sizes/{case['sizes']}"].astype(np.int32)
    expected = golden[case["key"]]
    rows = _C.build_sample_index(
        sizes,
        golden[f"{case['key']}/doc"].astype(np.int32),
        case["seq"],
        case["extra"],
        len(expected) - 1,
        expected.dtype == np.int64,
    )
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("entry", BLEND["weights"], ids=lambda e: f"w{e['i']}")
def test_blend_draws(entry: dict[str, Any]) -> None:
    golden = np.load(DATA / "blending.npz")
    weights = np.array(entry["weights_normalized"])
    for size in BLEND["sizes"]:
        counts = np.zeros(len(weights), dtype=np.int64)
        # In two calls: the counts carry the state across.
        first = _C.blend_continue(weights, counts, 0, size // 3)
        rest = _C.blend_continue(weights, counts, size // 3, size - size // 3)
        key = f"w{entry['i']}_n{size}"
        np.testing.assert_array_equal(np.concatenate([first[0], rest[0]]), golden[f"{key}/dataset"])
        np.testing.assert_array_equal(np.concatenate([first[1], rest[1]]), golden[f"{key}/sample"])


@pytest.mark.parametrize("case", list(enumerate(BLEND["exhaustive_sizes"])), ids=lambda c: f"ex{c[0]}")
def test_exhaustive_blend_draws(case: tuple[int, list[int]]) -> None:
    golden = np.load(DATA / "blending.npz")
    number, sizes = case
    datasets, samples = _C.blend_exhaustive(np.array(sizes, dtype=np.int64))
    np.testing.assert_array_equal(datasets, golden[f"ex{number}/dataset"])
    np.testing.assert_array_equal(samples, golden[f"ex{number}/sample"])


def test_split_pairs() -> None:
    pairs = json.loads((DATA / "splits.json").read_text())["pair"]
    for first, second, expected in pairs:
        assert [None if m is None else list(m) for m in split_matrix(first, second)] == expected
    assert len(pairs) == 3


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda c: repr(c["split"]))
def test_splits(case: dict[str, Any]) -> None:
    # Megatron reads "-1" as 1 and gives NaN for no numbers; both are refused here.
    if case["split"] in ("", "0,0,0", "-1,2,3") or "error" in str(case["vector"]):
        with pytest.raises(ValueError):
            parse_split(case["split"])
        return
    shares = parse_split(case["split"])
    assert shares == case["vector"]
    matrix = split_matrix(shares)
    assert [None if m is None else list(m) for m in matrix] == case["matrix"]
    assert matrix[0] is None or isinstance(matrix[0][0], int)
    for n, ends in case["book_ends_for_n"].items():
        for name, expected in zip(SPLIT_NAMES, ends, strict=True):
            bounds = split_bounds(case["split"], name, int(n))
            assert bounds == ((0, 0) if expected is None else tuple(expected))
