"""Files that commands write: complete under their name, or not there."""

from __future__ import annotations

import errno
import os

from tdp_megatron.indexed.atomic import TemporaryOutput
from tdp_megatron.indexed.paths import fsync_folder

__all__ = ["check_outputs", "write_file"]


def check_outputs(*paths: str | None) -> None:
    """Find out before the work begins whether files can be written.

    Args:
        paths: None for those that are not wanted.

    Raises:
        OSError: one cannot; the folder is missing or may not be written, or the name is that of a folder.
    """
    for path in paths:
        if path is None:
            continue
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "cannot write it: it is a folder; give the name of a file", path)
        TemporaryOutput(path).discard()


def write_file(path: str, content: bytes) -> None:
    """Write ``content`` under a temporary name, then rename.

    Raises:
        OSError: it cannot be written; the message has ``path``.
    """
    output = TemporaryOutput(path)
    try:
        output.file.write(content)
        output.sync()
        output.rename()
        fsync_folder(path)
    except OSError as error:  # failed writes do not know their file, and renames name the temporary one
        raise OSError(error.errno, f"cannot write it: {error.strerror}", path) from error
    finally:
        output.discard()
