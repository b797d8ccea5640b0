"""``tdp``: one command with subcommands that are loaded when they are used."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import tdp_megatron
from tdp_megatron.cli.messages import message_of
from tdp_megatron.errors import TdpError

__all__ = ["COMMANDS", "main"]

#: Subcommand -> (module, help). A module has ``add_arguments(parser)`` and ``run(args) -> int``.
COMMANDS: dict[str, tuple[str, str]] = {
    "preprocess": ("tdp_megatron.cli.preprocess", "turn JSONL or plain-text files into .bin/.idx"),
    "inspect": ("tdp_megatron.cli.inspecting", "show counts, lengths and first tokens of a .bin/.idx pair"),
    "verify": ("tdp_megatron.cli.verify", "check .bin/.idx pairs completely"),
    "merge": ("tdp_megatron.cli.merge", "merge all .bin/.idx pairs of a folder into one"),
    "sequences": ("tdp_megatron.cli.sequences", "write the counts of all files of a blend, for a fast start"),
    "prepare-cache": ("tdp_megatron.cli.prepare_cache", "write the index caches of a training run before it starts"),
    "simulate": ("tdp_megatron.cli.simulate", "compare scheduling algorithms on a global batch, without a GPU"),
    "calibrate": ("tdp_megatron.cli.calibrate", "measure the scheduler's cost model on this machine's device"),
    "bench": ("tdp_megatron.cli.bench", "run the benchmarks of a checkout, beside their peers"),
}

EXIT_DATA_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tdp", description=(tdp_megatron.__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tdp_megatron {tdp_megatron.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        # Only the command that runs pays for its imports.
        if name == command:
            importlib.import_module(module).add_arguments(subparser)
    return parser


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that temporary files go and worker processes end.
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tdp``.

    Args:
        argv: arguments without the program's name; those of the process when None.

    Returns:
        0 done, 1 an error in data or environment (told on stderr), 2 wrong usage, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    # Names of files need not be valid Unicode.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        parser = _parser(command)
        args, unknown = parser.parse_known_args(arguments)
        if unknown and not getattr(args, "ignore_other_arguments", False):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        code = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("tdp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; nothing is left to tell it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DATA_ERROR
    except (TdpError, OSError) as error:
        print(f"tdp: error: {message_of(error)}", file=sys.stderr)
        return EXIT_DATA_ERROR
    except (ValueError, NotImplementedError) as error:
        print(f"tdp: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
