"""docs/lightning.md: stopped in the middle of an epoch, resumed on the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: pip install tdp-megatron[integrations]")

# Lightning and what it imports warn about their own and each other's deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_resume_in_the_middle_of_an_epoch(
    run_page: Callable[[str], dict[str, Any]], prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = run_page("lightning.md")
    seen: list[tuple[int, list[Any]]] = []
    real = page["Model"].training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        step, _ = batch
        seen.append((step.index, [ref for packed in step for ref in packed.refs]))
        return real(self, batch, batch_idx)

    monkeypatch.setattr(page["Model"], "training_step", training_step)
    torch.manual_seed(0)
    whole = page["fit"](prefix, tmp_path / "whole", 9)
    uninterrupted = list(seen)
    assert [index for index, _ in uninterrupted] == list(range(9))

    seen.clear()
    torch.manual_seed(0)
    page["fit"](prefix, tmp_path / "first", 5)
    # Step 5 came after the last checkpoint; training goes on from that of step 4.
    (checkpoint,) = (tmp_path / "first").glob("*step=4.ckpt")
    assert seen == uninterrupted[:5]
    seen.clear()
    stopped = page["fit"](prefix, tmp_path / "at once", 4, ckpt_path=checkpoint)  # has nothing left to train
    assert seen == []
    stopped.save_checkpoint(tmp_path / "again.ckpt")
    resumed = page["fit"](prefix, tmp_path / "second", 9, ckpt_path=tmp_path / "again.ckpt")
    assert seen == uninterrupted[4:]
    assert resumed.global_step == whole.global_step == 9
    for name, value in whole.lightning_module.state_dict().items():
        assert torch.equal(value, resumed.lightning_module.state_dict()[name]), name
