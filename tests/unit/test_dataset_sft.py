"""Samples from JSON lines: four layouts of records, what is learned, what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, TokenizerSpec
from tdp_megatron.datasets.chat_records import JsonLines, Turn, parse_record
from tdp_megatron.datasets.chat_template import CHATML, ChatTemplate, Frame
from tdp_megatron.datasets.sft import SFTDataset, SFTDatasetConfig
from tdp_megatron.errors import FormatError
from tdp_megatron.tokenization import ByteTokenizer

START, END, EOD = 300, 301, 256


class Encoder(ByteTokenizer):
    """Bytes, and the two special tokens of ChatML; a pair of line feeds is one token."""

    PAIR = 302

    def token_id(self, token: str) -> int | None:
        return {"<|im_start|>": START, "<|im_end|>": END}.get(token, super().token_id(token))

    def encode_batch(self, texts: Sequence[str]) -> Any:
        rows = []
        for text in texts:
            ids = list(text.encode())
            row: list[int] = []
            for value in ids:
                if row and row[-1] == value == 10:
                    row[-1] = self.PAIR
                else:
                    row.append(value)
            rows.append(row)
        return np.array([i for row in rows for i in row], dtype=np.int64), np.array([len(row) for row in rows])


OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
    ]
}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Yo"},
    ]
}
ALPACA = {"system": "Be brief.", "instruction": "Hi", "input": "", "output": "Yo"}
TURNS = [Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yo")]


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config_of(path: str, **changes: Any) -> SFTDatasetConfig:
    fields: dict[str, Any] = {
        "random_seed": 1,
        "sequence_length": 200,
        "blend": ([path], None),
        "split": "1,0,0",
        "tokenizer": TokenizerSpec(eod=EOD, pad=0),
        "chat_template": CHATML,
        "text_tokenizer": Encoder(),
    }
    return SFTDatasetConfig(**{**fields, **changes})


def dataset_of(tmp_path: Path, records: Sequence[Any], size: int | None = None, **changes: Any) -> SFTDataset:
    config = config_of(write(tmp_path / "data.jsonl", records), **changes)
    found: SFTDataset = BlendedMegatronDatasetBuilder(SFTDataset, [size, None, None], lambda: True, config).build()[0]
    return found


def turn_ids(role: str, content: str) -> list[int]:
    return [START, *f"{role}\n{content}".encode(), END, 10]


WHOLE = turn_ids("system", "Be brief.") + turn_ids("user", "Hi") + turn_ids("assistant", "Yo")
LEARNED = [*b"Yo", END]


@pytest.mark.parametrize("record", [OPENAI, SHAREGPT, ALPACA], ids=["openai", "sharegpt", "alpaca"])
def test_layouts_of_conversations(record: Any, tmp_path: Path) -> None:
    assert parse_record(record, "auto", "here") == TURNS
    sample = dataset_of(tmp_path, [record])[0]
    assert sample["tokens"].tolist() == WHOLE
    labels = sample["labels"].tolist()
    assert [label for label in labels if label != -100] == LEARNED
    # The label of a position is the token after it.
    for position, label in enumerate(labels):
        assert label in (-100, WHOLE[position + 1] if position + 1 < len(WHOLE) else -100)
    assert sample["loss_mask"].tolist() == [float(label != -100) for label in labels]
    assert sample["loss_mask"].dtype == torch.float32
    assert sample["position_ids"].tolist() == list(range(len(WHOLE)))
    assert int(sample["original_seq_len"]) == int(sample["padded_seq_len"]) == len(WHOLE)
    assert sample["original_seq_len"].dtype == sample["padded_seq_len"].dtype == torch.int32


def test_loss_on_everything(tmp_path: Path) -> None:
    sample = dataset_of(tmp_path, [OPENAI], loss_on="all")[0]
    assert sample["labels"].tolist() == [*WHOLE[1:], -100]


def test_plain_text_is_learned_whole_and_ended(tmp_path: Path) -> None:
    sample = dataset_of(tmp_path, [{"text": "ab"}])[0]
    assert sample["tokens"].tolist() == [*b"ab", EOD]
    assert sample["labels"].tolist() == [ord("b"), EOD, -100]


def test_several_assistant_turns(tmp_path: Path) -> None:
    record = {"instruction": "c", "output": "d", "history": [["a", "b"]]}
    sample = dataset_of(tmp_path, [record])[0]
    assert [label for label in sample["labels"].tolist() if label != -100] == [*b"b", END, *b"d", END]


def test_alpaca_input_follows_the_instruction() -> None:
    record = {"instruction": "Sum", "input": "1 2", "output": "3"}
    assert parse_record(record, "alpaca", "here") == [Turn("user", "Sum\n\n1 2"), Turn("assistant", "3")]


def test_openai_content_in_parts() -> None:
    record = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    assert parse_record(record, "auto", "here") == [Turn("user", "ab")]


def test_special_tokens_in_content_are_text(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "k"}]}
    sample = dataset_of(tmp_path, [record])[0]
    assert sample["tokens"].tolist().count(END) == 2


def test_a_token_across_header_and_content_is_learned(tmp_path: Path) -> None:
    record = {"messages": [{"role": "assistant", "content": "\nx"}]}
    sample = dataset_of(tmp_path, [record])[0]
    assert sample["tokens"].tolist() == [START, *b"assistant", Encoder.PAIR, ord("x"), END, 10]
    assert [label for label in sample["labels"].tolist() if label != -100] == [Encoder.PAIR, ord("x"), END]


@pytest.mark.parametrize(
    ("fields", "divisor"),
    [
        ({}, 1),
        ({"context_parallel_size": 1}, 1),
        ({"context_parallel_size": 4}, 8),
        ({"context_parallel_size": 2, "sequence_parallel_size": 2}, 8),
        ({"context_parallel_size": 1, "data_parallel_size": 4, "hybrid_context_parallel": True}, 8),
    ],
)
def test_padding(tmp_path: Path, fields: dict[str, Any], divisor: int) -> None:
    dataset = dataset_of(tmp_path, [OPENAI], **fields, tokenizer=TokenizerSpec(eod=EOD, pad=7))
    assert dataset.config.padding_divisor == divisor
    sample = dataset[0]
    padded = -(-len(WHOLE) // divisor) * divisor
    assert sample["tokens"].tolist() == WHOLE + [7] * (padded - len(WHOLE))
    assert sample["labels"][len(WHOLE) - 1 :].tolist() == [-100] * (padded - len(WHOLE) + 1)
    assert (int(sample["original_seq_len"]), int(sample["padded_seq_len"])) == (len(WHOLE), padded)


def test_long_samples(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [OPENAI], sequence_length=20)
    assert dataset[0]["tokens"].tolist() == WHOLE[:20]
    assert dataset.num_truncated == 1
    strict = dataset_of(tmp_path, [OPENAI], sequence_length=20, long_samples="error")
    with pytest.raises(FormatError, match=rf"data.jsonl, line 1, byte 0: {len(WHOLE)} tokens, sequence_length is 20"):
        strict[0]


def test_records_repeat_in_order(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [{"text": t} for t in "abc"], size=7)
    assert len(dataset) == 7
    assert [int(dataset[i]["tokens"][0]) for i in range(7)] == list(b"abcabca")
    assert float(dataset[None]["loss_mask"].sum()) == 0.0
    assert dataset[None]["tokens"].tolist() == dataset[0]["tokens"].tolist()
    assert int(dataset[-1]["tokens"][0]) == ord("a")
    with pytest.raises(IndexError, match="there are 7"):
        dataset[7]


def test_blend_of_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [{"text": name * 3}] * 10) for name in "xy"]
    config = config_of(paths[0], blend=(paths, [0.25, 0.75]))
    train, *_ = BlendedMegatronDatasetBuilder(SFTDataset, [8, 0, 0], lambda: True, config).build()
    assert sorted(chr(int(train[i]["tokens"][0])) for i in range(8)) == list("xxyyyyyy")


def test_megatrons_tokenizer_interface(tmp_path: Path) -> None:
    class Tokenizer:
        eod, pad = EOD, 0
        unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012

        def tokenize_conversation(self, conversation: Any, return_target: bool, add_generation_prompt: bool) -> Any:
            assert return_target
            assert not add_generation_prompt
            assert conversation == [{"role": turn.role, "content": turn.content} for turn in TURNS]
            return np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8])

        def tokenize(self, text: str) -> list[int]:
            return list(text.encode())

    fields = {"tokenizer": Tokenizer(), "chat_template": None, "text_tokenizer": None}
    dataset = dataset_of(tmp_path, [OPENAI, {"text": "q"}], **fields)
    assert dataset[0]["labels"].tolist() == [-100, 7, 8, -100]
    assert dataset[1]["tokens"].tolist() == [ord("q"), EOD]


# -- files -----------------------------------------------------------------------------------------------------


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}\r\n{"text": "c"}')
    lines = JsonLines(path)
    assert [record["text"] for record in (lines[i] for i in range(len(lines)))] == ["a", "b", "c"]
    assert lines.where(1) == f"{path}, line 4, byte 22"
    again = pickle.loads(pickle.dumps(lines))
    assert again[2] == {"text": "c"}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\n"])
def test_files_without_records(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    config = config_of(str(tmp_path / "data.jsonl"))
    with pytest.raises(ValueError, match="the split has no record"):
        BlendedMegatronDatasetBuilder(SFTDataset, [None] * 3, lambda: True, config).build()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"} {"text": "b"}', "Extra data"),
        (b'{"text": "a\xff"}', "byte 11 of the line is no UTF-8"),
        (b'{"text": "a', "no JSON object on a line of its own"),
        (b'{"text": NaN}', "NaN is no JSON"),
        (b'["text"]', "found list"),
        (b'{"text": null}', "text must be a text, found None"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"question": "a"}', r"none of messages.*among the keys \['question'\]"),
        (b'{"messages": 1}', "messages must be a list"),
        (b'{"messages": []}', "the conversation has no message"),
        (b'{"messages": [1]}', "message 0: role must be a text"),
        (b'{"messages": [{"role": "king", "content": "a"}]}', "role 'king' is unknown; roles are system"),
        (b'{"messages": [{"role": "user", "content": null}]}', "message 0: content must be a text"),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}', "tool_calls are not supported"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no text"),
        (b'{"conversations": [{"from": "human"}]}', "message 0: value must be a text"),
        (b'{"instruction": "a", "output": 3}', "output must be a text, found 3"),
        (b'{"instruction": "a", "output": "b", "history": [["c"]]}', r"history\[0\] must be a pair"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    config = config_of(str(tmp_path / "data.jsonl"))
    dataset = BlendedMegatronDatasetBuilder(SFTDataset, [None] * 3, lambda: True, config).build()[0]
    dataset[0]
    with pytest.raises(FormatError, match=message) as caught:
        dataset[1]
    assert str(caught.value).startswith(f"{tmp_path}/data.jsonl, line 2, byte 17")


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "data.jsonl", [{"text": "a"}]))
    lines = JsonLines(path)
    path.write_text(path.read_text() * 2)
    with pytest.raises(FormatError, match="size has changed"):
        lines[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_format": "json"}, "chat_format must be one of auto, openai"),
        ({"loss_on": "user"}, "loss_on must be one of assistant, all"),
        ({"long_samples": "split"}, "long_samples must be one of truncate, error"),
        ({"blend": None, "split": None}, "no mock data"),
        ({"create_attention_mask": True}, "packing keeps them apart"),
        ({"reset_position_ids": True}, "packing keeps them apart"),
        ({"text_tokenizer": None}, "chat_template needs text_tokenizer"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("x", **changes)


def test_templates_the_tokenizer_cannot_write(tmp_path: Path) -> None:
    other = ChatTemplate({"user": Frame("<s>", "", None)})
    with pytest.raises(FormatError, match=r"line 1, byte 0: the chat template has no frame for role 'system'"):
        dataset_of(tmp_path, [OPENAI], chat_template=other)[0]
    record = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(FormatError, match="no special token '<s>'"):
        dataset_of(tmp_path, [record], chat_template=other)[0]


def test_a_missing_file(tmp_path: Path) -> None:
    config = config_of(str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError, match=r"give the path of a \.jsonl file"):
        BlendedMegatronDatasetBuilder(SFTDataset, [1, 1, 1], lambda: True, config).build()
