"""What the benchmarks share: fair timing, peak memory, peers that may be missing, a table and JSON.

Times are process CPU time: machines are shared, and ratios within one run are what counts. The ways of one case are
timed in turn, round after round, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Case", "Timing", "main", "optional", "peak_memory", "timed"]

_PACKAGES = ("tdp-megatron", "megatron-core", "torch", "numpy", "litdata", "grain")


@dataclass(frozen=True)
class Timing:
    """CPU seconds of one call."""

    median: float
    low: float
    high: float


@dataclass
class Case:
    """One question with several ways to answer it."""

    name: str
    timings: dict[str, Timing]
    work: float = 1.0
    """Units of work of one call; the table shows work per second unless ``unit`` is "s"."""
    unit: str = "s"
    peer: str | None = None
    """The way that others are compared with."""
    limit: str | None = None
    """The way that nothing can be faster than on this machine."""
    notes: Mapping[str, Any] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per way."""
        rows = []
        for way, timing in self.timings.items():
            row: dict[str, Any] = {"case": self.name, "way": way, "cpu_seconds": timing.median}
            row["spread"] = [timing.low, timing.high]
            if self.unit != "s":
                row["rate"], row["unit"] = self.work / timing.median, self.unit
            if self.peer in self.timings and way != self.peer:
                row["times_peer"] = self.timings[self.peer].median / timing.median
            if self.limit in self.timings and way != self.limit:
                row["share_of_limit"] = self.timings[self.limit].median / timing.median
            rows.append(row)
        return rows


def timed(ways: Mapping[str, Callable[[], Any]], repeat: int, *, warm_up: int = 1) -> dict[str, Timing]:
    """Time all ways in turn, ``repeat`` rounds after ``warm_up`` ones."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(warm_up + repeat):
        for name, run in ways.items():
            gc.collect()
            begin = time.process_time()
            run()
            if round_number >= warm_up:
                spent[name].append(time.process_time() - begin)
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in spent.items()}


def peak_memory(run: Callable[[], Any]) -> int:
    """Bytes of resident memory that ``run`` needs at its peak, beyond what the process had before.

    Measured in a forked child, Linux only.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_measure_peak, args=(run, sender))
    process.start()
    sender.close()
    try:
        return int(receiver.recv())
    finally:
        process.join()


def _measure_peak(run: Callable[[], Any], sender: Any) -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be used again without being counted
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present size
    before = _status_bytes("VmRSS")
    kept = run()
    sender.send(_status_bytes("VmHWM") - before)
    del kept


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def optional(module: str) -> tuple[Any, str]:
    """A module that need not be installed, or None and the reason."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(module), ""
    except ImportError as error:
        return None, f"{module} is not installed ({error})"


def machine() -> dict[str, Any]:
    """The machine and the versions."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "versions": versions}


def main(description: str, run: Callable[[bool, int], Iterable[Case]]) -> None:
    """Command line of a benchmark: ``[--smoke] [--repeat N] [--json FILE]``.

    Args:
        description: the benchmark's docstring.
        run: gives the cases for (smoke, repeat); reasons for missing peers are cases without timings.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; medians are shown (5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {args.repeat}")
    rows: list[dict[str, Any]] = []
    notes: dict[str, Any] = {}
    for case in run(args.smoke, args.repeat):
        new = case.rows()
        rows += new
        for row in new:
            print(_line(row), flush=True)
        if case.notes:
            notes[case.name] = dict(case.notes)
            for name, value in case.notes.items():
                print(f"{case.name:28} {name}: {value}", flush=True)
    if args.json:
        result = {"machine": machine(), "smoke": args.smoke, "rows": rows, "notes": notes}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["spread"]
    text = f"{row['case']:28} {row['way']:28} {row['cpu_seconds'] * 1e3:12.3f} ms [{low * 1e3:.3f}..{high * 1e3:.3f}]"
    if "rate" in row:
        text += f"  {row['rate']:10.4g} {row['unit']}"
    if "times_peer" in row:
        text += f"  {row['times_peer']:6.2f}x peer"
    if "share_of_limit" in row:
        text += f"  {row['share_of_limit']:5.0%} of limit"
    return text
