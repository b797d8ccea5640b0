"""The code of a page of docs/, to be run as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.testing import write_corpus

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str) -> str:
    """All Python blocks of a page, one after the other, at the lines they have there."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block.group(1).splitlines()):
            lines[first + number] = line
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def page_code() -> Callable[[str], str]:
    """Gives the code of a page as text."""
    return code_of


@pytest.fixture(scope="session")
def run_page() -> Callable[[str], dict[str, Any]]:
    """Runs the code of a page and gives the names it defines."""

    def run(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": page}
        exec(compile(code_of(page), str(DOCS / page), "exec"), names)
        return names

    return run


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 60 tokens below 256 that a small model learns quickly."""
    rng = np.random.default_rng(7)
    path = tmp_path_factory.mktemp("documents") / "d"
    return write_corpus(path, [np.minimum(rng.geometric(0.1, n), 255) for n in rng.integers(1, 60, 200)])
