"""The proof of an exact resume: it holds for right logs and names what is wrong in wrong ones."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Loader

from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.nodes import Pack, Reroute

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import verify_resume
from data_graph import blended_documents, parallel_layout
from options import TrainOptions, parse_options
from run_log import RunLog, next_attempt

Lines = dict[int, list[dict[str, Any]]]
"""The refs log of each rank of one attempt."""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    with IndexedDatasetBuilder(path + ".bin", dtype=np.uint16) as builder:
        for length in np.random.default_rng(2).integers(1, 40, 30):
            builder.add_document(np.ones(length, np.uint16), [int(length)])
        builder.finalize(path + ".idx")
    return path


def options_for(prefix: str, dp: int, cp: int, output: Path, **changes: str) -> TrainOptions:
    words = ["--data", prefix, "--vocab-size", "64", "--global-batch-size", "6", "--max-seqlen", "32"]
    words += ["--dp", str(dp), "--cp", str(cp), "--output", str(output)]
    return parse_options([*words, *(w for k, v in changes.items() for w in (f"--{k}", v))], dp * cp)


def log_run(options: TrainOptions, start: int, stop: int) -> Path:
    """What training would log for steps ``start`` to ``stop``, from an uninterrupted walk per rank."""
    folder = options.output / f"attempt-{next_attempt(options.output):03d}"
    layout = parallel_layout(options)
    for rank in range(layout.num_ranks):
        node = Reroute(Pack(blended_documents(options), layout, global_batch_size=6, algorithm="lpt"), rank=rank)
        steps = iter(Loader(node, restart_on_stop_iteration=False))
        with RunLog(folder, rank, {"options": options.to_json(), "start_step": start}) as log:
            for number in range(stop):
                step = next(steps)
                if number < start:
                    continue
                log.write_refs(number, step)
                log.write_metrics(
                    {
                        "loss": 8.0 - 0.1 * number,
                        "seconds": 0.5,
                        "tokens": step.seqlen_sum,
                        "data_wait_s": 0.01,
                        "imbalance": 1.0,
                        "padding": 0.0,
                    }
                )
    return folder


@pytest.fixture
def run(prefix: str, tmp_path: Path) -> Path:
    """Steps 0 to 4 on DP 2 x CP 2, then 3 to 6 on DP 1 x CP 2: step 3 of the first run was not saved."""
    output = tmp_path / "run"
    log_run(options_for(prefix, 2, 2, output), 0, 4)
    log_run(options_for(prefix, 1, 2, output), 3, 6)
    return output


def verify(run: Path) -> tuple[int, dict[str, Any]]:
    code = verify_resume.main(["--run", str(run), "--summary", str(run / "summary.json")])
    return code, json.loads((run / "summary.json").read_text())


def edit(run: Path, attempt: int, change: Callable[[Lines], None]) -> None:
    folder = run / f"attempt-{attempt:03d}"
    paths = sorted(folder.glob("refs-rank*.jsonl"))
    lines = {rank: verify_resume.read_lines(path) for rank, path in enumerate(paths)}
    change(lines)
    for rank, path in enumerate(paths):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[rank]))


def test_exact_resume_is_proved_and_summed_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, summary = verify(run)
    assert code == 0
    assert summary["resumed_exactly"]
    assert summary["loss_fell"]
    assert (summary["steps"], summary["samples"]) == (6, 36)
    assert [(r["dp"], r["cp"], r["first_step"], r["last_step"]) for r in summary["runs"]] == [
        (2, 2, 1, 4),
        (1, 2, 4, 6),
    ]
    assert summary["data_wait_share"] == pytest.approx(0.02)
    assert "Resumed exactly" in capsys.readouterr().out


def swap_two_refs(lines: Lines) -> None:
    for rank in (0, 1):
        batches = [b for b in lines[rank][1]["microbatches"] if len(b["refs"]) > 1]
        refs = batches[0]["refs"]
        refs[0], refs[1] = refs[1], refs[0]


def lose_a_sample(lines: Lines) -> None:
    for rank in (0, 1):
        batch = lines[rank][1]["microbatches"][0]
        batch["sample_ids"].pop()
        batch["refs"].pop()


def repeat_a_sample(lines: Lines) -> None:
    for rank in (0, 1):
        batch = lines[rank][1]["microbatches"][0]
        batch["sample_ids"].append(batch["sample_ids"][0])
        batch["refs"].append(batch["refs"][0])


def drop_a_step(lines: Lines) -> None:
    for log in lines.values():
        del log[1]


def shift_by_a_step(lines: Lines) -> None:
    for log in lines.values():
        for line, after in itertools.pairwise(log):
            line["microbatches"] = after["microbatches"]


def disagree_in_a_cp_group(lines: Lines) -> None:
    lines[1][0]["microbatches"].pop()


def train_on_another_batch(lines: Lines) -> None:
    for log in lines.values():
        log[0]["index"] += 1


@pytest.mark.parametrize(
    ("attempt", "change", "message"),
    [
        (1, swap_two_refs, "attempt-001, step 4: sample"),
        (0, shift_by_a_step, "attempt-000, step 0: sample 0 of the global batch is"),
        (1, drop_a_step, "attempt-001 lacks step 4"),
    ],
)
def test_wrong_order_is_named(run: Path, attempt: int, change: Callable[[Lines], None], message: str) -> None:
    edit(run, attempt, change)
    code, summary = verify(run)
    assert code == 1
    assert not summary["resumed_exactly"]
    assert message in summary["problem"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_sample, "expected each of 6 once"),
        (repeat_a_sample, "expected each of 6 once"),
        (disagree_in_a_cp_group, r"ranks [0, 1] share packs but logged different ones"),
        (train_on_another_batch, "optimizer step 3 trained on global batch 4"),
    ],
)
def test_inconsistent_logs_are_refused(
    run: Path, change: Callable[[Lines], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, 1, change)
    assert verify_resume.main(["--run", str(run), "--summary", str(run / "summary.json")]) == 1
    assert message in capsys.readouterr().err


def lose_the_last_step_of_a_rank(lines: Lines) -> None:
    lines[1].pop()


def test_a_run_killed_in_a_step_is_proved_as_far_as_all_ranks_came(run: Path) -> None:
    edit(run, 0, lose_the_last_step_of_a_rank)
    code, summary = verify(run)
    assert code == 0
    assert summary["resumed_exactly"]
    edit(run, 1, lose_the_last_step_of_a_rank)
    assert verify_resume.main(["--run", str(run), "--summary", str(run / "summary.json")]) == 1


def test_lost_rank_log_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "attempt-000" / "refs-rank00002.jsonl").unlink()
    assert verify_resume.main(["--run", str(run), "--summary", str(run / "s.json")]) == 1
    assert "attempt-000: 4 ranks ran but there are logs of 3" in capsys.readouterr().err


def test_run_without_a_resume_proves_nothing(prefix: str, tmp_path: Path) -> None:
    log_run(options_for(prefix, 1, 1, tmp_path / "run"), 0, 3)
    code, summary = verify(tmp_path / "run")
    assert code == 1
    assert "there must be a first run and a resumed one" in summary["problem"]


def test_gap_before_the_resume_is_found(prefix: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    log_run(options_for(prefix, 1, 1, output), 0, 3)
    log_run(options_for(prefix, 1, 2, output), 4, 6)
    code, summary = verify(output)
    assert code == 1
    assert "attempt-000 lacks step 3" in summary["problem"]


def test_other_seed_after_the_resume_is_found(prefix: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    log_run(options_for(prefix, 1, 1, output), 0, 3)
    log_run(options_for(prefix, 1, 1, output, seed="7"), 3, 5)
    code, summary = verify(output)
    assert code == 1
    assert "different data, weights, batch sizes, lengths or seeds" in summary["problem"]


def test_loss_that_does_not_fall_fails_the_quickstart(run: Path) -> None:
    path = run / "attempt-001" / "metrics.jsonl"
    lines = [{**line, "loss": 20.0} for line in verify_resume.read_lines(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, summary = verify(run)
    assert code == 1
    assert summary["resumed_exactly"]
    assert not summary["loss_fell"]
