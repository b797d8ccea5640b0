"""docs/parity.md is what its command writes, and every test it names exists."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def parity() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parent / "parity.py"))


def test_named_tests_exist(parity: dict[str, Any]) -> None:
    assert len(parity["named_tests"]()) > 40
    assert parity["absent_tests"]() == []


def test_the_file_is_up_to_date(parity: dict[str, Any]) -> None:
    assert parity["OUT"].read_text() == parity["render"](), "run python tests/conformance/parity.py"
