"""Configurations that contradict themselves, and what a builder makes of splits, weights and sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tdp_megatron import _C
from tdp_megatron.datasets import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    Split,
    TokenizerSpec,
)
from tdp_megatron.datasets.config import BlendedMegatronDatasetConfig
from tdp_megatron.datasets.gpt_indices import epoch_plan, needs_int64
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder

NAN, INF = float("nan"), float("inf")


def config_of(**changes: Any) -> GPTDatasetConfig:
    fields: dict[str, Any] = {
        "random_seed": 1,
        "sequence_length": 8,
        "blend": (["a", "b"], [0.5, 0.5]),
        "split": "80,10,10",
        "tokenizer": TokenizerSpec.null(100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": "",
    }
    return GPTDatasetConfig(**{**fields, **changes})


PER_SPLIT: dict[str, Any] = {"blend": None, "split": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_seed": -1}, r"random_seed must be in \[0, 4294967296\), got -1"),
        ({"random_seed": 2**32}, "random_seed must be in"),
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"num_dataset_builder_threads": 0}, "num_dataset_builder_threads must be at least 1"),
        ({"mid_level_dataset_surplus": -0.1}, "mid_level_dataset_surplus must be 0 or more"),
        ({"mid_level_dataset_surplus": NAN}, "mid_level_dataset_surplus must be 0 or more"),
        ({"blend": (["a", "b"], [1.0])}, "2 prefixes and 1 weights"),
        ({"blend": (["a"], [1.0, 2.0])}, "1 prefixes and 2 weights"),
        ({"blend": ([], None)}, "at least one prefix"),
        ({"blend": ["a"]}, "must be .prefixes, weights."),
        ({"blend": "a"}, "must be .prefixes, weights."),
        ({"blend": ("a", None)}, "list of at least one prefix"),
        ({"blend": (["a", "b"], [NAN, 1.0])}, "weight 0 of source a is nan"),
        ({"blend": (["a", "b"], [-1.0, 2.0])}, "weight 0 of source a is -1.0"),
        ({"blend": (["a", "b"], [1.0, INF])}, "weight 1 of source b is inf"),
        ({"blend": (["a", "b"], [0.0, 0.0])}, "all 2 weights are zero"),
        ({"split": None}, "blend needs split"),
        ({"split": "0,0,0"}, "sums to 0.0"),
        ({"split": ""}, "one to three numbers"),
        ({"blend_per_split": [(["a"], None), None, None]}, "blend and blend_per_split exclude each other"),
        ({"blend": None, "blend_per_split": [(["a"], None), None, None]}, "split '80,10,10' does not go with"),
        ({**PER_SPLIT, "blend_per_split": [(["a"], None), None]}, "must have 3 entries .train, valid, test., got 2"),
        ({**PER_SPLIT, "blend_per_split": [(["a", "b"], [1.0]), None, None]}, r"blend_per_split\[train\] has 2 pref"),
        ({**PER_SPLIT, "blend_per_split": [None, (["a"], [NAN]), None]}, "weight 0 of source a is nan"),
        ({"fast_cache_load": True}, "fast_cache_load needs path_to_cache"),
        ({"defer_npy_index_mmap": True, "path_to_cache": None}, "defer_npy_index_mmap needs path_to_cache"),
        ({"fast_cache_load": True, "path_to_cache": "x"}, "does not go with blend"),
        ({"tokenizer": None}, "tokenizer is missing"),
        ({"reset_position_ids": None}, "reset_position_ids must be True or False"),
        ({"reset_attention_mask": None}, "reset_attention_mask must be True or False"),
        ({"eod_mask_loss": None}, "eod_mask_loss must be True or False"),
        ({"pad_masking": "id"}, "pad_masking must be one of position, megatron"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_seed": 1.0}, "random_seed must be an int"),
        ({"sequence_length": True}, "sequence_length must be an int"),
        ({"blend": ([1], None)}, "prefix that is not a string"),
        ({"blend": (["a", "b"], ["1", "2"])}, "weight 0 of source a must be a number"),
    ],
)
def test_wrong_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        config_of(**changes)


def test_defaults_are_megatrons() -> None:
    config = config_of()
    assert config.split_matrix == [(0, 0.8), (0.8, 0.9), (0.9, 1.0)]
    assert not config.mock
    mock = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=2)
    assert (mock.mock, mock.split) == (True, "1,1,1")
    per_split = config_of(**PER_SPLIT, blend_per_split=[None, (["a"], None), None])
    assert (per_split.mock, per_split.split_matrix, per_split.split) == (False, None, None)
    assert config_of(**PER_SPLIT, blend_per_split=[None, None, None]).mock


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, documents in {"a": 50, "b": 50, "one": 1, "short": 4, "empty": 0}.items():
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=np.int32)
        for i in range(documents):
            length = 2 if name == "short" else 30
            builder.add_document(np.full(length, i + 1, dtype=np.int32), [length])
        builder.finalize(f"{name}.idx")


def build(sizes: list[int | None], cls: Any = GPTDataset, **changes: Any) -> list[Any]:
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config_of(**changes)).build()


@pytest.mark.usefixtures("corpora")
@pytest.mark.parametrize(
    ("sizes", "changes", "parts"),
    [
        (
            [10, 1, None],
            {"blend": (["one"], None), "split": "99,1,0"},
            ["one (valid split)", "'99,1,0'", "0 sequences"],
        ),
        (
            [10, 2, 2],
            {"blend": (["a", "one"], [0.5, 0.5]), "split": "80,15,5"},
            ["one (valid split)", "'80,15,5'", "0 sequences"],
        ),
        ([None, None, None], {"blend": (["a", "one"], None), "split": "80,15,5"}, ["one (valid split)"]),
        ([4, 4, 4], {**PER_SPLIT, "blend_per_split": [(["empty"], None), None, None]}, ["empty (train split)"]),
        ([None] * 3, {**PER_SPLIT, "blend_per_split": [(["short", "short"], None), None, None]}, []),
    ],
)
def test_splits_without_tokens(sizes: list[int | None], changes: dict[str, Any], parts: list[str]) -> None:
    if not parts:
        # Eight tokens are one short of a sample: both datasets are empty, so is the blend.
        parts = ["no dataset of the train split", "short (train split)", "larger share or more data"]
    with pytest.raises(ValueError) as caught:
        build(sizes, **changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.usefixtures("corpora")
def test_a_dataset_shorter_than_a_sample_is_left_out_of_a_blend(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train, *_ = build([None] * 3, **PER_SPLIT, blend_per_split=[(["short", "a"], None), None, None])
    assert "no samples from short (train split), whose weight is 0" in caplog.text
    assert set(np.asarray(train.dataset_index)) == {1}
    assert len(train) == len(train.datasets[1])


@pytest.mark.usefixtures("corpora")
def test_weight_zero_is_skipped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train, *_ = build([20, 0, 0], blend=(["a", "missing", "b"], [1, 0, 3]), split="80,10,10")
    assert "missing have weight 0 and are left out" in caplog.text
    assert np.bincount(train.dataset_index).tolist() == [5, 15]


@pytest.mark.usefixtures("corpora")
def test_a_small_weight_goes_into_its_next_epoch() -> None:
    """.001 of 400,000 samples is more than an epoch of 50 documents; earlier releases ended in an IndexError."""
    train, *_ = build([400_000, 0, 0], blend=(["a", "b"], [0.001, 0.999]), split="80,10,10", sequence_length=8)
    draws = np.bincount(train.dataset_index)
    epoch = 40 * 30 // 8
    assert draws[0] > epoch
    assert all(len(dataset) >= drawn for dataset, drawn in zip(train.datasets, draws, strict=True))
    train[len(train) - 1]


@pytest.mark.usefixtures("corpora")
def test_oversampling_is_a_clear_error() -> None:
    datasets = build([5, 0, 0], blend=(["a", "b"], [0.5, 0.5]), split="80,10,10")[0].datasets
    with pytest.raises(
        ValueError, match=r"draws \d+ samples from a \(train split\), which has.*mid_level_dataset_surp"
    ):
        BlendedDataset(datasets, [1.0, 0.001], 100_000, datasets[0].config)


@pytest.mark.usefixtures("corpora")
def test_under_megatrons_names_the_size_is_megatrons() -> None:
    train, *_ = build([1000, 0, 0], blend=(["a", "b"], [0.9995, 0.0005]), split="80,10,10")
    assert len(train) == train.size == 1001


def test_many_epochs_of_short_documents_get_int64() -> None:
    """By arithmetic, before anything is allocated; the dtype of the array says what it is."""
    plan = epoch_plan(3 * 10**6, 2, 2**32, extra_token=1, drop_last=True)
    assert plan.num_epochs == 2864
    assert needs_int64(plan.num_epochs * 10**6, 3)
    assert not needs_int64(2**31 - 1, 2**31 - 1)
    assert needs_int64(2**31, 1)
    lengths = np.array([3, 0, 5, 1], dtype=np.int32)
    documents = np.array([2, 0, 1, 3, 2, 3, 0, 1], dtype=np.int32)
    narrow, wide = (_C.build_sample_index(lengths, documents, 4, 1, 4, int64) for int64 in (False, True))
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.usefixtures("corpora")
def test_sizes_and_weights_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="blend of the valid split has weights, so its size must be a number"):
        build([10, None, 1])
    per_split = [(["a"], None), (["a", "b"], [0.5, 0.5]), None]
    with pytest.raises(ValueError, match="several validation sets take no weights"):
        build([10, None, 1], **PER_SPLIT, blend_per_split=per_split, multiple_validation_sets=True)
    with pytest.raises(ValueError, match="sizes must have 3 entries"):
        build([10, 1])
    with pytest.raises(ValueError, match="sizes must be 0 or more"):
        build([10, -1, 1])
    for size in (1.5, "5", True):
        with pytest.raises(TypeError, match="sizes must be numbers of samples"):
            build([10, size, 1])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_rules_for_the_end_of_document_need_its_id(name: str) -> None:
    """A tokenizer without one would leave them without effect."""

    class NoEod:
        unique_identifiers: ClassVar[dict[str, str]] = {"class": "NoEod"}

    with pytest.raises(ValueError, match=rf"{name} needs the end-of-document id, but tokenizer \(NoEod\) has no eod"):
        config_of(tokenizer=NoEod(), **{name: True})
    assert config_of(tokenizer=NoEod()).eod_mask_loss is False


@pytest.mark.usefixtures("corpora")
def test_several_validation_sets() -> None:
    per_split = [(["a"], None), (["a", "b"], None), None]
    fields = {**PER_SPLIT, "blend_per_split": per_split, "multiple_validation_sets": True}
    train, valid, test = build([10, None, 0], **fields, full_validation=True)
    assert [dataset.dataset_path for dataset in valid] == ["a", "b"]
    assert [len(dataset) for dataset in valid] == [187, 187]
    assert test is None
    assert len(train) >= 10
    with pytest.raises(ValueError, match="size of the valid split must be None, got 5"):
        build([10, 5, 0], **fields, full_validation=True)


@pytest.mark.usefixtures("corpora")
def test_a_single_prefix_of_a_split_ignores_its_weight() -> None:
    """As in Megatron: one prefix with a weight is a blend under ``blend``, but not under ``blend_per_split``."""
    train, *_ = build([10, 0, 0], **PER_SPLIT, blend_per_split=[(["a"], [1.0]), None, None])
    assert type(train) is GPTDataset
    train, *_ = build([10, 0, 0], blend=(["a"], [1.0]))
    assert type(train) is BlendedDataset


def test_mock_data_needs_no_files() -> None:
    train, valid, test = build([20, 5, 5], cls=MockGPTDataset, blend=None, split=None)
    for dataset, size in ((train, 20), (valid, 5), (test, 5)):
        assert type(dataset) is MockGPTDataset
        assert len(dataset) >= size
        assert len(dataset[0]["tokens"]) == 8
    # A third of the sequences each.
    assert [len(dataset.indices) for dataset in (train, valid, test)] == [33333, 33334, 33333]


@pytest.mark.usefixtures("corpora")
def test_mock_data_and_files_are_not_mixed_up() -> None:
    with pytest.raises(ValueError, match="there are no files; give one, or use MockGPTDataset"):
        build([4, 4, 4], blend=None, split=None)
    with pytest.raises(ValueError, match="reads no files; use GPTDataset"):
        build([4, 4, 4], cls=MockGPTDataset, blend=(["a"], None))


@pytest.mark.usefixtures("corpora")
def test_a_fast_start_opens_nothing(tmp_path: Path) -> None:
    fields = {
        **PER_SPLIT,
        "blend_per_split": [(["a", "b"], [0.4, 0.6]), (["b"], None), None],
        "path_to_cache": str(tmp_path / "cache"),
        "sequences_per_dataset": {"a": (50, 51), "b": (50, 51)},
    }
    slow = build([50, 5, 0], **fields)
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        Path(name).rename(f"{name}.away")
    fast = build([50, 5, 0], **fields, fast_cache_load=True, defer_npy_index_mmap=True)
    assert len(fast[0]) == len(slow[0])
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        Path(f"{name}.away").rename(name)
    for first, second in zip(slow[:2], fast[:2], strict=True):
        assert first.unique_description_hash == second.unique_description_hash
        for field, value in first[4].items():
            assert np.array_equal(value, second[4][field]), field
    with pytest.raises(Exception, match="sequences_per_dataset says"):
        build([50, 5, 0], **{**fields, "sequences_per_dataset": {"a": (49, 51), "b": (50, 51)}})


@pytest.mark.usefixtures("corpora")
def test_threads_change_nothing() -> None:
    one, two = (build([50, 5, 5], blend=(["a", "b"], [0.4, 0.6]), num_dataset_builder_threads=n)[0] for n in (1, 4))
    assert one.unique_description_hash == two.unique_description_hash
    np.testing.assert_array_equal(one.dataset_index, two.dataset_index)


@pytest.mark.usefixtures("corpora")
def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.idx"):
        build([50, 5, 5], blend=(["a", "missing"], [0.4, 0.6]), num_dataset_builder_threads=2)


@pytest.mark.usefixtures("corpora")
def test_blends_of_unlike_datasets() -> None:
    train, valid, _ = build([50, 5, 5], blend=(["a"], None), split="50,50,0")
    with pytest.raises(ValueError, match="one split"):
        BlendedDataset([train, valid], [0.5, 0.5], 4, train.config)
    mock = build([20, 5, 5], cls=MockGPTDataset, blend=None, split=None)[0]
    with pytest.raises(TypeError, match="one class"):
        BlendedDataset([train, mock], [0.5, 0.5], 4, train.config)
    with pytest.raises(ValueError, match="at least one dataset"):
        BlendedDataset([], [], 4, train.config)
    with pytest.raises(ValueError, match="not whole"):
        BlendedDataset([train], [1.5], None, train.config)
    with pytest.raises(ValueError, match="size must be 0 or more"):
        BlendedDataset([train], [1.0], -1, train.config)
    blend = BlendedDataset([train], [1.0], 4, train.config)
    with pytest.raises(IndexError, match="there are 4"):
        blend[4]
    assert float(blend[None]["loss_mask"].sum()) == 0.0


def test_object_storage_needs_local_folders() -> None:
    fields: dict[str, Any] = {"blend": (["s3://bucket/a"], None), "mmap_bin_files": False}
    with pytest.raises(ValueError, match="needs object_storage_cache_path"):
        build([4, 4, 4], **fields)
    with pytest.raises(ValueError, match="needs path_to_cache"):
        build([4, 4, 4], **fields, path_to_cache=None, object_storage_cache_path="idx")
    with pytest.raises(ValueError, match="mmap"):
        build([4, 4, 4], **{**fields, "mmap_bin_files": True}, object_storage_cache_path="idx")


def test_a_tokenizer_without_identifiers(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(np.arange(30, dtype=np.int32), [30])
    builder.finalize(str(tmp_path / "a.idx"))

    class Plain:
        eod = 0

    low_level = IndexedDataset(tmp_path / "a")
    config = config_of(tokenizer=Plain(), path_to_cache=str(tmp_path / "cache"))
    with pytest.raises(TypeError, match="Plain has no unique_identifiers"):
        GPTDataset(low_level, "a", np.arange(1, dtype=np.int32), 1, Split.train, config)


def test_float_data_has_no_tokens(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.float32)
    builder.add_document(np.arange(30, dtype=np.float32), [30])
    builder.finalize(str(tmp_path / "a.idx"))
    low_level = IndexedDataset(tmp_path / "a")
    dataset = GPTDataset(low_level, "a", np.arange(1, dtype=np.int32), 1, Split.train, config_of())
    with pytest.raises(Exception, match="float32 holds no token ids"):
        dataset[0]
