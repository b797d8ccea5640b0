"""Writing files that are complete or absent, whatever kills the process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync", "write_text"]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, content: str) -> None:
    """Replace ``path`` by ``content``; a killed process leaves the old file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        # Failed writes do not know their file.
        raise OSError(error.errno, error.strerror, error.filename or os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
