"""Random damage to index caches: they are used only if what they say is right, and nothing but a rebuild happens."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tdp_megatron.datasets import GPTDataset, GPTDatasetConfig, Split, TokenizerSpec

NAMES = ("document_index", "sample_index", "shuffle_index")
LENGTHS = np.array([3, 9, 1, 0, 14, 8, 5, 5, 2, 30], dtype=np.int32)


class LowLevel:
    sequence_lengths = LENGTHS
    path_prefix = "nowhere"


def make(folder: str) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=8,
        blend=(["x"], None),
        split="1,0,0",
        path_to_cache=folder,
        tokenizer=TokenizerSpec.null(100),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return GPTDataset(LowLevel(), "x", range(10), 30, Split.train, config)  # type: ignore[arg-type]


def flip(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place % len(changed)] ^= 1 << bit
    return bytes(changed)


damages = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 127), st.integers(0, 7)),
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("noise"), st.integers(0, 300), st.integers(0, 2**32 - 1)),
)


@given(name=st.sampled_from(NAMES), damage=damages, manifest=st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_caches(
    tmp_path_factory: pytest.TempPathFactory, name: str, damage: tuple[str, int, int], manifest: bool
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    expected = {n: np.array(getattr(make(str(folder)), n)) for n in NAMES}
    files = {path.name.rsplit("-", 1)[1]: path for path in folder.iterdir()}
    if not manifest:
        files["manifest.json"].unlink()
    path = files[f"{name}.npy"]
    data = path.read_bytes()
    kind, place, extra = damage
    if kind == "flip":
        data = flip(data, place, extra)
    elif kind == "cut":
        data = data[: place % len(data)]
    else:
        data = np.random.default_rng(extra).bytes(place)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))  # not the manifest's time
    found = make(str(folder))
    for n in NAMES:
        array = getattr(found, n)
        assert array.dtype == expected[n].dtype or n == "sample_index"
        np.testing.assert_array_equal(array, expected[n])


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_manifests(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("cache")
    expected = make(str(folder)).shuffle_index
    manifest = next(Path(folder).glob("*manifest.json"))
    manifest.write_bytes(data)
    np.testing.assert_array_equal(make(str(folder)).shuffle_index, expected)


@given(text=st.text(max_size=30), value=st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_manifests_of_other_things(tmp_path_factory: pytest.TempPathFactory, text: str, value: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    expected = make(str(folder)).shuffle_index
    manifest = next(Path(folder).glob("*manifest.json"))
    known = json.loads(manifest.read_text())
    for part in ("settings", "stamp", "fingerprint", "files"):
        changed = {**known, part: value}
        with contextlib.suppress(TypeError, AttributeError):
            changed = {**known, part: {**known[part], text: value}}
        manifest.write_text(json.dumps(changed))
        np.testing.assert_array_equal(make(str(folder)).shuffle_index, expected)
