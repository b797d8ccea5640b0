"""The pages about blends, statistics and orders run as they stand, in a folder with the files they name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tdp_megatron.testing import write_corpus

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["blending.md", "statistics.md", "index-caches.md", "packing.md", "own-nodes.md"]
COUNTS = {"code": 60, "prose": 30}


class SummaryWriter:
    """Stands for TensorBoard's, which is not needed for what is tested here."""

    scalars: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = value

    def close(self) -> None:
        pass


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Where code of a page finds the files it reads; what it defines lands here."""
    rng = np.random.default_rng(3)
    (tmp_path / "data").mkdir()
    for name, count in COUNTS.items():
        documents = [rng.integers(0, 999, n) for n in rng.integers(40, 128, count)]
        write_corpus(tmp_path / "data" / f"{name}_text_document", documents)
    lines = [json.dumps({"text": "word " * int(n)}) for n in rng.integers(0, 20, 40)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    return {"__name__": "page"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves the checkpoint of the page
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_runs(page: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    printed = capsys.readouterr().out
    if page == "blending.md":
        assert "0 (data/code_text_document): 60 samples, 66.7% of 66.7%, 1.0 epochs" in printed
    if page == "statistics.md":
        assert "0 (data/code_text_document): " in printed
        assert SummaryWriter.scalars["data/Prefetch/items"] == 5
        assert "data/Blend/sources/0 (data/code_text_document)/actual" in SummaryWriter.scalars
        text = Path("tdp.prom").read_text(encoding="utf-8")
        assert 'tdp_items{node="Prefetch",rank="0"} 5\n' in text


def test_the_keys_of_the_statistics_are_all_explained(names: dict[str, Any]) -> None:
    text = (DOCS / "statistics.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "statistics.md", "exec"), names)
    table = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    explained = {key for cell in table for key in re.findall(r"`(\w+)`", cell)}
    found = {key for values in names["stats"].values() for key in values}
    assert found == explained
    described = re.findall(r"`(\w+)`", re.findall(r"^\| `sources` \|(.*)$", text, re.MULTILINE)[0])
    (sources,) = (values["sources"] for values in names["stats"].values() if "sources" in values)
    assert set(next(iter(sources.values()))) == set(described) - {"Blend"}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / page).read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        text = (DOCS / (name or page)).read_text(encoding="utf-8")
        titles = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)
        ]
        assert not anchor or anchor in titles, target
