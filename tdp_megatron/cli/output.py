"""Files that commands write: complete under their name, or not there."""

from __future__ import annotations

from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.indexed.paths import fsync_folder

__all__ = ["write_file"]


def write_file(path: str, content: bytes) -> None:
    """Write ``content`` under a temporary name, then rename."""
    output = TemporaryOutput(path)
    output.file.write(content)
    output.sync()
    output.rename()
    fsync_folder(path)
