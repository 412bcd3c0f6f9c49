"""Arrays of NumPy, pandas and plain lists as tensors."""

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NumpyArray = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]
Array = Tensor | NumpyArray


def to_tensor(array: Any, *, name: str = "array") -> Tensor:
    """A tensor as it is; anything else that NumPy reads as real numbers or truth values, copied.

    The copy is deliberate: arrays of pandas are often read-only, and a tensor would write through them.
    """
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.is_meta:
            kind = "on the meta device" if array.is_meta else f"of layout {array.layout}"
            raise TypeError(f"`{name}` must be a dense tensor of numbers; got one {kind}. Pass it dense: to_dense().")
        return array
    refusal = f"`{name}` must be a tensor or an array of numbers; got {type(array).__name__}"
    try:
        values = np.array(array, order="C")
    except ValueError:
        raise TypeError(f"{refusal} whose parts differ in length.") from None
    if values.dtype == object and all(isinstance(value, numbers.Real) for value in values.flat):
        values = values.astype(np.float64)  # a frame whose columns have several dtypes
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{refusal} of dtype {values.dtype}.")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))


def round_digits(values: Any, digits: int = 12) -> NumpyArray:
    """Floating-point numbers to 12 significant digits, more than a network has; others as they are."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return array
    return np.array([float(f"{value:.{digits}g}") for value in array.ravel().tolist()]).reshape(array.shape)
