"""Tokens of any array-like into a file's dtype, refusing every value that it cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["cast_tokens"]


def cast_tokens(
    values: Any, dtype: np.dtype[Any], first_document: int, document_ends: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[Any]:
    """``values`` as a flat, contiguous array of ``dtype``.

    Args:
        values: array, tensor or sequence of numbers, any shape.
        dtype: what the file stores.
        first_document: number of the document the values begin in, for messages.
        document_ends: int64 [documents], end of each document in the values; None when they are of one document.

    Raises:
        TypeError: the values are not numbers.
        ValueError: a value does not survive the conversion. Rounding to a float dtype is allowed.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values).reshape(-1)
    if array.size == 0:
        return np.empty(0, dtype=dtype)
    if array.dtype.kind == "O" and all(isinstance(value, int) for value in array):
        # Python ints beyond 64 bits.
        raise _does_not_fit(
            array, np.array([abs(value) >= 2**63 for value in array]), dtype, first_document, document_ends
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(f"document {first_document}: tokens must be numbers, got dtype {array.dtype}")
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    if dtype.kind in "iu" and array.dtype.kind in "biu":
        limits = np.iinfo(dtype)
        if not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
            # min and max first: the mask is only needed for the message.
            bad = (array < limits.min) | (array > limits.max)
            raise _does_not_fit(array, bad, dtype, first_document, document_ends)
        return array.astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
        if dtype.kind == "f" and array.dtype.kind == "f":
            bad = np.isinf(cast) & ~np.isinf(array)
        elif dtype.kind == "f":
            bad = cast.astype(np.float64) != array
        else:
            bad = (cast.astype(np.float64) != array) | (array >= 2.0**63)
    if bad.any():
        raise _does_not_fit(array, bad, dtype, first_document, document_ends)
    return cast


def _does_not_fit(
    array: npt.NDArray[Any],
    bad: npt.NDArray[np.bool_],
    dtype: np.dtype[Any],
    first_document: int,
    document_ends: npt.NDArray[np.int64] | None,
) -> ValueError:
    at = int(bad.argmax())
    document, position = first_document, at
    if document_ends is not None:
        k = int(np.searchsorted(document_ends, at, side="right"))
        document, position = first_document + k, at - (int(document_ends[k - 1]) if k else 0)
    held = ""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        held = f" ({limits.min} to {limits.max})"
    return ValueError(
        f"document {document}: token id {array[at]} at position {position} does not fit "
        f"{dtype.name}{held}; nothing of it was written. Use a wider dtype: DType.optimal_dtype(vocab_size) picks one"
    )
