"""Cache names, descriptions and arrays: golden data of Megatron-LM commit d98e8a64 (Aug 2026), NumPy 2.4.6, x86-64."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.datasets.blend import blend_from_list, normalise_once, sizes_per_dataset
from tdp_megatron.datasets.blended import BlendedDataset, exhaustive_blend, sized_blend
from tdp_megatron.datasets.builder import BlendedMegatronDatasetBuilder
from tdp_megatron.datasets.config import GPTDatasetConfig
from tdp_megatron.datasets.gpt import GPTDataset
from tdp_megatron.datasets.gpt_indices import build_gpt_indices, epoch_plan
from tdp_megatron.datasets.splits import Split
from tdp_megatron.datasets.tokenizer_spec import TokenizerSpec

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, Any] = json.loads((DATA / "cache_names.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["label"]: case for case in GOLDEN["cases"]}
BLENDING: dict[str, Any] = json.loads((DATA / "blending.json").read_text())
SIZES: dict[str, Any] = json.loads((DATA / "blend_sizes.json").read_text())
OURS = ("manifest.json", "lock")

NULL = TokenizerSpec.null(1000)
HF = TokenizerSpec(
    eod=0,
    tokenizer_path="tok/hf_tiny",
    arguments={
        "chat_template": None,
        "vocab_file": None,
        "merges_file": None,
        "additional_special_tokens": [],
        "use_fast": True,
        "trust_remote_code": False,
        "include_special_tokens": True,
        "use_gigatoken": False,
    },
)
TOKENIZERS = {"null": NULL, "null_eod_pad": TokenizerSpec.null(1000, eod_id=5, pad_id=6), "hf": HF}


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The corpora as ``datasets/<name>`` of the working directory: the relative path is part of the cache key."""
    folder = tmp_path / "datasets"
    folder.mkdir()
    with np.load(DATA / "indexed_golden.npz") as stored:
        for name in ("c_tiny", "c_u16", "c_long", "c_single", "c_ones", "c_zeros"):
            for suffix in ("bin", "idx"):
                (folder / f"{name}.{suffix}").write_bytes(stored[f"{name}/{suffix}"].tobytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(**changes: Any) -> GPTDatasetConfig:
    fields: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 16,
        "split": "60,25,15",
        "path_to_cache": "cache",
        "tokenizer": NULL,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    if isinstance(changes.get("tokenizer"), dict):
        identifiers = changes["tokenizer"]
        changes["tokenizer"] = next(t for t in TOKENIZERS.values() if dict(t.unique_identifiers) == identifiers)
    return GPTDatasetConfig(**{**fields, **changes})


def build(case: dict[str, Any]) -> list[Any]:
    config = config_of(**case["config"])
    return BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()


def facts(dataset: Any) -> Any:
    if dataset is None:
        return None
    if isinstance(dataset, list):
        return [len(part) for part in dataset]
    found = {
        "cls": type(dataset).__name__,
        "len": len(dataset),
        "hash": dataset.unique_description_hash,
    }
    if isinstance(dataset, BlendedDataset):
        found["weights"] = dataset.weights
        found["size"] = dataset.size
        found["mids"] = [
            [mid.dataset_path, mid.num_samples, len(mid), mid.unique_description_hash] for mid in dataset.datasets
        ]
    return found


@pytest.mark.parametrize("label", CASES)
def test_builder_gives_megatrons_datasets_and_files(label: str, corpora: Path) -> None:
    case = CASES[label]
    if "error" in case["result"]:
        with pytest.raises(ValueError):
            build(case)
        return
    assert [facts(dataset) for dataset in build(case)] == case["result"]["datasets"]
    written = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (corpora / "cache").iterdir()
        if not path.name.endswith(OURS)
    }
    assert written == case["result"]["cache"]
    # Nothing but the manifests is ours: no lock, no temporary file is left.
    others = [path.name for path in (corpora / "cache").iterdir() if path.name not in written]
    assert all(name.endswith("manifest.json") for name in others)


def test_every_case_is_here() -> None:
    assert len(CASES) == 22
    assert sum("error" in case["result"] for case in CASES.values()) == 7


def test_arrays_of_the_blended_cases(corpora: Path) -> None:
    for case in CASES.values():
        if "error" not in case["result"]:
            build(case)
    with np.load(DATA / "blended_cache.npz") as golden:
        for name in golden.files:
            array = np.load(corpora / "cache" / name)
            assert array.dtype == golden[name].dtype
            np.testing.assert_array_equal(array, golden[name])
        assert len(golden.files) == 33


def test_default_folder(corpora: Path) -> None:
    config = config_of(blend=(["datasets/c_tiny"], None), split="100,0,0", path_to_cache=None)
    expected = {Path(name) for name in GOLDEN["default_dir"]["listing"]}
    digest = next(iter(expected)).name.split("-")[0]
    sizes = [n for n in range(1, 200) if _digest(config, n) == digest]
    num_samples: int | None = sizes[0] if sizes else None
    BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, None, None], lambda: True, config).build()
    written = {p.relative_to(corpora) for p in corpora.rglob("*") if p.is_file() and p.parts[-2] != "datasets"}
    assert {p for p in written if not p.name.endswith(OURS)} == expected


def _digest(config: GPTDatasetConfig, num_samples: int) -> str:
    class Described(GPTDataset):
        def _prepare(self) -> None:
            return None

    Described.__name__ = "GPTDataset"
    return Described(None, "datasets/c_tiny", None, num_samples, Split.train, config).unique_description_hash  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_identifiers(name: str) -> None:
    ours = TOKENIZERS[name].unique_identifiers
    assert list(ours.items()) == list(GOLDEN["tokenizers"][name].items())


def test_hashes_and_descriptions_of_the_gpt_indices(corpora: Path) -> None:
    cases = json.loads((DATA / "gpt_indices.json").read_text())
    hashes = json.loads((DATA / "gpt_hashes.json").read_text())["hashes"]
    descriptions = dict(GOLDEN["descriptions"])
    compared = 0
    for case in cases:
        expected = hashes.get(str(case["id"]))
        if expected is None:
            continue
        config = config_of(
            blend=([f"datasets/{case['prefix']}"], None),
            path_to_cache="",
            **{
                name: case[name]
                for name in (
                    "split",
                    "sequence_length",
                    "random_seed",
                    "add_extra_token_to_sequence",
                    "drop_last_partial_validation_sequence",
                )
                if name in case
            },
        )
        sizes = case["num_samples"] if isinstance(case["num_samples"], list) else [case["num_samples"], 0, 0]
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        found = [dataset.unique_description_hash for dataset in built if dataset is not None]
        assert found == (expected if isinstance(expected, list) else [expected]), case
        for dataset in built:
            if dataset is not None and dataset.unique_description_hash in descriptions:
                assert dataset.unique_description == descriptions.pop(dataset.unique_description_hash)
        compared += 1
    assert compared == 480
    assert not descriptions


@pytest.mark.parametrize("case", SIZES["sizes"], ids=lambda case: f"{len(case['weights'])}x{case['surplus']}")
def test_sizes_per_dataset(case: dict[str, Any]) -> None:
    if isinstance(case["sizes"], dict):
        with pytest.raises(ValueError, match="must be numbers"):
            sizes_per_dataset(case["weights"], case["target"], case["surplus"])
        return
    assert sizes_per_dataset(case["weights"], case["target"], case["surplus"]) == case["sizes"]


@pytest.mark.parametrize(("given", "expected"), SIZES["blend_from_list"], ids=repr)
def test_blend_from_list(given: list[str] | None, expected: Any) -> None:
    if given == ["3", "a", "x", "b"]:  # Megatron takes the weight for a prefix
        with pytest.raises(ValueError, match="item 2 is 'x'"):
            blend_from_list(given)
        return
    found = blend_from_list(given)
    assert (None if found is None else [found[0], found[1]]) == expected


@pytest.mark.parametrize("entry", BLENDING["weights"], ids=lambda entry: f"w{entry['i']}")
def test_sized_blend(entry: dict[str, Any]) -> None:
    with np.load(DATA / "blending.npz") as golden:
        for size in BLENDING["sizes"]:
            datasets, samples = sized_blend(entry["weights_normalized"], size)
            key = f"w{entry['i']}_n{size}"
            assert datasets.dtype == np.int16
            assert samples.dtype == np.int64
            np.testing.assert_array_equal(datasets, golden[f"{key}/dataset"])
            np.testing.assert_array_equal(samples, golden[f"{key}/sample"])


def test_exhaustive_blend() -> None:
    with np.load(DATA / "blending.npz") as golden:
        keys = sorted({name.rsplit("/", 1)[0] for name in golden.files if not name.startswith("w")})
        assert len(keys) == len(BLENDING["exhaustive_sizes"]) == 7
        for sizes in BLENDING["exhaustive_sizes"]:
            datasets, samples = exhaustive_blend(sizes)
            matching = [
                key
                for key in keys
                if np.array_equal(np.bincount(golden[f"{key}/dataset"], minlength=len(sizes)), sizes)
            ]
            assert len(matching) == 1
            np.testing.assert_array_equal(datasets, golden[f"{matching[0]}/dataset"])
            np.testing.assert_array_equal(samples, golden[f"{matching[0]}/sample"])


def test_normalising_is_numpys_pairwise_sum() -> None:
    # From eight weights on a running sum has other last bits; Megatron's weights are in the cache key.
    weights = np.array([0.1] * 9 + [0.3] * 8 + [1e-3] * 20)
    running = 0.0
    for weight in weights.tolist():
        running += weight
    assert running != np.sum(weights)
    assert normalise_once(weights.tolist()).tolist() == (weights / np.sum(weights)).tolist()


@pytest.mark.parametrize("hazard", GOLDEN["float32_ceil"], ids=lambda hazard: str(hazard["sizes"]))
def test_partial_last_samples_are_counted_exactly(hazard: dict[str, Any]) -> None:
    plan = epoch_plan(sum(hazard["sizes"]), hazard["seq"], None, extra_token=1, drop_last=False)
    assert plan.num_samples == hazard["exact_ceil"] == hazard["python_len_formula"]
    built = build_gpt_indices(
        np.array(hazard["sizes"], dtype=np.int32),
        np.arange(len(hazard["sizes"]), dtype=np.int32),
        sequence_length=hazard["seq"],
        num_samples=None,
        random_seed=1,
        drop_last_partial_sequence=False,
    )
    assert len(built) == hazard["exact_ceil"]
