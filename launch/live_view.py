"""A live table in the terminal: what each node of the data graph does, and how training goes."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

__all__ = ["LiveView", "node_table", "source_table"]


def node_table(stats: Mapping[str, Any]) -> Table:
    """One row per node, from what ``Loader.stats()`` returns."""
    table = Table(title="Data", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node", no_wrap=True)
    for heading in ("items", "tokens/s", "wait s", "work s", "ready", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, values in stats.items():
        gauges = [f"{gauge} {values[gauge]:.3f}" for gauge in ("imbalance", "padding") if gauge in values]
        table.add_row(
            name,
            f"{values.get('items', 0):,}",
            f"{values.get('tokens_per_second', 0):,.0f}",
            f"{values.get('wait_seconds', 0):.2f}",
            f"{values.get('work_seconds', 0):.2f}",
            str(values.get("queue_depth", 0)) if name.startswith("Prefetch") else "",
            ", ".join(gauges),
        )
    return table


def source_table(stats: Mapping[str, Any]) -> Table:
    """One row per source of every blend: samples drawn, epochs, asked for and actual share."""
    table = Table(title="Sources", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("source")
    for heading in ("drawn", "epochs", "asked for", "actual"):
        table.add_column(heading, justify="right")
    for values in stats.values():
        for name, source in values.get("sources", {}).items():
            epochs = source.get("epochs")
            table.add_row(
                name,
                f"{source['drawn']:,}",
                "" if epochs is None else f"{epochs:.2f}",
                f"{source['requested']:.2%}",
                f"{source['actual']:.2%}",
            )
    return table


class LiveView:
    """Prints lines, and below them keeps the tables up to date where the output is a terminal.

    Args:
        wanted: whether there should be tables; without a terminal there are none.
        console: where to print; None for stdout.
    """

    def __init__(self, wanted: bool, console: Console | None = None) -> None:
        self._console = Console(soft_wrap=True) if console is None else console
        # Live takes over the cursor, which a file or a pipe does not have.
        shown = wanted and self._console.is_terminal
        self._live = Live(console=self._console, auto_refresh=False) if shown else None

    @property
    def is_live(self) -> bool:
        """Whether there are tables."""
        return self._live is not None

    def say(self, text: str) -> None:
        """Print a line, above the tables."""
        if self._live is None:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False)

    def update(self, stats: Mapping[str, Any]) -> None:
        """Show new figures.

        Args:
            stats: what ``Loader.stats()`` returns.
        """
        if self._live is not None:
            self._live.update(Group(node_table(stats), source_table(stats)), refresh=True)

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
