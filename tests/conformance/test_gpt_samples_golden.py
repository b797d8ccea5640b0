"""GPT samples: golden data of Megatron-LM commit d98e8a64 (Aug 2026), NumPy 2.4.6."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.datasets.config import GPTDatasetConfig
from tdp_megatron.datasets.gpt import GPTDataset
from tdp_megatron.datasets.mock import MockGPTDataset, MockGPTLowLevelDataset
from tdp_megatron.datasets.splits import Split, split_bounds
from tdp_megatron.datasets.tokenizer_spec import TokenizerSpec
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, Any] = json.loads((DATA / "gpt_samples.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]

TOKENIZERS: dict[str, dict[str, Any]] = {
    "no_pad": {},
    "pad1": {"pad": 1},
    "pad_eq_eod": {"pad": 0},
    "pad1_special_clash": {"pad": 1, "special_tokens_dict": {"pad_token": 1, "bos_token": 1}},
    "pad1_eos1": {"pad": 1, "eos": 1},
}


class Tokenizer(SimpleNamespace):
    """Has the special ids it is made with, and no others."""

    eod = 0
    vocab_size = 50
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    stored = dict(np.load(DATA / "gpt_samples.npz"))
    shape = (len(stored["attention_mask_cases"]), 2, 6, 1, 12, 12)
    bits = np.unpackbits(stored["attention_mask"], count=int(np.prod(shape)))
    stored["attention_mask"] = bits.reshape(shape).astype(bool)
    return stored


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    with np.load(DATA / "indexed_golden.npz") as stored:
        for suffix in ("bin", "idx"):
            (folder / f"s_eod.{suffix}").write_bytes(stored[f"s_eod/{suffix}"].tobytes())
    return str(folder / "s_eod")


def config_of(case: dict[str, Any], **changes: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=12,
        blend=(["x"], None),
        split="50,50,0",
        path_to_cache="",
        tokenizer=Tokenizer(**TOKENIZERS[case["tokenizer"]]),
        drop_last_partial_validation_sequence=False,
        **{
            name: case[name]
            for name in (
                "reset_position_ids",
                "reset_attention_mask",
                "eod_mask_loss",
                "create_attention_mask",
                "add_extra_token_to_sequence",
                "inter_document_masking",
                "allow_ambiguous_pad_tokens",
            )
        },
        **{"pad_masking": "megatron", **changes},
    )


def dataset_of(prefix: str, config: GPTDatasetConfig, split: str, num_samples: int | None) -> GPTDataset:
    low_level = IndexedDataset(prefix)
    begin, end = split_bounds("50,50,0", split, len(low_level))
    return GPTDataset(low_level, prefix, np.arange(begin, end, dtype=np.int32), num_samples, Split[split], config)


DTYPES = {
    "loss_mask": torch.float32,
    "attention_mask": torch.bool,
    "cu_seqlens": torch.int32,
    "max_seqlen": torch.int32,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_samples_are_megatrons(case: dict[str, Any], arrays: dict[str, Any], prefix: str) -> None:
    compared = 0
    for s, (split, num_samples) in enumerate((("train", 8), ("valid", None))):
        dataset = dataset_of(prefix, config_of(case), split, num_samples)
        assert len(dataset) == case[f"{split}_len"]
        assert dataset._pad_token_id == case[f"{split}_pad_token_id"]
        for i, name in enumerate(GOLDEN["sample_ids"][split]):
            sample = dataset[None if name == "None" else int(name)]
            expected = {}
            for field in ("tokens", "labels", "loss_mask", "position_ids"):
                expected[field] = arrays[field][case["id"], s, i]
            for field in ("attention_mask", "cu_seqlens", "max_seqlen"):
                rows = np.flatnonzero(arrays[f"{field}_cases"] == case["id"])
                if len(rows):
                    expected[field] = arrays[field][rows[0], s, i]
            assert set(sample) == set(expected)
            for field, values in expected.items():
                assert sample[field].dtype == DTYPES.get(field, torch.int64), field
                np.testing.assert_array_equal(sample[field].numpy(), values, err_msg=f"{split} {name} {field}")
            compared += 1
    assert compared == 12


def test_every_case_is_here() -> None:
    assert len(CASES) == 54


@pytest.mark.parametrize("extra", [True, False])
def test_position_masking_keeps_genuine_pad_ids(extra: bool, prefix: str) -> None:
    case = {**CASES[1], "tokenizer": "pad1", "add_extra_token_to_sequence": extra}
    by_position = dataset_of(prefix, config_of(case, pad_masking="position"), "train", 8)
    plain = dataset_of(prefix, config_of({**case, "tokenizer": "no_pad"}), "train", 8)
    genuine = 0
    for i in range(len(plain)):
        ours, reference = by_position[i], plain[i]
        for field in reference:
            assert torch.equal(ours[field], reference[field]), (i, field)
        genuine += int((ours["labels"] == 1).sum())
    assert genuine > 0


def test_position_masking_finds_padding_at_the_end_of_the_data(prefix: str) -> None:
    case = {**CASES[0], "tokenizer": "pad_eq_eod", "allow_ambiguous_pad_tokens": True, "reset_position_ids": True}
    dataset = dataset_of(prefix, config_of(case, pad_masking="position"), "valid", None)
    short = [i for i in range(len(dataset)) if int(dataset.shuffle_index[i]) == len(dataset) - 1]
    sample = dataset[short[0]]
    total = int(dataset.dataset.sequence_lengths[dataset.indices].sum())
    real = total - 1 - 12 * (len(dataset) - 1)
    assert sample["loss_mask"].tolist() == [1.0] * real + [0.0] * (12 - real)
    # Padding is not an end of document although the ids are equal.
    assert sample["position_ids"][real + 1 :].tolist() == list(
        range(int(sample["position_ids"][real + 1]), int(sample["position_ids"][real + 1]) + 12 - real - 1)
    )


def test_cases_row_eod_as_pad(tmp_path: Path) -> None:
    """[5, 6, 0, 7, 0] with pad = eod = 0 and length 8: the real ends of documents keep their loss."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(np.array([5, 6, 0, 7, 0], dtype=np.int32), [5])
    builder.finalize(str(tmp_path / "a.idx"))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=(["x"], None),
        split="0,1,0",
        path_to_cache="",
        tokenizer=Tokenizer(pad=0),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
    dataset = GPTDataset(IndexedDataset(tmp_path / "a"), "a", None, None, Split.valid, config)
    sample = dataset[0]
    assert sample["labels"].tolist() == [6, 0, 7, 0, 0, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_samples_outside_are_index_errors(prefix: str) -> None:
    dataset = dataset_of(prefix, config_of(CASES[0]), "train", 8)
    for idx in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match="there are 9"):
            dataset[idx]
    assert torch.equal(dataset[-1]["tokens"], dataset[len(dataset) - 1]["tokens"])


def test_samples_do_not_share_what_a_user_may_change(prefix: str) -> None:
    dataset = dataset_of(prefix, config_of(CASES[0]), "train", 8)
    before = {name: value.clone() for name, value in dataset[0].items()}
    for value in dataset[0].values():
        value.zero_()
    for name, value in dataset[0].items():
        assert torch.equal(value, before[name]), name


def test_mock_data_is_megatrons() -> None:
    golden = np.load(DATA / "mock_gpt.npz")
    tokenizer = TokenizerSpec.null(1000)
    low_level = MockGPTLowLevelDataset(tokenizer)
    np.testing.assert_array_equal(low_level.sequence_lengths[:200], golden["sequence_lengths_first200"])
    assert low_level.sequence_lengths.dtype == np.int32
    assert int(low_level.sequence_lengths.sum(dtype=np.int64)) == int(golden["total"][0])
    for i in (0, 7):
        np.testing.assert_array_equal(low_level[i], golden[f"item{i}"])
        np.testing.assert_array_equal(low_level.get(i, 3, 20), golden[f"item{i}"][3:23])
        np.testing.assert_array_equal(low_level.get(i, 5), golden[f"item{i}"][5:])
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    assert config.mock
    dataset = MockGPTDataset(low_level, None, np.arange(50, dtype=np.int32), 10, Split.train, config)
    row = int(dataset.shuffle_index[3])
    stream = np.concatenate([low_level[int(d)] for d in dataset.document_index])
    np.testing.assert_array_equal(dataset[3]["tokens"].numpy(), stream[64 * row : 64 * row + 64])
    np.testing.assert_array_equal(dataset[3]["labels"].numpy(), stream[64 * row + 1 : 64 * row + 65])
