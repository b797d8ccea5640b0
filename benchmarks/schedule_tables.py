"""Tables in Markdown from the JSON files of ``benchmarks/schedule.py``.

python benchmarks/schedule_tables.py out/*.json                            # print them
python benchmarks/schedule_tables.py out/*.json --write docs/scheduler.md  # put them between its marks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
NAMES = {
    "dp_balanced": "dp_balanced",
    "balanced_hybrid_cp": "hybrid CP",
    "default_dynamic_cp": "dynamic CP",
    "lpt": "lpt",
    "auto": "**auto**",
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, all but the first column to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid_table(mode: str, rows: Sequence[dict[str, Any]]) -> str:
    """Step over lower bound of one mode."""
    columns = [c for c in NAMES if any(row[c] is not None for row in rows)]
    lockstep = any(row["reach"] is not None for row in rows)
    header = ["model, ranks", "data", *(NAMES[c] for c in columns), "vs dp_balanced"]
    header += ["auto / lockstep bound"] * lockstep
    header += ["padding", "auto chose"]
    made = []
    for row in rows:
        cells = [f"{row['model'].upper()}, {row['ranks']}", row["data"]]
        cells += ["-" if row[c] is None else f"{row[c]:.3f}" for c in columns]
        cells[2 + columns.index("auto")] = f"**{row['auto']:.3f}**"
        cells.append(f"{row['faster']:.2f}x")
        if lockstep:
            cells.append(f"{row['reach']:.3f}")
        made.append([*cells, f"{row['padding']:.2%}", row["chosen"].replace("/", ", ")])
    return f"### Mode `{mode}`\n\n{table(header, made)}"


def planning_table(rows: Sequence[dict[str, Any]]) -> str:
    """Planning times."""
    made = [
        [
            f"{row['ranks']} x {row['sequences']:,}",
            row["mode"],
            row["algorithm"],
            f"{row['fastest_ms']:.1f} to {row['slowest_ms']:.1f}",
            f"{row['target_ms']:g}",
        ]
        for row in rows
    ]
    header = ["ranks x sequences", "mode", "algorithm", "ms, by model and distribution", "target, ms"]
    return f"### Planning time\n\n{table(header, made)}"


def tables(contents: Sequence[dict[str, Any]]) -> str:
    """All tables, and what made them."""
    rows = [row for content in contents for row in content.get("rows", [])]
    planning = [row for content in contents for row in content.get("planning", [])]
    commands = "\n".join(f"    {content['command']}" for content in contents)
    machines = sorted({", ".join(f"{k} {v}" for k, v in content["machine"].items()) for content in contents})
    parts = [f"Made by\n\n{commands}\n\non {'; '.join(machines)}."]
    order = {name: number for number, name in enumerate(("8b", "70b", "1.7b"))}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        ours = [row for row in rows if row["mode"] == mode]
        ours.sort(key=lambda row: (order.get(row["model"], 99), row["model"], row["ranks"], row["data"]))
        parts.append(grid_table(mode, ours))
    if planning:
        parts.append(planning_table(planning))
    missed = [f"- {line}" for content in contents for line in content.get("missed", [])]
    late = [row for row in planning if row["slowest_ms"] > row["target_ms"]]
    missed += [
        f"- planning {row['ranks']} x {row['sequences']:,}, {row['mode']}, {row['algorithm']}: up to "
        f"{row['slowest_ms']:.0f} ms, target {row['target_ms']:g} ms"
        for row in late
    ]
    parts.append("### Outside the targets\n\n" + ("\n".join(missed) or "Nothing."))
    return "\n\n".join(parts)


def main(arguments: list[str]) -> int:
    """Print the tables, or put them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"replace what is between {BEGIN} and {END}")
    options = parser.parse_args(arguments)
    made = tables([json.loads(path.read_text()) for path in options.files])
    if options.write is None:
        print(made)
        return 0
    text = options.write.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{options.write}: has no marks {BEGIN} and {END}", file=sys.stderr)
        return 1
    options.write.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
