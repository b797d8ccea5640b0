"""``tdp simulate``: sources of lengths, the table, JSON, traces, pictures, and bad input of every kind."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.cli import timeline_png
from tdp_megatron.cli.main import main
from tdp_megatron.cli.seqlens import csv_seqlens, draw_global_batch
from tdp_megatron.cli.simulate_arguments import algorithms_of
from tdp_megatron.cli.timeline import Timeline, cp_colour
from tdp_megatron.errors import FormatError
from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.schedule import CostModel, Mode, preset, schedule, simulate
from tdp_megatron.types import ParallelLayout

CHAT = ("simulate", "sft_chat", "--dp", "2", "--cp", "2", "--max-seqlen", "16384")
LAYOUT = ("--dp", "2", "--cp", "2", "--max-seqlen-per-rank", "512")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], code: int, message: str, *arguments: str) -> None:
    assert main(["simulate", *arguments]) == code
    assert re.search(message, capsys.readouterr().err)


def write_csv(text: str) -> str:
    Path("lengths.csv").write_text(text)
    return "lengths.csv"


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("5\n7\n", None, [5, 7]),
        ("anything\n5\n\n7\n", None, [5, 7]),
        ("id,seqlen\na,5\nb, 7\n", None, [5, 7]),
        ("\ufeffid,Length\r\n1,5\r\n2,7\r\n", None, [5, 7]),
        ("x,y\n1,5\n2,7\n", "x", [1, 2]),
        ("tokens,length\n1,5\n", None, [5]),
    ],
)
def test_lengths_of_a_csv_file(text: str, column: str | None, expected: list[int]) -> None:
    assert csv_seqlens(write_csv(text), column).tolist() == expected


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", None, "has no lengths"),
        ("seqlen\n", None, "has no lengths"),
        ("seqlen\n5\n6.5\n", None, r"line 3: '6\.5' is no length"),
        ("6.5\n", None, "line 1"),
        ("nan\n", None, "line 1: 'nan'"),
        ("-1\n", None, "line 1: '-1'"),
        ("seqlen\n99999999999999999999999\n", None, "line 2"),
        ("a,seqlen\n1\n", None, "line 2: '' is no length"),
        ("a,b\n1,2\n", None, "2 columns, none named"),
        ("a,b\n1,2\n", "c", "no column 'c'"),
        ("5\n6\n", "c", "no column 'c'"),
        ('"5\n', None, "line"),
    ],
)
def test_csv_files_that_hold_no_lengths(text: str, column: str | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        csv_seqlens(write_csv(text), column)


def test_bytes_that_are_no_text() -> None:
    Path("lengths.csv").write_bytes(b"5\n\xff\xfe\n")
    with pytest.raises(FormatError, match="not CSV"):
        csv_seqlens("lengths.csv")


def test_a_file_is_read_in_random_order_up_to_the_tokens_wanted() -> None:
    path = write_csv("\n".join(map(str, range(1, 101))))
    draw: dict[str, Any] = {"num_sequences": None, "num_tokens": 1000, "longest": 80, "fits": 100}
    lengths, cut = draw_global_batch(path, seed=0, **draw)
    assert lengths.sum() >= 1000 > lengths[:-1].sum()
    assert len(set(lengths.tolist()) - {80}) == (lengths < 80).sum()
    assert cut == len(lengths) - int((lengths < 80).sum()) - int(80 in _uncut(path, len(lengths)))
    assert draw_global_batch(path, seed=0, **draw)[0].tolist() == lengths.tolist()
    assert draw_global_batch(path, seed=1, **draw)[0].tolist() != lengths.tolist()
    whole, _ = draw_global_batch(path, seed=0, **{**draw, "num_tokens": 10**9})
    assert len(whole) == 100


def _uncut(path: str, count: int) -> list[int]:
    return csv_seqlens(path)[np.random.default_rng(0).permutation(100)][:count].tolist()


def test_lengths_of_an_index(capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder("corpus.bin", np.uint16) as builder:
        for length in (3, 700, 20, 41):
            builder.add_item(np.zeros(length, dtype=np.uint16))
            builder.end_document()
        builder.finalize("corpus.idx")
    for source in ("corpus", "corpus.idx", str(Path("corpus.bin").absolute())):
        found = facts(capsys, source, *LAYOUT)
        assert (found["sequences"], found["tokens"], found["cut"]) == (4, 764, 0)
    assert facts(capsys, "corpus", *LAYOUT, "--max-seqlen", "40")["cut"] == 2


def test_results_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv("\n".join(["900", "30", "40", "500", "500", "77"]))
    found = facts(capsys, path, *LAYOUT, "--mode", "lockstep", "--algorithms", "waves,auto", "--preset", "qwen-1.7b")
    lengths, _ = draw_global_batch(path, num_sequences=6, num_tokens=0, longest=None, fits=2048, seed=0)
    layout = ParallelLayout(2, 2, 512, cp_sizes=(1, 2, 4))
    plan = schedule(lengths, layout, preset("qwen-1.7b"), "lockstep", "waves")
    result = simulate(plan, preset("qwen-1.7b"), "lockstep")
    waves = found["results"][0]
    assert waves["digest"] == plan.digest()
    assert (waves["step_seconds"], waves["ratio"]) == (result.step_seconds, result.ratio)
    assert waves["microbatches"] == [plan.num_microbatches(0)] * 2
    assert found["lower_bound"] == result.lower_bound
    assert found["results"][1]["step_seconds"] <= waves["step_seconds"]


def test_the_table_names_every_algorithm_and_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv("\n".join(["64"] * 32))
    assert main(["simulate", path, *LAYOUT]) == 0
    out = capsys.readouterr().out
    for name in algorithms_of(None, Mode("free")):
        assert re.search(rf"│ {name}\b.*│", out), name
    assert "32 sequences of lengths.csv, 2,048 tokens" in out
    assert main(["simulate", path, "--dp", "1", "--cp", "1", "--algorithms", "dp_balanced,auto"]) == 0
    assert "Nothing to gain here" in capsys.readouterr().out


def test_algorithms_that_cannot_run_in_the_mode_are_left_out() -> None:
    assert "buddy" in algorithms_of(None, Mode("free"))
    assert not {"buddy", "balanced_hybrid_cp"} & set(algorithms_of(None, Mode("lockstep")))
    assert algorithms_of("stream, auto,stream", Mode("free")) == ["stream", "auto"]


def test_an_algorithm_without_a_plan_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv("1500\n10\n")
    assert main(["simulate", path, *LAYOUT, "--algorithms", "lpt,waves"]) == 0
    out = capsys.readouterr().out
    assert "lpt: sequence" in out
    assert "1500 tokens, the limit is 1024" in out
    assert main(["simulate", path, *LAYOUT, "--algorithms", "lpt,kk"]) == 1
    assert "lpt, kk: sequence" in capsys.readouterr().out
    refused(capsys, 1, "nothing to draw: sequence", path, *LAYOUT, "--algorithms", "lpt", "--trace", "t.json")
    assert not Path("t.json").exists()


def test_megatrons_algorithms_pay_for_its_padding(capsys: pytest.CaptureFixture[str]) -> None:
    # 100 x 33 tokens: to multiples of 2 * cp * sp = 64 with static CP, of 2 * ranks * sp = 128 with dynamic CP.
    path = write_csv("\n".join(["33"] * 100))
    found = facts(capsys, path, "--dp", "2", "--cp", "2", "--sp", "16", "--max-seqlen-per-rank", "12800")
    padding = {row["algorithm"]: row["padding"] for row in found["results"]}
    assert padding["dp_balanced"] >= 1 - 33 / 64
    assert padding["default_dynamic_cp"] >= 1 - 33 / 128
    assert padding["auto"] < 0.4


def test_cost_models(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv("100\n")
    Path("cost.json").write_text(CostModel(a=1e-6, b=1e-9, c0=0.5).to_json({"device": "x"}))
    found = facts(capsys, path, *LAYOUT, "--cost-file", "cost.json")
    assert found["cost_model"]["c0"] == 0.5
    dimensions = ("--active-parameters", "7.5e9", "--attention-width", "4096", "--num-layers", "32")
    found = facts(capsys, path, *LAYOUT, *dimensions, "--kv-width", "1024")
    assert found["cost_model"]["a"] == preset("llama-8b").a
    refused(capsys, 2, "needs --kv-width", path, *LAYOUT, *dimensions)
    refused(capsys, 2, "exclude each other", path, *LAYOUT, "--cost-file", "cost.json", "--preset", "llama-8b")
    refused(capsys, 2, "--tp and --window go with", path, *LAYOUT, "--tp", "2")
    for text, message in (("{", "not JSON"), ("[]", "cost_model"), ('{"cost_model": {"a": 1}}', "no 'b'")):
        Path("cost.json").write_text(text)
        refused(capsys, 1, f"cost.json: .*{message}", path, *LAYOUT, "--cost-file", "cost.json")


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (2, "'nothing' is no distribution .github, .*there is no nothing.idx", ("nothing", *LAYOUT)),
        (1, "missing.csv", ("missing.csv", *LAYOUT)),
        (2, "--dp must be at least 1", ("github", "--dp", "0")),
        (2, "does not divide the 4 ranks", ("github", *LAYOUT, "--cp-sizes", "3")),
        (2, "--cp-sizes must be a list", ("github", *LAYOUT, "--cp-sizes", "1;2")),
        (2, "below the tail multiple", ("github", "--dp", "1", "--max-seqlen-per-rank", "8")),
        (2, "mode must be one of", ("github", *LAYOUT, "--mode", "fast")),
        (2, "unknown algorithm 'best'", ("github", *LAYOUT, "--algorithms", "best")),
        (2, "not among the algorithms compared", ("github", *LAYOUT, "--draw", "kk", "--algorithms", "auto")),
        (2, "--global-batch-size must be at least 1", ("github", *LAYOUT, "--global-batch-size", "0")),
        (2, "--max-seqlen must be at least 1", ("github", *LAYOUT, "--max-seqlen", "-1")),
        (2, "--seed must not be negative", ("github", *LAYOUT, "--seed", "-1")),
        (2, "microbatches_multiple must be at least 1", ("github", *LAYOUT, "--microbatches-multiple", "0")),
        (1, "has 2 sequences, --global-batch-size asks for 3", ("lengths.csv", *LAYOUT, "--global-batch-size", "3")),
        (1, "9000 tokens, the limit is 2048 .*--max-seqlen 2048", ("lengths.csv", *LAYOUT)),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], code: int, message: str, arguments: tuple[str, ...]) -> None:
    write_csv("9000\n5\n")
    refused(capsys, code, message, *arguments)


def test_the_trace_has_a_process_per_algorithm_and_a_thread_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(
        capsys, "github", *LAYOUT, "--max-seqlen", "1024", "--trace", "trace.json", "--draw", "dp_balanced,waves"
    )
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["dp_balanced", "waves"]
    steps = {row["algorithm"]: row["step_seconds"] for row in found["results"]}
    for number, name in enumerate(names):
        runs = [event for event in events if event["ph"] == "X" and event["pid"] == number]
        assert {event["tid"] for event in runs} == {0, 1, 2, 3}
        assert max(event["ts"] + event["dur"] for event in runs) == pytest.approx(1e6 * steps[name])


def timelines(num_ranks: int, algorithms: tuple[str, ...]) -> list[Timeline]:
    sizes = tuple(1 << s for s in range(num_ranks.bit_length()))
    layout = ParallelLayout(num_ranks // 4, 4, 1024, cp_sizes=sizes)
    lengths = np.random.default_rng(0).integers(1, 4000, 3 * num_ranks)
    cost = preset("llama-8b")
    return [Timeline.of(a, simulate(schedule(lengths, layout, cost, algorithm=a), cost)) for a in algorithms]


def test_the_page_has_every_block_and_nothing_from_elsewhere() -> None:
    assert main([*CHAT, "--html", "page.html", "--draw", "dp_balanced,buddy"]) == 0
    text = Path("page.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert [panel["name"] for panel in data["panels"]] == ["dp_balanced", "buddy"]
    for panel in data["panels"]:
        assert panel["num_ranks"] == 4
        seen = {rank for first, cp, *_ in panel["blocks"] for rank in range(first, first + cp)}
        assert seen == {0, 1, 2, 3}
        assert max(start + ms for _, _, start, ms, *_ in panel["blocks"]) == pytest.approx(panel["step_ms"], abs=1e-3)
    assert data["colours"] == {str(k): cp_colour(k) for k in (1, 2, 4) if str(k) in data["colours"]}
    assert not re.search(r"https?:|src=|href=|@import|%[A-Z]+%", text)


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    Path("<b>&.csv").write_text("5\n")
    assert main(["simulate", "<b>&.csv", *LAYOUT, "--html", "page.html"]) == 0
    text = Path("page.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;.csv" in text


@pytest.mark.parametrize("num_ranks", [8, 512])
def test_the_picture_has_every_block_on_the_rows_of_its_ranks(num_ranks: int) -> None:
    pytest.importorskip("matplotlib")
    shown = timelines(num_ranks, ("dp_balanced", "buddy"))
    figure = timeline_png.figure("title", shown)
    assert len(figure.axes) == 2
    for axes, timeline in zip(figure.axes, shown, strict=True):
        (blocks,) = axes.collections
        assert axes.get_ylim() == (num_ranks, 0)
        assert 8 <= len(axes.get_yticks()) <= 32
        # Ranks that exist, each label at its own row.
        assert [int(label.get_text()) for label in axes.get_yticklabels()] == [int(tick) for tick in axes.get_yticks()]
        assert max(axes.get_yticks()) < num_ranks
        height = figure.dpi * figure.get_figheight() * axes.get_position().height
        assert height / num_ranks >= 2
        assert len(blocks.get_paths()) == len(timeline)
        for path, first, cp, start in zip(
            blocks.get_paths(), timeline.first_rank, timeline.cp_size, timeline.start_ms, strict=True
        ):
            low, high = path.get_extents().min, path.get_extents().max
            assert low == pytest.approx((start, first))
            assert first + cp - 0.5 <= high[1] <= first + cp
    colours = {tuple(colour) for axes in figure.axes for colour in axes.collections[0].get_facecolors().tolist()}
    assert len(colours) == len({k for timeline in shown for k in timeline.cp_sizes()})


def test_png_files(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["simulate", "github", *LAYOUT, "--png", "picture.png"]) == 0
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote picture.png" in capsys.readouterr().out


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(capsys, 1, r"pip install 'tdp-megatron\[plots\]'", "github", *LAYOUT, "--png", "picture.png")
    assert list(Path().iterdir()) == []


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, 1, "nowhere", "github", *LAYOUT, "--html", "nowhere/page.html")


def test_colours_of_neighbouring_sizes_differ() -> None:
    colours = [cp_colour(1 << shift) for shift in range(11)]
    assert len(set(colours)) == 11
    assert cp_colour(1 << 14) == colours[-1]
