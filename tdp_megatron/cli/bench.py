"""``tdp bench``: run the benchmarks of a checkout, each beside its peer, and collect the results."""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tdp_megatron
from tdp_megatron.cli.output import check_outputs, write_file
from tdp_megatron.errors import TdpError

__all__ = ["add_arguments", "find_benchmarks", "run"]

_SHARED = {"common.py"}


@dataclass(frozen=True, slots=True)
class _Outcome:
    name: str
    description: str
    command: str
    output: str
    code: int
    result: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tdp bench``."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="benchmarks to run; all when none is named")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--markdown", metavar="FILE", help="write a page with all tables there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: do they run at all?")
    parser.add_argument("--folder", metavar="DIR", help="where the benchmarks are; that of the checkout by default")
    parser.add_argument("--list", action="store_true", help="print the names and stop")


def find_benchmarks(folder: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """Benchmarks by name: the scripts of a folder that take ``--json`` and ``--smoke``.

    Args:
        folder: where they are; ``benchmarks`` in the current folder, or of the checkout this package is used from,
            when None.

    Raises:
        ValueError: there are none.
    """
    checkout = Path(tdp_megatron.__file__).parent.parent
    folders = [Path(folder)] if folder is not None else [Path("benchmarks"), checkout / "benchmarks"]
    for place in folders:
        scripts = [path for path in sorted(place.glob("*.py")) if path.name not in _SHARED]
        found = {p.stem: p for p in scripts if all(flag in p.read_text() for flag in ('"--json"', '"--smoke"'))}
        found |= {p.stem: p for p in scripts if "from common import" in p.read_text()}
        if found:
            return dict(sorted(found.items()))
    raise ValueError(
        f"no benchmarks in {' or '.join(map(str, folders))}; they are not part of an installed package: run in a "
        "checkout, or give --folder"
    )


def run(args: argparse.Namespace) -> int:
    """Run ``tdp bench``.

    Raises:
        ValueError: a name that is none.
        TdpError: a benchmark failed; the others have run and are in the results.
    """
    known = find_benchmarks(args.folder)
    if args.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in args.names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    check_outputs(args.json, args.markdown)
    outcomes = [_run(name, known[name], args.smoke) for name in args.names or known]
    if args.json:
        results = {outcome.name: outcome.result for outcome in outcomes}
        text = json.dumps({"date": _today(), "smoke": args.smoke, "results": results}, indent=1) + "\n"
        write_file(args.json, text.encode())
    if args.markdown:
        write_file(args.markdown, _page(outcomes, args.smoke).encode())
    failed = [f"{outcome.name} (exit code {outcome.code})" for outcome in outcomes if outcome.code]
    if failed:
        raise TdpError(f"{len(failed)} of {len(outcomes)} benchmarks failed: {', '.join(failed)}; see their output")
    return 0


def _run(name: str, script: Path, smoke: bool) -> _Outcome:
    description = ast.get_docstring(ast.parse(script.read_text())) or ""
    with tempfile.TemporaryDirectory(prefix="tdp-bench-", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "result.json"
        options = ["--smoke"] if smoke else []
        print(f"== {name}", flush=True)
        lines = []
        with subprocess.Popen(
            [sys.executable, str(script), *options, "--json", str(result)],
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C reaches this process alone, which ends the script and all its processes; what they leave is in the
            # folder.
            start_new_session=True,
            env={**os.environ, "TMPDIR": folder},
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    lines.append(line)
                code = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        content = json.loads(result.read_text()) if result.exists() else None
    command = shlex.join(["python", f"benchmarks/{script.name}", *options])
    return _Outcome(name, description, command, "".join(lines), code, content)


def _page(outcomes: list[_Outcome], smoke: bool) -> str:
    names = " ".join(outcome.name for outcome in outcomes)
    flags = " --smoke" if smoke else ""
    parts = [
        "# Benchmarks",
        f"Written by `tdp bench {names}{flags} --markdown docs/benchmarks.md` on {_today()}; do not edit.",
        f"Machine: {_machine()}. Times are CPU times and machines are shared: compare within a table.",
    ]
    for outcome in outcomes:
        failed = f"\n\nIt ended with exit code {outcome.code}." if outcome.code else ""
        parts += [
            f"## {outcome.name}",
            outcome.description.split("\n\n    python")[0],
            f"`{outcome.command}`",
            f"```\n{outcome.output.rstrip()}\n```{failed}",
        ]
    return "\n\n".join(parts) + "\n"


def _machine() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = models[0] if models else model
    import numpy
    import torch

    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {numpy.__version__}, tdp_megatron {tdp_megatron.__version__}"
    )


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
