"""Where ``tdp simulate`` takes lengths from: a ``.bin/.idx`` pair, a CSV file, or a distribution by name."""

from __future__ import annotations

import csv
import os

import numpy as np

from tdp_megatron.cli.sequences import open_prefix
from tdp_megatron.cli.verify import strip_suffix
from tdp_megatron.errors import FormatError, ScheduleError
from tdp_megatron.indexed import is_object_storage_path
from tdp_megatron.schedule.distributions import DISTRIBUTIONS, global_batch_seqlens
from tdp_megatron.types import Int64Array

__all__ = ["COLUMN_NAMES", "csv_seqlens", "draw_global_batch", "file_seqlens"]

#: Headers that are taken for the column of lengths.
COLUMN_NAMES = ("seqlen", "length", "num_tokens", "tokens")
#: Where the distributions end.
_LONGEST = 131_072


def draw_global_batch(
    source: str,
    *,
    num_sequences: int | None,
    num_tokens: int,
    longest: int | None,
    fits: int,
    seed: int,
    column: str | None = None,
) -> tuple[Int64Array, int]:
    """Lengths of one global batch.

    Args:
        source: name of a distribution, path of a ``.csv`` file, or prefix of a ``.bin/.idx`` pair.
        num_sequences: sequences of the batch; None for about ``num_tokens`` tokens.
        num_tokens: the batch ends with the sequence that reaches this, or with the file.
        longest: longer sequences are cut to this, tokens; None for those of a distribution at 131,072 or ``fits``,
            and for a file not at all.
        fits: most tokens of a sequence that the layout can hold.
        seed: of the draw, or of the order in which a file is read.
        column: of the CSV file.

    Returns:
        int64 [n], tokens, and how many of them were cut.

    Raises:
        FormatError: a file is not what it should be, or holds too little.
        ScheduleError: a sequence is too long for the layout.
        ValueError: an unknown source.
    """
    if source in DISTRIBUTIONS:
        longest = longest or min(_LONGEST, fits)
        if num_sequences is not None:
            return DISTRIBUTIONS[source].draw(np.random.default_rng(seed), num_sequences, longest), 0
        return global_batch_seqlens(source, num_tokens, seed=seed, longest=longest), 0
    lengths = file_seqlens(source, column)
    if num_sequences is not None and num_sequences > len(lengths):
        raise FormatError(
            f"{source}: has {len(lengths)} sequences, --global-batch-size asks for {num_sequences}; lower it"
        )
    # Training reads in random order, too; a corpus is often sorted by source.
    lengths = lengths[np.random.default_rng(seed).permutation(len(lengths))]
    cut = lengths if longest is None else np.minimum(lengths, longest)
    if num_sequences is None:
        num_sequences = int(np.searchsorted(np.cumsum(cut), num_tokens)) + 1
    lengths, cut = lengths[:num_sequences], cut[:num_sequences]
    if int(cut.max()) > fits:
        raise ScheduleError(
            f"{source}: a sequence of {int(cut.max())} tokens, the limit is {fits} (largest CP size x tokens per "
            f"rank); cut such sequences with --max-seqlen {fits}, or raise --max-seqlen-per-rank or the CP sizes"
        )
    return cut, int((cut < lengths).sum())


def file_seqlens(source: str, column: str | None = None) -> Int64Array:
    """All lengths of a file, int64 [at least 1], tokens; sources as of ``draw_global_batch``."""
    if source.endswith(".csv"):
        return csv_seqlens(source, column)
    prefix = strip_suffix(source)
    if not is_object_storage_path(prefix) and not os.path.exists(prefix + ".idx"):
        raise ValueError(
            f"{source!r} is no distribution ({', '.join(sorted(DISTRIBUTIONS))}), does not end in .csv, and there is "
            f"no {prefix}.idx"
        )
    lengths = np.array(open_prefix(prefix, False, None).sequence_lengths, dtype=np.int64)
    if len(lengths) == 0:
        raise FormatError(f"{prefix}.idx: has no sequences")
    return lengths


def csv_seqlens(path: str, column: str | None = None) -> Int64Array:
    """The column of lengths of a CSV file, int64 [at least 1], tokens.

    A header is a first line whose cell is no number. Without ``column`` the header must have a name of
    ``COLUMN_NAMES``, or the file only one column.

    Raises:
        FormatError: no such column, or a cell that is no length; the message has the line.
    """
    lengths: list[int] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        at = None
        try:
            for row in rows:
                if not row:
                    continue
                if at is None:
                    at = _column(path, row, column)
                    if column is not None or not _is_number(row[at]):
                        continue
                lengths.append(_length(path, rows.line_num, row, at))
        except (csv.Error, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: line {rows.line_num + 1}: not CSV: {error}") from None
    if not lengths:
        raise FormatError(f"{path}: has no lengths")
    return np.array(lengths, dtype=np.int64)


def _column(path: str, row: list[str], column: str | None) -> int:
    names = [cell.strip().lower() for cell in row]
    if column is not None:
        if column.lower() not in names:
            raise FormatError(f"{path}: no column {column!r} in its first line, which has {', '.join(row)}")
        return names.index(column.lower())
    known = [names.index(name) for name in COLUMN_NAMES if name in names]
    if known:
        return known[0]
    if len(row) == 1:
        return 0
    raise FormatError(
        f"{path}: {len(row)} columns, none named {', '.join(COLUMN_NAMES)}; its first line has {', '.join(row)}: "
        "choose one with --column"
    )


def _length(path: str, line: int, row: list[str], at: int) -> int:
    cell = row[at].strip() if at < len(row) else ""
    if not (cell.isascii() and cell.isdigit()) or int(cell[:20]) > np.iinfo(np.int64).max:
        raise FormatError(f"{path}: line {line}: {cell[:40]!r} is no length; lengths are whole tokens below 2^63")
    return int(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
