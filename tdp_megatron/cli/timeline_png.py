"""Timelines as a PNG, with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tdp_megatron.cli.timeline import DUMMY_COLOUR, IDLE_COLOUR, Timeline, cp_colour
from tdp_megatron.errors import TdpError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "png"]

_DPI = 100
_WIDTH_PX = 1500
_PANEL_PX = 640
_MOST_ROW_PX = 30
#: Rows of one pixel blur into their neighbours when a viewer scales the picture.
_FEWEST_ROW_PX = 2
_AROUND_PANEL_PX = 100
_HEADER_PX = 90
_MOST_TICKS = 16
#: Blocks at least this high or wide are parted from the next.
_PARTED_PX = 6


def png(title: str, timelines: Sequence[Timeline]) -> bytes:
    """The file.

    Raises:
        TdpError: matplotlib is missing.
    """
    buffer = io.BytesIO()
    figure(title, timelines).savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def figure(title: str, timelines: Sequence[Timeline]) -> Figure:
    """One panel per timeline under each other on one time axis, one row per rank, rank 0 on top.

    Raises:
        TdpError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise TdpError(
            f"a PNG needs matplotlib ({error}); pip install 'tdp-megatron[plots]', or write HTML, which needs nothing"
        ) from error
    heights = [_row_px(t.num_ranks) * t.num_ranks + _AROUND_PANEL_PX for t in timelines]
    total_px = sum(heights) + _HEADER_PX
    made = Figure(figsize=(_WIDTH_PX / _DPI, total_px / _DPI), dpi=_DPI)
    FigureCanvasAgg(made)
    made.text(14 / _WIDTH_PX, 1 - 14 / total_px, title, size=13, weight="bold", va="top")
    end_ms = max(t.step_ms for t in timelines) * 1.01 or 1.0
    top_px = _HEADER_PX
    for t, height in zip(timelines, heights, strict=True):
        row_px = _row_px(t.num_ranks)
        inner = row_px * t.num_ranks
        left, right = 70, 20
        axes = made.add_axes(
            (
                left / _WIDTH_PX,
                1 - (top_px + 32 + inner) / total_px,
                (_WIDTH_PX - left - right) / _WIDTH_PX,
                inner / total_px,
            )
        )
        top_px += height
        ms_per_px = end_ms / (_WIDTH_PX - left - right)
        # A hairline between neighbours, where it leaves enough of the block; outlines would wash thin rows out.
        low, start = t.first_rank, t.start_ms
        high = low + t.cp_size - np.where(t.cp_size * row_px >= _PARTED_PX, 1 / row_px, 0.0)
        end = start + t.ms - np.where(t.ms >= _PARTED_PX * ms_per_px, ms_per_px, 0.0)
        corners = np.stack(
            [np.stack(xy, axis=1) for xy in ((start, low), (end, low), (end, high), (start, high))], axis=1
        )
        axes.add_collection(
            PolyCollection(list(corners), facecolors=t.colours(), edgecolors="none", antialiaseds=False)
        )
        axes.axvspan(0, t.step_ms, color=IDLE_COLOUR, zorder=0, linewidth=0)
        axes.axvline(t.lower_bound_ms, color="black", linestyle=(0, (4, 3)), linewidth=1.2)
        axes.axvline(t.step_ms, color="black", linewidth=1.2)
        axes.set_xlim(0, end_ms)
        axes.set_ylim(t.num_ranks, 0)
        axes.set_ylabel("rank")
        axes.set_xlabel("milliseconds", labelpad=1)
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,.10g}")
        # Of its own row a number belongs in the middle.
        if t.num_ranks <= 2 * _PANEL_PX // _MOST_ROW_PX:
            axes.set_yticks(np.arange(t.num_ranks) + 0.5, [str(rank) for rank in range(t.num_ranks)])
        else:
            # CP groups start at multiples of powers of two.
            axes.set_yticks(np.arange(0, t.num_ranks, 1 << (t.num_ranks // _MOST_TICKS).bit_length()))
        axes.set_title(f"{t.name}: {t.caption}", loc="left", size=11)
    made.legend(
        handles=[
            *(Patch(color=cp_colour(k), label=f"CP {k}") for k in sorted({k for t in timelines for k in t.cp_sizes()})),
            *([Patch(color=DUMMY_COLOUR, label="dummy")] if any((t.sequences == 0).any() for t in timelines) else []),
            Patch(facecolor=IDLE_COLOUR, edgecolor="#999999", label="idle"),
            Line2D([], [], color="black", linewidth=1.2, label="end of the step"),
            Line2D([], [], color="black", linewidth=1.2, linestyle=(0, (4, 3)), label="lower bound"),
        ],
        loc="upper left",
        bbox_to_anchor=(8 / _WIDTH_PX, 1 - 38 / total_px),
        ncols=16,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )
    return made


def _row_px(num_ranks: int) -> int:
    return max(_FEWEST_ROW_PX, min(_MOST_ROW_PX, _PANEL_PX // num_ranks))
