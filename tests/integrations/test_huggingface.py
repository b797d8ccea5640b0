"""docs/huggingface.md: Accelerate and Trainer, a small Llama from its configuration, exact resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install tdp-megatron[integrations]")
pytest.importorskip("transformers", reason="transformers is not installed: pip install tdp-megatron[integrations]")

# transformers and what it imports warn about their own and each other's deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def page(run_page: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return run_page("huggingface.md")


def test_accelerate_saves_and_restores_the_loader(page: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    whole = page["train"](prefix, tmp_path / "whole", 8)
    first = page["train"](prefix, tmp_path / "state", 5)
    rest = page["train"](prefix, tmp_path / "state", 8, resume=True)
    assert first + rest == pytest.approx(whole, rel=1e-6)
    assert whole[-1] < whole[0]


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_resumes_on_the_next_step(page: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    whole = page["make_trainer"](prefix, tmp_path / "whole", 7)
    whole.train()
    assert len(losses_of(whole)) == 7
    page["make_trainer"](prefix, tmp_path / "parts", 5).train()
    resumed = page["make_trainer"](prefix, tmp_path / "parts", 7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-5)
    assert resumed.state.global_step == 7


def test_packed_loss_equals_that_of_documents_alone(page: dict[str, Any], prefix: str) -> None:
    """What a model says about a document does not depend on the pack it is in."""
    import torch

    model = page["make_model"]().eval()
    batch = next(iter(page["make_loader"](prefix, 0, 1))).batches[0]
    with torch.no_grad():
        packed = model(**batch.to_hf()).logits[0]
        ends = batch.cu_seqlens.tolist()
        assert len(batch.refs) > 1
        for begin, end in itertools.pairwise(ends[: len(batch.refs) + 1]):
            alone = model(input_ids=batch.tokens[None, begin:end]).logits[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=1e-4, atol=1e-4)
