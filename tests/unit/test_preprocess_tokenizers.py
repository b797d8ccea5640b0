"""The tokenizers behind ``tdp preprocess``: each kind of file, what it must not do, and the end of a document."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tdp_megatron.cli.main import main
from tdp_megatron.errors import FormatError, TdpError
from tdp_megatron.indexed import IndexedDataset
from tdp_megatron.tokenization import ByteTokenizer, load_tokenizer

TEXTS = [
    "the cat sat on the mat",
    "",
    "zwölf Boxkämpfer",
    "def f(x):\n    return x",
    "the <|endoftext|> the",
    "日本語 €",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        TEXTS * 5,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|endoftext|>", "<bos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # What saved tokenizers often carry, and what must have no effect here.
    bpe.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))])
    bpe.enable_truncation(4)
    bpe.enable_padding(length=16)
    bpe.save(str(folder / "tokenizer.json"))

    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the", b" t", b" the"]
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (folder / "small.tiktoken").write_bytes(lines)

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "sp.model").write_bytes(model.getvalue())
    return folder


FILES = ["bytes", "tokenizer.json", "small.tiktoken", "sp.model"]


def load(folder: Path, name: str) -> Any:
    return load_tokenizer(name if name == "bytes" else str(folder / name))


@pytest.mark.parametrize("name", FILES)
def test_every_kind(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    flat, lengths = tokenizer.encode_batch(TEXTS)
    assert (flat.dtype, lengths.dtype) == (np.int64, np.int64)
    assert lengths[1] == 0
    assert lengths.sum() == len(flat)
    assert 0 <= flat.min() <= flat.max() < tokenizer.vocab_size
    # A batch is its texts one by one, in any batch.
    for text, ids in zip(TEXTS, np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
        assert tokenizer.encode_batch([text])[0].tolist() == ids.tolist()
    empty, none = tokenizer.encode_batch([])
    assert (len(empty), len(none)) == (0, 0)


@pytest.mark.parametrize("name", FILES)
def test_end_of_document_never_comes_from_text(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    eod = tokenizer.eod_id()
    assert eod < tokenizer.vocab_size
    assert eod in tokenizer.special_tokens.values()
    spelled = "".join(tokenizer.special_tokens)
    assert eod not in tokenizer.encode_batch([*TEXTS, spelled])[0]


def test_saved_truncation_padding_and_template_have_no_effect(folder: Path) -> None:
    tokenizer = load(folder, "tokenizer.json")
    text = TEXTS[0] * 3
    flat, _ = tokenizer.encode_batch([text])
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    assert plain.decode(flat.tolist()) == text
    assert flat.tolist() == plain.encode(text, add_special_tokens=False).ids


def test_tiktoken_ids(folder: Path) -> None:
    tokenizer = load(folder, "small.tiktoken")
    assert tokenizer.encode_batch(["the the"])[0].tolist() == [257, 259]
    assert (tokenizer.eod_id(), tokenizer.vocab_size) == (260, 261)


def test_rank_file_of_no_known_tokenizer_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, "small.tiktoken")
    assert "260 ranks are of no known tokenizer" in caplog.text


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_vocabulary_and_merges(folder: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (tmp_path / names[0]).write_text(json.dumps(model["vocab"]))
    (tmp_path / names[1]).write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    tokenizer, same = load_tokenizer(str(tmp_path)), load(folder, "tokenizer.json")
    texts = [text for text in TEXTS if "<|" not in text]
    for found, expected in zip(tokenizer.encode_batch(texts), same.encode_batch(texts), strict=True):
        assert found.tolist() == expected.tolist()
    assert tokenizer.eod_id() == same.eod_id()
    assert tokenizer.eod_id() not in tokenizer.encode_batch(TEXTS)[0]
    (tmp_path / names[1]).write_text("no such pieces\n")
    with pytest.raises(FormatError, match=f"{names[0]} and .*{names[1]}: no vocabulary and merges"):
        load_tokenizer(str(tmp_path))
    (tmp_path / names[1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"nor vocab.json with merges.txt, encoder.json with vocab.bpe"):
        load_tokenizer(str(tmp_path))


def test_sentencepiece_ids(folder: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    tokenizer = load(folder, "sp.model")
    assert tokenizer.encode_batch(["the cat"])[0].tolist() == reference.encode("the cat")
    assert tokenizer.eod_id() == reference.eos_id()
    assert tokenizer.token_id("no such piece") is None
    assert tokenizer.token_id("<unk>") == reference.unk_id()


def test_ids_with_gaps(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["the-last"] = 4000
    (tmp_path / "gaps.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path / "gaps.json")).vocab_size == 4001


def test_folder_that_holds_one(folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(str(folder)).vocab_size == load(folder, "tokenizer.json").vocab_size
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_missing_end_of_document_lists_candidates(folder: Path, name: str) -> None:
    tokenizer = load(folder, name)
    with pytest.raises(FormatError, match=r"no token '<\|nothing\|>'; candidates") as caught:
        tokenizer.eod_id("<|nothing|>")
    assert all(token in str(caught.value) for token in tokenizer.special_tokens)


def test_preprocess_without_an_end_of_document(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """datatrove 489: found before a document is read, and nothing is written."""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[STOP]": 1}, unk_token="a"))
    words.add_special_tokens(["[STOP]"])
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out" / "x"), "--quiet"]
    arguments += ["--tokenizer", str(tmp_path / "words.json"), "--append-eod"]
    for spelled in ([], ["--eod-token", "<|endoftext|>"]):
        assert main(["preprocess", *arguments, *spelled]) == 1
        assert "[STOP]" in capsys.readouterr().err
        assert not list(tmp_path.glob("out/*"))
    assert main(["preprocess", *arguments, "--eod-token", "[STOP]"]) == 0
    assert IndexedDataset(tmp_path / "out" / "x_text_document")[0].tolist() == [0, 1]


def test_no_usual_end_of_document(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[STOP]": 2}, unk_token="a"))
    words.save(str(tmp_path / "plain.json"))
    with pytest.raises(FormatError, match="none, it has no special tokens"):
        load_tokenizer(str(tmp_path / "plain.json")).eod_id()
    words.add_special_tokens(["[STOP]"])
    words.save(str(tmp_path / "special.json"))
    with pytest.raises(FormatError, match=r"candidates for the end of a document: \[STOP\]"):
        load_tokenizer(str(tmp_path / "special.json")).eod_id()
    assert load_tokenizer(str(tmp_path / "special.json")).eod_id("[STOP]") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a tokenizer.json, a tiktoken rank file nor"),
        (b"hello world\n", "neither"),
        (b"\xff\xfe", "neither"),
        (b'{"model": 1}', "not a tokenizer.json the tokenizers package can read"),
        (b"{", "not a tokenizer.json"),
        (b"YQ== 0\nYg== one\n", "line 2: expected a base64 token and its rank, found b'Yg== one"),
        (b"YQ== 0\nYg== 0\n", "two tokens have the same rank"),
        (b"\x0a\x05abc", "not a SentencePiece model"),
    ],
)
def test_file_that_is_no_tokenizer(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        load_tokenizer(str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("name", "package"),
    [("tokenizer.json", "tokenizers"), ("small.tiktoken", "tiktoken"), ("sp.model", "sentencepiece")],
)
def test_missing_package_names_the_extra(
    folder: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TdpError, match=rf"needs the package {package}: pip install 'tdp-megatron\[tokenizers\]'"):
        load(folder, name)


def test_bytes() -> None:
    flat, lengths = ByteTokenizer().encode_batch(["aé", "", "€"])
    assert flat.tolist() == [97, 195, 169, 226, 130, 172]
    assert lengths.tolist() == [3, 0, 3]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_preprocess_with_every_kind(folder: Path, name: str, workers: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    spelled = name if name == "bytes" else str(folder / name)
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "x"), "--tokenizer", spelled, "--quiet"]
    assert main(["preprocess", *arguments, "--append-eod", "--workers", workers]) == 0
    tokenizer = load(folder, name)
    dataset = IndexedDataset(tmp_path / "x_text_document")
    expected = [[*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eod_id()] for text in TEXTS if text]
    assert [sequence.tolist() for sequence in dataset] == expected
    assert dataset.document_indices.tolist() == [0, 1, 1, 2, 3, 4, 5]
