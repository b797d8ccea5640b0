"""docs/huggingface.md and docs/lightning.md on two ranks under a real torchrun; what two ranks saved, one resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The frameworks warn about their own and each other's deprecations.
pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

ACCELERATE = """
import json, os, sys
prefix, folder = sys.argv[1:3]
whole = train(prefix, f"{folder}/whole", 8)
first = train(prefix, f"{folder}/state", 5)
rest = train(prefix, f"{folder}/state", 8, resume=True)
train(prefix, f"{folder}/five", 5)
if os.environ["RANK"] == "0":
    Path(folder, "result.json").write_text(json.dumps({"whole": whole, "first": first, "rest": rest}))
"""

TRAINER = """
import json, os, sys
prefix, folder = sys.argv[1:3]

def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

whole = make_trainer(prefix, f"{folder}/whole", 7)
whole.train()
make_trainer(prefix, f"{folder}/parts", 5).train()
resumed = make_trainer(prefix, f"{folder}/parts", 7)
resumed.train(resume_from_checkpoint=f"{folder}/parts/checkpoint-4")
if os.environ["RANK"] == "0":
    result = {"ranks": resumed.args.world_size, "whole": losses_of(whole), "resumed": losses_of(resumed)}
    Path(folder, "result.json").write_text(json.dumps(result))
"""

LIGHTNING = """
import json, os, sys
from pathlib import Path
prefix, folder = sys.argv[1:3]
seen, real = [], Model.training_step

def training_step(self, batch, batch_idx):
    step, _ = batch
    seen.append([step.index, step.plan.layout.num_ranks, [ref for packed in step for ref in packed.refs]])
    return real(self, batch, batch_idx)

Model.training_step = training_step
torch.manual_seed(0)
fit(prefix, f"{folder}/whole", 6)
(checkpoint,) = Path(folder, "whole").glob("*step=4.ckpt")
whole = list(seen)
seen.clear()
fit(prefix, f"{folder}/resumed", 6, ckpt_path=checkpoint)
rank = os.environ["RANK"]
Path(folder, f"result{rank}.json").write_text(json.dumps({"whole": whole, "resumed": seen}))
"""


def torchrun(script: Path, code: str, *arguments: str) -> None:
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def require(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install tdp-megatron[integrations]")


def test_accelerate(
    page_code: Callable[[str], str],
    run_page: Callable[[str], dict[str, Any]],
    prefix: str,
    tmp_path: Path,
) -> None:
    require("accelerate", "transformers")
    torchrun(tmp_path / "loop.py", page_code("huggingface.md") + ACCELERATE, prefix, str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    alone = run_page("huggingface.md")["train"]
    assert result["whole"] == pytest.approx(alone(prefix, tmp_path / "alone", 8), rel=1e-4)
    assert result["first"] + result["rest"] == pytest.approx(result["whole"], rel=1e-5)
    assert alone(prefix, tmp_path / "five", 8, resume=True) == pytest.approx(result["whole"][5:], rel=1e-4)


def test_trainer(
    page_code: Callable[[str], str],
    run_page: Callable[[str], dict[str, Any]],
    prefix: str,
    tmp_path: Path,
) -> None:
    require("accelerate", "transformers")
    torchrun(tmp_path / "loop.py", page_code("huggingface.md") + TRAINER, prefix, str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    assert len(result["whole"]) == 7
    assert result["resumed"] == pytest.approx(result["whole"], rel=1e-4)
    alone = run_page("huggingface.md")["make_trainer"](prefix, tmp_path / "alone", 7)
    alone.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    losses = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
    assert losses == pytest.approx(result["whole"], rel=1e-3)


def test_lightning(
    page_code: Callable[[str], str],
    run_page: Callable[[str], dict[str, Any]],
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("lightning")
    torchrun(tmp_path / "loop.py", page_code("lightning.md") + LIGHTNING, prefix, str(tmp_path))
    ranks = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in (0, 1)]
    for result in ranks:
        assert [(index, size) for index, size, _ in result["whole"]] == [(index, 2) for index in range(6)]
        assert result["resumed"] == result["whole"][4:]
    # One process goes on with what two would have held together.
    page = run_page("lightning.md")
    seen: list[tuple[int, list[Any]]] = []
    real = page["Model"].training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        step, _ = batch
        seen.append((step.index, sorted(list(ref) for packed in step for ref in packed.refs)))
        return real(self, batch, batch_idx)

    monkeypatch.setattr(page["Model"], "training_step", training_step)
    (checkpoint,) = (tmp_path / "whole").glob("*step=4.ckpt")
    page["fit"](prefix, tmp_path / "one", 6, ckpt_path=checkpoint)
    together = zip(ranks[0]["whole"][4:], ranks[1]["whole"][4:], strict=True)
    assert seen == [(a[0], sorted(a[2] + b[2])) for a, b in together]
