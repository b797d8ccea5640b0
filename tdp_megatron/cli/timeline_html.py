"""Timelines as one HTML page that needs no other file and no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files

from tdp_megatron.cli.timeline import DUMMY_COLOUR, IDLE_COLOUR, Timeline, cp_colour

__all__ = ["page"]

#: CP sizes on whose colour black text reads better than white.
_LIGHT = (2, 4, 8, 16)


def page(
    title: str,
    summary: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: int | None,
    timelines: Sequence[Timeline],
) -> str:
    """The page.

    Args:
        title: of the page.
        summary: paragraphs above the table.
        header: of the table.
        rows: of the table; a row of two cells is a name and the reason why it has no figures.
        best: number of the row to mark.
        timelines: one panel each, on one time axis.
    """
    sizes = sorted({k for t in timelines for k in t.cp_sizes()})
    legend = [[f"CP {k}", cp_colour(k)] for k in sizes]
    if any((t.sequences == 0).any() for t in timelines):
        legend.append(["dummy", DUMMY_COLOUR])
    legend.append(["idle", IDLE_COLOUR])
    data = {
        "panels": [_panel(t) for t in timelines],
        "legend": legend,
        "colours": {str(k): cp_colour(k) for k in sizes},
        "light": _LIGHT,
        "idle": IDLE_COLOUR,
        "dummy": DUMMY_COLOUR,
    }
    # Names of algorithms are the user's: no text may end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "%TITLE%": html.escape(title),
        "%SUMMARY%": "\n".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in summary),
        "%TABLE%": _table(header, rows, best),
        "%DATA%": text,
    }
    made = files("tdp_megatron.cli").joinpath("timeline.html").read_text(encoding="utf-8")
    for name, value in parts.items():
        made = made.replace(name, value)
    return made


def _panel(t: Timeline) -> dict[str, object]:
    columns = (t.first_rank, t.cp_size, t.start_ms.round(4), t.ms.round(4), t.tokens, t.sequences, t.longest)
    return {
        "name": t.name,
        "caption": t.caption,
        "num_ranks": t.num_ranks,
        "step_ms": t.step_ms,
        "lower_bound_ms": t.lower_bound_ms,
        "blocks": list(zip(*(column.tolist() for column in columns), strict=True)),
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], best: int | None) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    for number, row in enumerate(rows):
        cells = [f"<td>{html.escape(cell)}</td>" for cell in row]
        if len(row) == 2 < len(header):
            cells[1] = f'<td class="reason" colspan="{len(header) - 1}">{html.escape(row[1])}</td>'
        opening = '<tr class="best">' if number == best else "<tr>"
        lines.append(opening + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
