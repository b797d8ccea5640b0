"""Tiny corpora for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tdp_megatron.indexed import IndexedDatasetBuilder, get_idx_path

__all__ = ["write_corpus"]


def write_corpus(
    path_prefix: str | os.PathLike[str],
    documents: Sequence[npt.ArrayLike],
    *,
    dtype: type[np.number] = np.uint16,
) -> str:
    """Write documents of token ids as ``path_prefix.bin`` and ``.idx``.

    Args:
        path_prefix: path without ending.
        documents: token ids of each document; may be empty.
        dtype: of the file.

    Returns:
        The prefix as a string.

    Raises:
        ValueError: an id that ``dtype`` cannot hold.
    """
    prefix = os.fspath(path_prefix)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        # Not converted here, which would wrap ids that the dtype cannot hold: the builder refuses them.
        tokens = np.asarray(document) if np.size(document) else np.zeros(0, dtype=dtype)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(get_idx_path(prefix))
    return prefix
