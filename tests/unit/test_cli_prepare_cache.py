"""``tdp prepare-cache``: the caches that a training run then starts from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.cli.main import main
from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, TokenizerSpec
from tdp_megatron.errors import CacheError
from tdp_megatron.indexed import IndexedDatasetBuilder

BASE = ["--seq-length", "16", "--data-cache-path", "cache", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
RUN = ["--train-iters", "10", "--global-batch-size", "4", "--eval-interval", "5", "--eval-iters", "1"]
#: What RUN needs.
SIZES = [40, 12, 4]


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        lengths = rng.integers(1, 60, 2000)
        with IndexedDatasetBuilder(f"{name}.bin", np.uint16) as builder:
            builder.add_sequences(rng.integers(0, 999, lengths.sum()), lengths, np.ones(2000))
            builder.finalize(f"{name}.idx")


def prepare(*arguments: str) -> int:
    return main(["prepare-cache", *BASE, *RUN, *arguments])


def train(folder: str, sizes: Any = SIZES, **fields: Any) -> list[Any]:
    config = GPTDatasetConfig(
        **{
            "random_seed": 1234,
            "sequence_length": 16,
            "path_to_cache": folder,
            "tokenizer": TokenizerSpec.null(1000),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            **fields,
        }
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def files(folder: str) -> dict[str, bytes]:
    """Caches by name; the manifests hold times, of files that are the same."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if not p.name.endswith("manifest.json")}


FORMS: list[tuple[list[str], dict[str, Any]]] = [
    (["--data-path", "a", "--split", "70,20,10"], {"blend": (["a"], None), "split": "70,20,10"}),
    (["--data-path", "a"], {"blend": (["a"], None), "split": "969, 30, 1"}),
    (
        ["--data-path", "3", "a", "1", "b", "--split", "70,20,10"],
        {"blend": (["a", "b"], [3.0, 1.0]), "split": "70,20,10"},
    ),
    (["--data-args-path", "list.txt", "--split", "8,1,1"], {"blend": (["a", "b"], None), "split": "8,1,1"}),
    (
        ["--train-data-path", "1", "a", "1", "b", "--valid-data-path", "c"],
        {"blend_per_split": [(["a", "b"], [1.0, 1.0]), (["c"], None), None]},
    ),
    (
        ["--per-split-data-args-path", "splits.json"],
        {"blend_per_split": [(["a", "b"], [1.0, 2.0]), (["c"], None), (["b"], None)]},
    ),
]


@pytest.mark.parametrize(("arguments", "fields"), FORMS)
def test_same_caches_as_training_writes(arguments: list[str], fields: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("list.txt").write_text("a\nb\n")
    Path("splits.json").write_text(json.dumps({"train": "1 a 2 b", "valid": ["c"], "test": "b"}))
    assert prepare(*arguments) == 0
    built = train("other", **fields)
    assert files("cache") == files("other") != {}
    out = capsys.readouterr().out
    for line, dataset in zip(("train", "valid", "test"), built, strict=True):
        assert f"built samples {line:6} {'none' if dataset is None else len(dataset)}\n" in out


@pytest.mark.parametrize("flag", ["fast_cache_load", "defer_npy_index_mmap"])
def test_training_starts_fast_afterwards(flag: str) -> None:
    blends = [(["a", "b"], [1.0, 2.0]), (["c"], None), None]
    data = ["--train-data-path", "1", "a", "2", "b", "--valid-data-path", "c"]
    with pytest.raises(CacheError, match="tdp prepare-cache"):
        _ = train("cache", blend_per_split=blends, **{flag: True})[0][0]
    assert prepare(*data, "--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap") == 0
    assert main(["sequences", *data, "--per-dataset-sequences-path", "counts.json", "--with-sizes"]) == 0
    counts = json.loads(Path("counts.json").read_text())
    fast = train("cache", blend_per_split=blends, sequences_per_dataset=counts, **{flag: True})
    slow = train("other", blend_per_split=blends)
    for a, b in zip(fast[:2], slow[:2], strict=True):
        assert len(a) == len(b)
        for i in range(len(a)):
            np.testing.assert_array_equal(a[i]["tokens"], b[i]["tokens"])


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--context-parallel-size", "2"]
    arguments = ["--train-samples", "100", "--micro-batch-size", "3", "--eval-interval", "5", "--eval-iters", "1"]
    ranks = ["--prepare-cache-world-size", "16", "--data-path", "a", "--dataloader-fast-cache-load"]
    assert main(["prepare-cache", *BASE, *arguments, *more, *ranks]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "world size           16",
        "data parallel size   2",
        "global batch size    6",
        "cache path           cache",
        "target samples train 100",
        "target samples valid 24",
        "target samples test  6",
        "--dataloader-fast-cache-load has no effect: these caches are being written",
        *lines[-3:],
    ]
    assert lines[0] == "--split is not given: '969, 30, 1', as in Megatron"


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prepare("--data-path", "a") == 0
    assert "data parallel size   2" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert prepare("--data-path", "a") == 2
    assert "WORLD_SIZE is 'two'" in capsys.readouterr().err


def test_several_validation_sets_over_all_of_their_data(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--train-data-path", "a", "--valid-data-path", "b", "c"]
    assert prepare(*arguments, "--multiple-validation-sets", "--full-validation") == 0
    out = capsys.readouterr().out
    assert "target samples valid None" in out
    blends = [(["a"], None), (["b", "c"], None), None]
    fields = {"blend_per_split": blends, "multiple_validation_sets": True, "full_validation": True}
    built = train("other", sizes=[40, None, 4], **fields)
    assert files("cache") == files("other")
    assert f"built samples valid  {len(built[1][0])}, {len(built[1][1])}\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mock-data"], "--mock-data: .*not supported by prepare-cache"),
        (["--sft"], "--sft: "),
        (["--fim-data"], "--fim-data: "),
        (["--step-batch-size-schedule", "0:4"], "--step-batch-size-schedule: "),
        (["--rampup-batch-size", "4", "4", "100"], "--rampup-batch-size: "),
        (["--data-cache-path", ""], "--data-cache-path is missing"),
        (["--prepare-cache-world-size", "0"], "--prepare-cache-world-size must be at least 1, got 0"),
        (["--prepare-cache-world-size", "3"], "not a multiple of 3"),
        (["--train-samples", "5"], "one of them"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "GPT2BPETokenizer is not known here"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (["--split", "1,-1"], "negative"),
        (["--train-data-path", "a"], "exclude each other"),
        (["--seq-length", "0"], "sequence_length must be at least 1"),
        (["--data-path", "-1", "a"], "weight 0 of source a is -1.0"),
        (["--nothing"], None),
    ],
)
def test_what_is_refused(arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if message is None:
        with pytest.raises(SystemExit) as ended:
            prepare("--data-path", "a", *arguments)
        assert ended.value.code == 2
        return
    assert prepare("--data-path", "a", *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("cache").exists()


def test_arguments_of_a_whole_training_command() -> None:
    model = ["--num-layers", "2", "--bf16", "--lr", "1e-4", "--ignore-other-arguments"]
    assert prepare("--data-path", "a", *model) == 0


def test_data_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("--data-path", "missing") == 1
    assert "missing.idx does not exist" in capsys.readouterr().err
    Path("counts.json").write_text('{"a": [1, 2]}')
    assert prepare("--data-path", "a", "--per-dataset-sequences-path", "counts.json") == 1
    assert "says (1, 2) sequences" in capsys.readouterr().err


HF = ["chat_template", "vocab_file", "merges_file", "additional_special_tokens", "use_fast", "trust_remote_code"]


@pytest.mark.parametrize("kind", ["null", "null with ids", "hugging face", "identifiers"])
def test_tokenizers_in_the_names(kind: str) -> None:
    arguments = BASE[:4]
    if kind == "null":
        arguments = BASE
        expected: dict[str, Any] = {"tokenizer_path": None, "vocab_size": "1000"}
    elif kind == "null with ids":
        arguments = [*BASE, "--null-tokenizer-eod-id", "5", "--null-tokenizer-pad-id", "6"]
        expected = {"tokenizer_path": None, "vocab_size": "1000", "eod_id": "5", "pad_id": "6"}
    elif kind == "hugging face":
        arguments = [*arguments, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tok/hf_tiny"]
        values = ["None", "None", "None", "[]", "True", "False"]
        expected = {"tokenizer_path": "tok/hf_tiny", **dict(zip(HF, values, strict=True))}
        expected |= {"include_special_tokens": "True", "use_gigatoken": "False"}
    else:
        expected = {"tokenizer_path": "x.model", "legacy": "False", "special_tokens": "None"}
        Path("ids.json").write_text(json.dumps({"class": "my.Tokenizer", **expected}))
        arguments = [*arguments, "--tokenizer-identifiers", "ids.json"]
    assert main(["prepare-cache", *arguments, *RUN, "--data-path", "a", "--split", "1,1,1"]) == 0
    descriptions = list(Path("cache").glob("*-train-description.txt"))
    assert len(descriptions) == 1
    found = json.loads(descriptions[0].read_text())["tokenizer"]
    name = found.pop("class")
    assert name == ("my.Tokenizer" if kind == "identifiers" else TokenizerSpec.null(1).class_name)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize("text", ["{", "[]", '{"tokenizer_path": "x"}', '{"class": "x"}'])
def test_identifiers_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ids.json").write_text(text)
    arguments = ["--data-path", "a", "--tokenizer-identifiers", "ids.json"]
    assert main(["prepare-cache", *BASE[:4], *RUN, *arguments]) == 1
    assert "ids.json: " in capsys.readouterr().err
    assert main(["prepare-cache", *BASE, *RUN, *arguments]) == 2  # both
