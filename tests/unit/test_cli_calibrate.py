"""``tdp calibrate``: a fit of known coefficients, a measured block, and the file that the simulator loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tdp_megatron.cli.block import Block, BlockShape
from tdp_megatron.cli.calibrate import grid
from tdp_megatron.cli.main import main
from tdp_megatron.schedule import CostModel

A, B, C0 = 2e-5, 3e-10, 4e-3


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_measurements(scale: float = 1.0) -> None:
    rows = ["cp_size, seconds, tokens_per_rank, squares"]
    for tokens, seqlen, k in ((4096, 512, 1), (8192, 8192, 1), (8192, 16384, 2), (16384, 1024, 1)):
        squares = tokens * k * seqlen
        rows.append(f"{k}, {(C0 + A * tokens + B * squares / k) * scale}, {tokens}, {squares}")
    Path("measured.csv").write_text("\n".join(rows))


def test_measurements_give_back_the_coefficients(capsys: pytest.CaptureFixture[str]) -> None:
    write_measurements()
    assert main(["calibrate", "--measurements", "measured.csv", "--output", "cost.json"]) == 0
    cost = CostModel.from_json(Path("cost.json").read_bytes())
    assert (cost.a, cost.b, cost.c0) == pytest.approx((A, B, C0), rel=1e-6)
    assert "above 66,667 tokens" in capsys.readouterr().out
    assert main(["simulate", "github", "--dp", "8", "--cost-file", "cost.json", "--algorithms", "auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost_model"]["a"] == cost.a


def test_the_block_is_measured_on_every_microbatch_of_the_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def seconds(self: Block, seqlen: int, count: int, repeats: int) -> list[float]:
        asked.append((seqlen, count))
        tokens = seqlen * count
        return [C0 + A * tokens + B * tokens * seqlen] * repeats

    monkeypatch.setattr(Block, "seconds", seconds)
    shape = ("--hidden-size", "64", "--num-attention-heads", "4", "--num-query-groups", "2", "--num-layers", "10")
    assert main(["calibrate", *shape, "--device", "cpu", "--output", "cost.json"]) == 0
    assert asked == grid(32_768, 512)
    content = json.loads(Path("cost.json").read_text())
    cost = CostModel.from_json(json.dumps(content))
    assert (cost.a, cost.b, cost.c0) == pytest.approx((10 * A, 10 * B, 10 * C0), rel=1e-6)
    # K and V of 2 heads of 16, float32.
    assert (cost.layers, cost.kv_bytes) == (10, 2 * 2 * 16 * 4)
    assert content["notes"]["block"]["ffn_hidden_size"] == 224
    assert content["notes"]["largest_error"] < 1e-6
    assert capsys.readouterr().err == ""


def test_a_fit_that_is_far_off_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    taken = iter([1.0, 9.0, 2.0, 0.1, 5.0, 1.0, 7.0, 0.3, 2.0, 8.0, 0.2, 4.0, 3.0])
    monkeypatch.setattr(Block, "seconds", lambda *_: [next(taken)])
    assert main(["calibrate", "--smoke", "--device", "cpu", "--output", "cost.json"]) == 0
    assert "half of the measurements are more than" in capsys.readouterr().err


def test_smoke_measures_a_real_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--smoke", "--device", "cpu", "--output", "cost.json"]) == 0
    cost = CostModel.from_json(Path("cost.json").read_text())
    assert cost.a + cost.b + cost.c0 > 0
    assert len(re.findall(r"[+-]\d+\.\d%", capsys.readouterr().out)) == len(grid(512, 64))


def test_sequences_of_the_block_attend_to_themselves_alone() -> None:
    shape = BlockShape(hidden_size=8, num_attention_heads=2, num_query_groups=1, kv_channels=4, ffn_hidden_size=6)
    layer = Block.on(shape, "cpu", None).layer
    x = torch.randn(2, 5, 8)
    whole = layer(x)
    torch.testing.assert_close(whole[1:], layer(x[1:]))
    torch.testing.assert_close(whole[:, :3], layer(x[:, :3]))
    assert not torch.allclose(whole[:, 3:], layer(x[:, 3:]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'tokens_per_rank'"),
        ("tokens_per_rank,squares,seconds\n1,1,1\n", "no column 'cp_size'"),
        ("tokens_per_rank,squares,cp_size,seconds\n1,1,1\n", "line 2: not four numbers"),
        ("tokens_per_rank,squares,cp_size,seconds\n1,1,1,x\n", "line 2: not four numbers"),
        ("tokens_per_rank,squares,cp_size,seconds\n1,1,1,1\n", "at least 3 measurements"),
        ("tokens_per_rank,squares,cp_size,seconds\n" + "1,1,1,1\n" * 5, "too alike"),
        ("tokens_per_rank,squares,cp_size,seconds\n" + "1,1,1,nan\n" * 5, "finite"),
    ],
)
def test_files_that_hold_no_measurements(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    Path("measured.csv").write_text(text)
    assert main(["calibrate", "--measurements", "measured.csv", "--output", "cost.json"]) == 1
    error = capsys.readouterr().err
    assert "measured.csv: " in error
    assert message in error
    assert not Path("cost.json").exists()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("--measurements and --smoke exclude each other", ("--measurements", "x.csv", "--smoke")),
        ("--hidden-size must be at least 1", ("--hidden-size", "0")),
        ("--num-attention-heads must be at least 1", ("--num-attention-heads", "0")),
        ("is no multiple of --num-query-groups 3", ("--num-query-groups", "3")),
        ("leave no grid", ("--max-tokens", "1024")),
        ("--repeats must be at least 1", ("--repeats", "0")),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], message: str, arguments: tuple[str, ...]) -> None:
    assert main(["calibrate", "--output", "cost.json", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--output", "cost.json", "--device", "cuda"]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*_: object) -> list[float]:
        raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(Block, "seconds", seconds)
    assert main(["calibrate", "--smoke", "--device", "cpu", "--output", "cost.json"]) == 1
    assert "lower --max-tokens" in capsys.readouterr().err


def test_the_grid_varies_tokens_and_lengths() -> None:
    made = grid(4096, 256)
    assert len(set(made)) == len(made)
    assert {seqlen * count for seqlen, count in made} == {1024, 2048, 4096}
    assert (256, 16) in made
    assert (4096, 1) in made
