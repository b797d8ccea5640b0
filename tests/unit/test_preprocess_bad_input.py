"""``tdp preprocess`` on bad input: the place, the reason, and nothing written."""

from __future__ import annotations

import gzip
import os
import re
import sys
from pathlib import Path

import pytest
import zstandard

from tdp_megatron.cli.main import main
from tdp_megatron.indexed import IndexedDataset

GOOD = b'{"text": "good"}\n'

BAD_LINES = {
    "two_objects": (b'{"text": "a"}{"text": "b"}\n', 13, "more follows the first JSON value"),
    "two_objects with space": (b'{"text": "a"} {"text": "b"}\n', 14, "more follows the first JSON value"),
    "invalid_utf8": (b'{"text": "\xe4a"}\n', 10, "byte 0xe4"),
    "invalid_utf8 overlong": (b'{"text": "\xc0\x80"}\n', 10, "byte 0xc0"),
    "invalid_utf8 surrogate": (b'{"text": "\xed\xa0\x80"}\n', 10, "byte 0xed"),
    "cut_line": (b'{"text": "b', 9, "the last line is cut"),
    "cut_line after a key": (b'{"text"', 7, "the last line is cut"),
    "invalid_json": (b'{"text": "b\n', 9, "Unterminated string"),
    "invalid_json after umlaut": ('{"ä": 1, text}\n'.encode(), 10, "invalid JSON"),
    "invalid_json control": (b'{"text": "a\x01"}\n', 11, "Invalid control character"),
    "invalid_json nan": (b'{"text": "a", "x": NaN}\n', 0, "NaN is not JSON"),
    "invalid_json infinity": (b'{"text": "a", "x": [-Infinity]}\n', 0, "-Infinity is not JSON"),
    "invalid_json depth": (b"[" * 100_000 + b"\n", 0, "invalid JSON"),
    "invalid_json number": (b'{"text": "a", "x": ' + b"9" * 5000 + b"}\n", 0, "invalid JSON"),
    "invalid_json mark": (b'\xef\xbb\xbf{"text": "a"}\n', 0, "BOM"),
    "not_an_object": (b'["text"]\n', 0, "expected a JSON object, found an array"),
    "not_an_object string": (b'"text"\n', 0, "found a string"),
    "not_an_object null": (b"null\n", 0, "found null"),
    "missing_key": (b'{"Text": "a", "id": 1}\n', 0, "no key 'text'; the object has: Text, id"),
    "missing_key empty": (b"{}\n", 0, "the object has: none"),
    "null_text": (b'{"text": null}\n', 0, "'text' is null"),
    "not_a_string": (b'{"text": 5}\n', 0, "must be a string, found a number"),
    "not_a_string list": (b'{"text": ["a"]}\n', 0, "found an array"),
    "not_a_string bool": (b'{"text": true}\n', 0, "found a boolean"),
    "lone_surrogate": (b'{"text": "a\\ud800b"}\n', 0, "lone surrogate \\ud800"),
    "lone_surrogate low": (b'{"text": "\\udc00\\ud800"}\n', 0, "lone surrogate \\udc00"),
}


def run(tmp_path: Path, path: Path, *more: str) -> int:
    return main(["preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "out" / "x"), "--quiet", *more])


def written(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "out")) if (tmp_path / "out").exists() else []


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("compressed", [False, True])
def test_bad_line(tmp_path: Path, kind: str, compressed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    line, position, reason = BAD_LINES[kind]
    content = GOOD + GOOD + line + (b"" if kind.startswith("cut_line") else GOOD)
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)
    assert run(tmp_path, path, "--workers", "1") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"tdp: error: {path}: line 3, byte {2 * len(GOOD) + position}")
    assert ("of the decompressed text" in err) == compressed
    assert reason in err
    assert "Traceback" not in err
    assert written(tmp_path) == []

    assert run(tmp_path, path, "--workers", "1", "--skip-bad-lines") == 0
    err = capsys.readouterr().err
    assert f"skipped 1 bad lines or files: {kind.split()[0]} 1" in err
    assert f"{path}: line 3" in err
    good = 2 if kind.startswith("cut_line") else 3
    assert [bytes(s.tolist()) for s in IndexedDataset(tmp_path / "out" / "x_text_document")] == [b"good"] * good


def test_first_bad_line_is_named_whatever_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filler = b'{"text": "' + b"x" * 10_000 + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(filler * 300 + b"bad\n" + filler * 300 + b"worse\n")
    for workers in ("1", "2"):
        assert run(tmp_path, tmp_path / "a.jsonl", "--workers", workers) == 1
        assert f"line 301, byte {300 * len(filler)}" in capsys.readouterr().err
        assert written(tmp_path) == []


def test_counts_by_reason_and_few_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"[]\n" * 30 + b'{"text": null}\n' * 2 + b"{" + b"\n" + GOOD)
    assert run(tmp_path, tmp_path / "a.jsonl", "--on-error", "skip", "--workers", "1") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tdp: skipped 33 bad lines or files: invalid_json 1, not_an_object 30, null_text 2"
    assert len(lines) == 11


def test_a_line_bad_in_one_key_is_bad_in_all(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "1", "b": "2"}\n{"a": "3", "b": null}\n{"a": "5", "b": "6"}\n')
    assert run(tmp_path, tmp_path / "a.jsonl", "--json-keys", "a", "b", "--skip-bad-lines", "--workers", "1") == 0
    assert [len(IndexedDataset(tmp_path / "out" / f"x_{key}_document")) for key in "ab"] == [2, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no documents in .*; nothing was written"),
        ("a.jsonl", b"\n \n", "no documents"),
        ("a.jsonl", b"\xef\xbb\xbf", "no documents"),
        ("a.jsonl", b"\xff\xfe{\0}\0", "byte 0: the file is UTF-16"),
        ("a.jsonl.gz", b"", "no documents"),
        ("a.jsonl.gz", GOOD, "damaged gzip data after 0 decompressed bytes"),
        ("a.jsonl.gz", gzip.compress(GOOD * 999, mtime=0)[:-9], "the gzip file is cut after"),
        (
            "a.jsonl.gz",
            gzip.compress(GOOD, mtime=0) + b"junk",
            "damaged gzip data after 17 decompressed bytes: Not a gzipped",
        ),
        ("a.jsonl.zst", b"", "no documents"),
        ("a.jsonl.zst", GOOD, "damaged zstd data after 0 decompressed bytes"),
        ("a.jsonl.zst", zstandard.compress(GOOD * 999)[:-1], "the zstd file is cut after"),
        ("a.jsonl.zst", zstandard.compress(GOOD) + b"junk!", "damaged zstd data after 17"),
        ("a.txt", b"ok \xff", "a.txt: byte 3: invalid UTF-8: byte 0xff"),
        ("a.txt", b"\xef\xbb\xbfok \xff", "a.txt: byte 6: invalid UTF-8"),
        ("a.txt", b"\xfe\xff", "the file is UTF-16"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(tmp_path, tmp_path / name, "--workers", "1") == 1
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert written(tmp_path) == []


def test_only_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"[]\n")
    assert run(tmp_path, tmp_path / "a.jsonl", "--skip-bad-lines", "--workers", "1") == 1
    assert "no documents in" in (err := capsys.readouterr().err)
    assert "(1 bad ones were skipped); nothing was written" in err
    assert written(tmp_path) == []


def test_bad_text_file_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in (("a.txt", b"a"), ("b.png", b"\x89PNG\xff"), ("c.txt.gz", b"no"), ("d.txt", b"d")):
        (folder / name).write_bytes(content)
    assert run(tmp_path, folder, "--skip-bad-lines", "--workers", "1") == 0
    assert "skipped 2 bad lines or files: invalid_utf8 1, unreadable_file 1" in capsys.readouterr().err
    assert len(IndexedDataset(tmp_path / "out" / "x_text_document")) == 2


def test_failure_leaves_the_old_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD * 3 + b"bad\n")
    assert run(tmp_path, tmp_path / "a.jsonl", "--workers", "1") == 0
    assert run(tmp_path, tmp_path / "b.jsonl", "--workers", "1") == 1
    assert len(IndexedDataset(tmp_path / "out" / "x_text_document")) == 1
    assert written(tmp_path) == ["x_text_document.bin", "x_text_document.idx"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "required: --input, --output-prefix"),
        (["--input", "{a}"], 2, "required: --output-prefix"),
        (["--input", "{a}", "--output-prefix", "{out}/"], 2, "ends in a folder"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--workers", "0"], 2, "workers must be at least 1, got 0"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--workers", "two"], 2, "invalid int value"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--json-keys", "a/b"], 2, "cannot be part of a file name"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--json-keys", "a", "a"], 2, "each key may be there once"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--dtype", "uint8"], 2, "holds ids below 256"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--dtype", "float32"], 2, "invalid choice"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--eod-token", "</s>"], 2, "without --append-eod"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--on-error", "skip", "--skip-bad-lines"], 2, "not allowed"),
        (["--input", "{t}", "--output-prefix", "{out}/x", "--json-keys", "a", "b"], 2, "is plain text and has no keys"),
        (["--input", "{a}.no", "--output-prefix", "{out}/x"], 1, "input .*a.jsonl.no does not exist"),
        (["--input", "{empty}", "--output-prefix", "{out}/x"], 1, "no files in"),
        (["--input", "{empty}", "--output-prefix", "{out}/x", "--text-glob", "*.c"], 1, r"no files that match \*.c in"),
        (["--input", "{a}", "--output-prefix", "{a}/x"], 1, "a.jsonl is a file or lies in one"),
        (["--input", "{a}", "--output-prefix", "{out}/x", "--tokenizer", "{a}.no"], 1, "tokenizer .* does not exist"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "t.txt").write_bytes(b"t")
    (tmp_path / "empty").mkdir()
    places = {"a": "a.jsonl", "t": "t.txt", "out": "out", "empty": "empty"}
    filled = [argument.format(**{name: tmp_path / place for name, place in places.items()}) for argument in arguments]
    # argparse ends the process by itself, our own checks return.
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["preprocess", *filled]))
    assert ended.value.code == code
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert written(tmp_path) == []


def test_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    # /proc refuses new files to everybody, root included.
    assert main(["preprocess", "--input", str(tmp_path / "a.jsonl"), "--output-prefix", "/proc/self/x", "--quiet"]) == 1
    assert "/proc/self/x_text_document.bin" in capsys.readouterr().err


def _numbered(first: int, count: int) -> bytes:
    return b"".join(b'{"text": "%d %s"}\n' % (i, b"x" * (i % 97)) for i in range(first, first + count))


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.jsonl.gz", gzip.compress(_numbered(0, 9000), mtime=0)[:-9], "the gzip file is cut after"),
        ("b.jsonl.gz", gzip.compress(_numbered(0, 9000), mtime=0)[:-90], "the gzip file is cut after"),
        ("b.jsonl.gz", gzip.compress(_numbered(0, 9000), mtime=0) + b"junk", "damaged gzip data after"),
        ("b.jsonl.zst", zstandard.compress(_numbered(0, 9000))[:-90], "the zstd file is cut after"),
        ("b.jsonl.gz", b"no gzip", "damaged gzip data after 0"),
        ("b.jsonl", b"\xff\xfe{\0}\0", "the file is UTF-16"),
    ],
)
def test_a_cut_file_is_counted_and_keeps_its_lines(
    tmp_path: Path, workers: str, name: str, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(_numbered(0, 10))
    (folder / name).write_bytes(content)
    (folder / "c.jsonl").write_bytes(_numbered(0, 20))
    assert run(tmp_path, folder, "--skip-bad-lines", "--workers", workers) == 0
    err = capsys.readouterr().err
    assert "unreadable_file 1" in err
    assert re.search(f"{name}: .*{message}|{message}", err)
    dataset = IndexedDataset(tmp_path / "out" / "x_text_document")
    numbers = [int(bytes(document.astype("uint8")).split()[0]) for document in dataset]
    middle = len(numbers) - 30
    assert numbers == [*range(10), *range(middle), *range(20)]
    assert (middle > 6000) == (len(content) > 100)
    assert run(tmp_path, folder, "--workers", workers) == 1
    assert message in capsys.readouterr().err
