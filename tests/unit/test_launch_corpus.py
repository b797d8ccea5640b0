"""The quickstart's corpus: real, capped, free of duplicates, the same every time."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import corpus
from corpus import END_OF_TEXT, select, train_tokenizer


def document(number: int) -> tuple[str, str]:
    return f"name-{number}", f"text {number} " * 20


def test_selection_ignores_the_order_of_the_source() -> None:
    documents = [document(i) for i in range(50)]
    chosen = select(documents, 10**6)
    assert chosen == select(documents[::-1], 10**6)
    assert sorted(chosen) == sorted((name, text.strip()) for name, text in documents)


def test_selection_stops_at_the_size() -> None:
    chosen = select((document(i) for i in range(100)), 1000)
    assert 500 < sum(len(text.encode()) for _, text in chosen) <= 1000


def test_selection_drops_repeated_and_tiny_texts() -> None:
    text = "the same licence " * 10
    chosen = select([("a", text), ("b", text + "\n"), ("c", "tiny")], 10**6)
    assert [text for _, text in chosen] == [text.strip()]


def test_lone_surrogates_become_valid_text() -> None:
    ((_, text),) = select([("a", "before \udc80 after " * 10)], 10**6)
    assert text.encode("utf-8").startswith(b"before ? after")


def test_tokenizer_keeps_any_text() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(train_tokenizer(["def f(x):\n    return x\n"] * 50, 300))
    for text in ("def f(x): return x", "naïve 漢字 🙂\r\n\t\x00", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END_OF_TEXT) is not None
    assert tokenizer.get_vocab_size() <= 300


def test_writes_both_datasets_from_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--output-dir", str(tmp_path), "--code-megabytes", "0.2", "--prose-megabytes", "0.1"]
    assert corpus.main([*words, "--vocab-size", "400"]) == 0
    for name, most in (("code", 0.2e6), ("prose", 0.1e6)):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert lines
        assert 0.5 * most < sum(len(line["text"].encode()) for line in lines) <= most
        assert len({line["text"] for line in lines}) == len(lines)
    code = [json.loads(line)["source"] for line in (tmp_path / "code.jsonl").read_text().splitlines()]
    assert all(source.endswith(".py") and "site-packages" not in source for source in code)
    assert "tokenizer: 400 ids" in capsys.readouterr().out


def test_interpreter_without_sources_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "standard_library", lambda: iter(()))
    assert corpus.main(["--output-dir", str(tmp_path)]) == 1
    assert "found no text for the code dataset" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["code.jsonl", "prose.jsonl", "tokenizer.json"])
def test_full_disk_is_one_line_with_the_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text

    def write_or_fail(self: Path, content: str, encoding: str) -> int:
        if failing in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, content, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", write_or_fail)
    words = ["--output-dir", str(tmp_path), "--code-megabytes", "0.1", "--prose-megabytes", "0.1"]
    assert corpus.main([*words, "--vocab-size", "300"]) == 1
    error = capsys.readouterr().err
    assert error == f"error: [Errno 28] No space left on device: {str(tmp_path / failing)!r}\n"
    assert not any(name.startswith(".") or name == failing for name in os.listdir(tmp_path))
