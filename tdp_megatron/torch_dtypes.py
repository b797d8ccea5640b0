"""Arrays of torch's dtypes that NumPy lacks, such as bfloat16: their bytes, under a dtype that bears torch's name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["array_of", "dtype_name", "dtype_named", "is_foreign", "shown", "tensor_of"]


@functools.cache
def _stand_in(name: str, itemsize: int) -> np.dtype[Any]:
    """A dtype of one field, which nothing takes for numbers and which stays what it is through views and copies."""
    return np.dtype([(name, f"<u{itemsize}")])


def is_foreign(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy has no such numbers: the array is to be handed on, not to be calculated with."""
    return dtype.names is not None


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor of any dtype as an array, of the tensor's memory where that is possible."""
    import torch

    # It may have a gradient, lie on another device, or be conjugated or negative only by a flag.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    try:
        array: npt.NDArray[Any] = plain.numpy()
    except TypeError:
        size = plain.element_size()
        bits = plain.contiguous().view(getattr(torch, f"uint{8 * size}")).numpy()
        return bits.view(_stand_in(str(plain.dtype).removeprefix("torch."), size))
    return array


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the memory of an array, in the dtype that the array's stands for."""
    import torch

    dtype = array.dtype
    if dtype.names is None:
        return torch.from_numpy(array)
    (name,) = dtype.names
    return torch.from_numpy(array.view(f"<u{dtype.itemsize}")).view(getattr(torch, name))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype as text: NumPy's, or "torch.bfloat16"."""
    return dtype.str if dtype.names is None else f"torch.{dtype.names[0]}"


def shown(dtype: np.dtype[Any]) -> str:
    """A dtype as messages have it, "float32" or "torch.bfloat16"."""
    return str(dtype) if dtype.names is None else dtype_name(dtype)


def dtype_named(name: str) -> np.dtype[Any]:
    """Inverse of ``dtype_name``."""
    if not name.startswith("torch."):
        return np.dtype(name)
    import torch

    name = name.removeprefix("torch.")
    return _stand_in(name, getattr(torch, name).itemsize)
