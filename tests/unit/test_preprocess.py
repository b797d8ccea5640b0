"""``tdp preprocess`` on good input: what is read, in which order, what is written."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tdp_megatron.cli.inputs import FileBatch, LineBatch, find_inputs, iter_batches
from tdp_megatron.cli.main import main
from tdp_megatron.cli.preprocess import preprocess
from tdp_megatron.indexed import IndexedDataset

EOD = 256
TEXTS = ["one", "", "zwölf €", "line\nbreak", "日本語", " ", "\ufeff inner mark", "end"]


def jsonl(path: Path, texts: list[str], **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return path


def run(tmp_path: Path, *inputs: Path | str, **options: Any) -> list[str | None]:
    """The documents that come out, decoded; None for a document of no sequence."""
    options = {"json_keys": ["text"], "workers": 1, **options}
    stats = preprocess([str(path) for path in inputs], str(tmp_path / "out" / "x"), **options)
    documents = decode(tmp_path / "out" / f"x_{options['json_keys'][0]}_document", options.get("append_eod", False))
    assert stats.documents == len(documents)
    assert stats.empty_documents == documents.count(None)
    return documents


def decode(prefix: Path, eod: bool = False) -> list[str | None]:
    dataset = IndexedDataset(prefix)
    documents: list[str | None] = []
    bounds = dataset.document_indices.tolist()
    for first, last in itertools.pairwise(bounds):
        assert last - first in (0, 1)
        if first == last:
            documents.append(None)
            continue
        tokens = dataset[first].tolist()
        if eod:
            assert tokens.pop() == EOD
        documents.append(bytes(tokens).decode())
    return documents


EXPECTED = [text or None for text in TEXTS]


@pytest.mark.parametrize("eod", [False, True])
def test_jsonl(tmp_path: Path, eod: bool) -> None:
    assert run(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), append_eod=eod) == EXPECTED
    assert sorted(os.listdir(tmp_path / "out")) == ["x_text_document.bin", "x_text_document.idx"]
    assert IndexedDataset(tmp_path / "out" / "x_text_document").dtype.name == "uint16"


@pytest.mark.parametrize("kind", ["gz", "gz of two members", "zst", "zst of two frames", "zst without sizes"])
def test_compressed_jsonl(tmp_path: Path, kind: str) -> None:
    content = jsonl(tmp_path / "a.jsonl", TEXTS * 50).read_bytes()
    half = len(content) // 2
    squeeze = zstandard.ZstdCompressor().compress
    stream = zstandard.ZstdCompressor().compressobj()
    packed = {
        "gz": lambda: gzip.compress(content),
        "gz of two members": lambda: gzip.compress(content[:half]) + gzip.compress(content[half:]),
        "zst": lambda: squeeze(content),
        "zst of two frames": lambda: squeeze(content[:half]) + squeeze(content[half:]),
        "zst without sizes": lambda: stream.compress(content) + stream.flush(),
    }[kind]()
    path = tmp_path / f"b.jsonl.{kind.split()[0]}"
    path.write_bytes(packed)
    assert run(tmp_path, path) == EXPECTED * 50


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n", "\n \t\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_blank_lines_and_byte_order_mark(tmp_path: Path, ending: str, last: bool, mark: bytes) -> None:
    text = ending.join(json.dumps({"text": text}) for text in TEXTS) + (ending if last else "")
    (tmp_path / "a.jsonl").write_bytes(mark + text.encode())
    assert run(tmp_path, tmp_path / "a.jsonl") == EXPECTED


def test_escapes_pairs_and_separators(tmp_path: Path) -> None:
    lines = [
        r'{"text": "\ud83d\ude00"}',
        '{"text": "a\u2028b\u0085c"}',
        r'{"text": "\u0000\n"}',
        '{"text":"1","text":"2"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert run(tmp_path, tmp_path / "a.jsonl") == ["\U0001f600", "a\u2028b\u0085c", "\0\n", "2"]


def test_several_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "1", "b": "x"}\n{"a": "", "b": "y"}\n{"a": "", "b": ""}\n')
    assert (
        main(["preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "x"), "--json-keys", "a", "b"]) == 0
    )
    assert decode(tmp_path / "x_a_document") == ["1", None, None]
    assert decode(tmp_path / "x_b_document") == ["x", "y", None]
    assert not (tmp_path / "x_text_document.bin").exists()


def test_names_with_spaces_commas_and_other_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "ein, zwei drei"
    folder.mkdir()
    jsonl(folder / "ü, [1]*.jsonl", ["a"])
    (folder / "b c.txt").write_text("b")
    with open(os.fsencode(folder) + b"/\xff.txt", "w") as file:
        file.write("c")
    assert run(tmp_path, folder) == ["b", "a", "c"]


def test_folder_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_text("a")
    (folder / "a.md").write_bytes(b"\xef\xbb\xbfmd\r\n")
    (folder / "B.py").write_text("B")
    (folder / "b" / "deep" / "c.py").write_text("c")
    (folder / "b" / "empty.py").write_text("")
    (folder / "z.txt.gz").write_bytes(gzip.compress(b"zip"))
    (folder / ".hidden.py").write_text("no")
    (folder / ".git" / "c.py").write_text("no")
    (folder / "loop").symlink_to(folder)
    (folder / "gone.py").symlink_to(folder / "nothing")
    jsonl(folder / "d.jsonl", ["json"])
    assert run(tmp_path, folder) == ["B", "md\r\n", "a", "c", None, "json", "zip"]
    assert run(tmp_path, folder, text_globs=["**/*.py"]) == ["B", "a", "c", None]
    assert run(tmp_path, folder, text_globs=["*.py", "b/**/*.py", "*.md"]) == ["B", "md\r\n", "a", "c", None]
    # With a pattern, what matches it is text whatever its name.
    assert run(tmp_path, folder, text_globs=["*.jsonl"]) == ['{"text": "json"}\n']


def test_output_inside_the_input_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for _ in range(2):
        preprocess([str(tmp_path)], str(tmp_path / "x"), json_keys=["text"])
        assert decode(tmp_path / "x_text_document") == ["a"]


def test_named_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.py").write_text("code")
    lines = jsonl(tmp_path / "corpus", ["line"])
    assert run(tmp_path, lines, tmp_path / "a.txt", lines, tmp_path / "b.py", text_globs=["**/*.py"]) == [
        "line",
        "plain",
        "line",
        "code",
    ]


def test_four_thousand_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(4000):
        (folder / f"{i:04d}.txt").write_text(str(i))
    assert run(tmp_path, folder, workers=2) == [str(i) for i in range(4000)]


def corpus(tmp_path: Path) -> tuple[Path, list[str | None]]:
    """Lines from empty to several batches long, so that batches end everywhere."""
    rng = random.Random(1)
    texts = ["ä" * rng.choice([0, 1, 10, 1000, 60_000]) + str(i) * (i % 3 > 0) for i in range(400)]
    texts[50] = "huge" * 800_000
    return jsonl(tmp_path / "a.jsonl", texts), [text or None for text in texts]


def test_same_files_for_any_number_of_workers(tmp_path: Path) -> None:
    path, expected = corpus(tmp_path)
    assert run(tmp_path, path, append_eod=True) == expected
    out = tmp_path / "out"
    alone = {name: (out / name).read_bytes() for name in os.listdir(out)}
    for workers in (2, 3):
        run(tmp_path, path, append_eod=True, workers=workers)
        assert {name: (out / name).read_bytes() for name in os.listdir(out)} == alone


@pytest.mark.parametrize("batch_bytes", [1, 7, 100, 1 << 20])
def test_batches_are_whole_lines_that_know_their_place(tmp_path: Path, batch_bytes: int) -> None:
    content = b"\xef\xbb\xbf" + b"".join(b"x" * (n % 13) + b"\n" for n in range(60)) + b"last"
    (tmp_path / "a.jsonl").write_bytes(content)
    files = find_inputs([str(tmp_path)], [])
    batches = list(iter_batches(files, batch_bytes))
    assert sum(batch.disk_bytes for batch in batches) == len(content)
    line, byte = 1, 3
    for batch in batches:
        assert isinstance(batch, LineBatch)
        assert (batch.first_line, batch.first_byte) == (line, byte)
        assert batch.ends_file == (batch is batches[-1])
        assert batch.data.endswith(b"\n") or batch.ends_file
        line += batch.data.count(b"\n")
        byte += len(batch.data)
    assert b"".join(batch.data for batch in batches if isinstance(batch, LineBatch)) == content[3:]


def test_batches_keep_texts_and_lines_in_order(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "d.txt"):
        (tmp_path / name).write_text("12345")
    jsonl(tmp_path / "c.jsonl", ["x"])
    batches = list(iter_batches(find_inputs([str(tmp_path)], []), 5))
    names = [batch.paths if isinstance(batch, FileBatch) else batch.path for batch in batches]
    assert names == [
        [str(tmp_path / "a.txt")],
        [str(tmp_path / "b.txt")],
        str(tmp_path / "c.jsonl"),
        [str(tmp_path / "d.txt")],
    ]


def test_command_prints_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "x"), "--append-eod"]
    assert main([*arguments, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    tokens = sum(len(text.encode()) + 1 for text in TEXTS if text)
    assert f"8 documents (1 empty), {tokens} tokens from" in out
    assert "x_text_document.bin" in out
    assert main([*arguments, "--quiet", "--dtype", "int64"]) == 0
    assert capsys.readouterr() == ("", "")
    assert IndexedDataset(tmp_path / "x_text_document").dtype.name == "int64"
