"""Data arguments in all their forms, ``tdp sequences`` and ``tdp verify`` with what it writes, ``tdp merge``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.cli.data_arguments import add_data_arguments, blends_of, unique_prefixes
from tdp_megatron.cli.main import main
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDataset, IndexedDatasetBuilder


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16, multimodal: bool = False) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal) as builder:
        for i, document in enumerate(documents):
            for sequence in document:
                builder.add_item(sequence, mode=i + 1 if multimodal else 0)
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [[[1, 2]], [[3]], []])
    write(Path("b"), [[[1], [2]]], np.int32)
    write(Path("with space, comma"), [[[4] * 9]])
    return tmp_path


def parse(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    return blends_of(parser.parse_args(arguments))


def test_lists_on_the_command_line() -> None:
    assert parse("--data-path", "a") == ((["a"], None), None)
    assert parse("--data-path", "30", "a", "70", "b") == ((["a", "b"], [30.0, 70.0]), None)
    assert parse("--data-path", "a", "b") == ((["a", "b"], None), None)
    assert parse("--train-data-path", "1", "a", "2", "b", "--test-data-path", "c") == (
        None,
        [(["a", "b"], [1.0, 2.0]), None, (["c"], None)],
    )


@pytest.mark.parametrize("text", ["0.3 a 0.7 b", "0.3 a\n0.7\tb\n\n", " 0.3\na\n0.7\nb"])
def test_list_in_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_text(text)
    assert parse("--data-args-path", str(tmp_path / "list")) == ((["a", "b"], [0.3, 0.7]), None)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train": "1 a 2 b", "valid": ["c"], "test": None}, [(["a", "b"], [1.0, 2.0]), (["c"], None), None]),
        ({"train": ["1", "a b", 2, "c"]}, [(["a b", "c"], [1.0, 2.0]), None, None]),
        ({"train": ["a"], "valid": "", "test": []}, [(["a"], None), None, None]),
    ],
)
def test_per_split_file(tmp_path: Path, content: Any, expected: Any) -> None:
    (tmp_path / "splits.json").write_text(json.dumps(content))
    assert parse("--per-split-data-args-path", str(tmp_path / "splits.json")) == (None, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, found list"),
        ('{"train": ["a"], "validation": ["b"]}', "unknown key 'validation'; the keys are train, valid, test"),
        ('{"train": {"a": 1}}', "train must be a string or a list"),
        ('{"train": [["a"]]}', "train must be a string or a list"),
        ("{}", "none of train, valid, test has data"),
        ('{"train": ""}', "none of"),
    ],
)
def test_bad_per_split_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "splits.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        parse("--per-split-data-args-path", str(tmp_path / "splits.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no data is given; give one of --data-path, --data-args-path"),
        (["--data-path", "a", "--train-data-path", "b"], "exclude each other"),
        (["--data-path", "a", "--data-args-path", "f"], "--data-path and --data-args-path exclude each other"),
        (["--valid-data-path", "a", "--per-split-data-args-path", "f"], "exclude each other"),
        (["--data-path"], "the blend list is empty"),
        (["--data-path", "1", "a", "b", "c"], "mixes weights and prefixes"),
    ],
)
def test_forms_that_do_not_go_together(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(FormatError, match="is empty"):
        parse("--data-args-path", str(tmp_path / "empty"))
    for option in ("--data-args-path", "--per-split-data-args-path"):
        with pytest.raises(FileNotFoundError):
            parse(option, str(tmp_path / "missing"))


def test_every_prefix_once_in_order() -> None:
    assert unique_prefixes((["b", "a", "b"], None), None) == ["b", "a"]
    assert unique_prefixes(None, [(["b"], [1.0]), None, (["a", "b"], None)]) == ["b", "a"]


# -- tdp sequences -----------------------------------------------------------------------------------------------


def sequences(*arguments: str) -> int:
    return main(["sequences", "--per-dataset-sequences-path", "out.json", *arguments])


def test_sequences(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sequences("--train-data-path", "2", "a", "1", "b", "--valid-data-path", "with space, comma", "a") == 0
    written = json.loads(Path("out.json").read_text())
    # Megatron's form: sequences, and the length of document_indices.
    assert written == {"a": [2, 4], "b": [2, 2], "with space, comma": [1, 2]}
    assert capsys.readouterr().out == "out.json: 3 prefixes, 5 sequences\n"
    for prefix in written:
        dataset = IndexedDataset(prefix, fast_cache_load=True, sequences_per_dataset=written)
        assert (len(dataset), len(dataset.sequence_lengths)) == (written[prefix][0],) * 2


def test_sequences_with_sizes(corpora: Path) -> None:
    assert sequences("--data-path", "a", "b", "with space, comma", "--with-sizes") == 0
    written = json.loads(Path("out.json").read_text())
    assert written["a"] == [2, 4, 8, 6, Path("a.idx").stat().st_size]
    assert written["b"] == [2, 2, 4, 8, Path("b.idx").stat().st_size]
    dataset = IndexedDataset("b", fast_cache_load=True, sequences_per_dataset=written)
    assert (dataset.dtype, dataset.num_tokens) == (np.int32, 2)


def test_sequences_of_bad_files(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text("old")
    Path("b.bin").write_bytes(b"1")
    assert sequences("--data-path", "missing", "a", "b") == 1
    err = capsys.readouterr().err
    assert "missing.idx does not exist" in err
    assert "b.bin: bin has 1 bytes, index needs 8" in err
    assert "2 bad files, nothing was written" in err
    assert Path("out.json").read_text() == "old"
    assert sorted(p.name for p in corpora.glob("*.tmp")) == []


def test_sequences_of_multimodal_files(corpora: Path) -> None:
    write(Path("m"), [[[1, 2]], [[3]]], multimodal=True)
    assert sequences("--data-path", "m") == 1
    assert sequences("--data-path", "m", "--multimodal") == 0
    assert json.loads(Path("out.json").read_text()) == {"m": [2, 3]}


def test_verify_against_the_manifest(corpora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify = ["verify", "--per-dataset-sequences-path", "out.json"]
    sequences("--data-path", "a", "b")
    assert main(verify) == 0
    assert main([*verify, "a"]) == 0
    assert capsys.readouterr().out.count(": ok, ") == 3
    assert main([*verify, "with space, comma", "a"]) == 1
    assert "out.json has no entry for with space, comma" in capsys.readouterr().err
    write(Path("a"), [[[1, 2]]])
    assert main(verify) == 1
    out, err = capsys.readouterr()
    assert "b: ok" in out
    assert "sequences_per_dataset says (2, 4) sequences and document indices, the index has (1, 2)" in err


@pytest.mark.parametrize("text", ['{"a": 5}', '{"a": ["x"]}', '{"a": {"n": 1}}', "[]", "nothing"])
def test_manifest_that_is_none(corpora: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.json").write_text(text)
    assert main(["verify", "--per-dataset-sequences-path", "out.json"]) == 1
    assert "out.json: " in capsys.readouterr().err


# -- tdp merge ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def merge(folder: Path, output: Path, *more: str) -> int:
    return main(["merge", "--input", str(folder), "--output-prefix", str(output), *more])


def test_merge_in_order_of_name(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "10", [[[10, 1]], [[10]]])
    write(folder / "9", [[[9], [9, 2]], []])
    write(folder / "B.x", [[[66]]])
    (folder / "README.md").write_text("no pair")
    (folder / "sub.bin").mkdir()
    assert merge(folder, tmp_path / "out") == 0
    merged = IndexedDataset(tmp_path / "out")
    assert [sequence.tolist() for sequence in merged] == [[10, 1], [10], [9], [9, 2], [66]]
    assert merged.document_indices.tolist() == [0, 1, 2, 4, 4, 5]
    assert "3 pairs, 5 documents, 5 sequences, 7 tokens of uint16" in capsys.readouterr().out


def test_merge_keeps_modes(folder: Path, tmp_path: Path) -> None:
    write(folder / "a", [[[1]], [[2]]], multimodal=True)
    write(folder / "b", [[[3]]], multimodal=True)
    assert merge(folder, tmp_path / "out") == 1  # modes that nobody asked for
    assert merge(folder, tmp_path / "out", "--multimodal") == 0
    merged = IndexedDataset(tmp_path / "out", multimodal=True)
    assert merged.sequence_modes is not None
    assert merged.sequence_modes.tolist() == [1, 2, 1]


def _other_dtype(folder: Path) -> None:
    write(folder / "b", [[[1]]], np.int32)


def _half_a_pair(folder: Path) -> None:
    (folder / "b.bin").write_bytes(b"")


def _no_pair(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _cut_file(folder: Path) -> None:
    write(folder / "b", [[[1, 2]]])
    (folder / "b.bin").write_bytes(b"1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_other_dtype, "b holds int32, .*a uint16; only one dtype can be merged"),
        (_half_a_pair, "b.idx is missing, its partner is there"),
        (_no_pair, "holds no pair"),
        (_cut_file, "b.bin: bin has 1 bytes, index needs 4"),
    ],
)
def test_merge_that_cannot_be(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "a", [[[1]]])
    damage(folder)
    assert merge(folder, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_merge_into_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "a", [[[1]]])
    assert merge(folder, folder / ".." / "in" / "a") == 2
    assert "lies in the folder to merge" in capsys.readouterr().err
    assert merge(folder, folder / "merged") == 2  # the next merge would take it for an input
    assert "write the result to another folder" in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin", "a.idx"]
    assert merge(folder, folder / "missing" / "x") == 1
    assert main(["merge", "--input", str(folder), "--output-prefix", f"{folder}/"]) == 2
    assert merge(folder / "missing", folder / "x") == 1


def test_source_that_changes_while_it_is_merged(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder / "a", [[[1, 2, 3]]])
    original = IndexedDatasetBuilder._fatal

    def cut(self: IndexedDatasetBuilder) -> Any:
        Path(f"{path}.bin").write_bytes(b"12")
        return original(self)

    builder = IndexedDatasetBuilder(tmp_path / "out.bin", np.uint16)
    monkeypatch.setattr(IndexedDatasetBuilder, "_fatal", cut)
    with pytest.raises(FormatError, match="changed while in use"):
        builder.add_index(path)
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize("folder", ["missing", "a.bin"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "--input", "pairs", "--output-prefix", "{}/all"),
        ("sequences", "--data-path", "a", "--per-dataset-sequences-path", "{}/all"),
        ("simulate", "a", "--dp", "2", "--html", "{}/all"),
        ("simulate", "a", "--dp", "2", "--trace", "{}/all"),
    ],
    ids=lambda arguments: arguments[0] + arguments[-2],
)
def test_an_output_whose_folder_is_none_names_file_and_remedy(
    corpora: Path, arguments: tuple[str, ...], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpora / "pairs").mkdir()
    write(corpora / "pairs" / "p", [[[1]]])
    before = sorted(corpora.rglob("*"))
    assert main([argument.format(folder) for argument in arguments]) == 1
    what = "missing" if folder == "missing" else "a file"
    message = capsys.readouterr().err
    assert f"cannot write it: {folder} is {what}; make that folder first: '{folder}/all" in message
    assert ".tmp" not in message
    assert sorted(corpora.rglob("*")) == before
