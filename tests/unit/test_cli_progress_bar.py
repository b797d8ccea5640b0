"""What long commands show: nothing in files, nothing before two seconds, then a bar or plain lines."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest

from tdp_megatron.cli.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def put_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest sets standard error again before the test."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def wait_for(screen: Terminal, text: str) -> None:
    for _ in range(2000):
        if text in screen.getvalue():
            return
        time.sleep(0.005)
    pytest.fail(f"{text!r} was not shown, but {screen.getvalue()!r}")


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    terminal = put_terminal(monkeypatch)
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        monkeypatch.setattr("tdp_megatron.cli.progress_bar._SECONDS_BETWEEN_LINES", 0.01)
    with ProgressBar("prefixes", quiet_s=0.0) as bar:
        wait_for(terminal, "prefixes")  # before the first is done
        bar(3, 40)
        wait_for(terminal, "3/40" if rich else "prefixes: 3 of 40 after 0 s\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_short_commands_and_files_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_terminal(monkeypatch)
    with ProgressBar("prefixes") as bar:
        bar(3, 40)
    assert terminal.getvalue() == ""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with ProgressBar("prefixes", quiet_s=0.0) as bar:
        bar(3, 40)
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_it_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_terminal(monkeypatch)

    def work(bar: Any) -> None:
        wait_for(terminal, "prefixes")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ProgressBar("prefixes", quiet_s=0.0) as bar:
        work(bar)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
