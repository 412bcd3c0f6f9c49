"""Columns of any array type, by name or as one matrix, validated against the inputs of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dropbayes.runtime.arrays import NumpyArray

__all__ = ["MATRIX", "arrow_column", "columns_by_name", "columns_of_table", "matrix_of", "number_column", "row_label"]

MATRIX = "x"
"""The name of the input that holds all columns as one matrix, `[row, column]`."""


def row_label(row: int) -> str:
    return "`columns`" if row < 0 else f"row {row}"


def columns_of_table(table: Any) -> dict[str, Any]:
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def _array(values: Any) -> Any:
    """The values as an array with a shape; Arrow arrays unchanged."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values if hasattr(values, "shape") or type(values).__module__.startswith("pyarrow") else np.asarray(values)


def matrix_of(columns: Mapping[str, Any]) -> NumpyArray:
    if MATRIX not in columns:
        raise ValueError(f"`columns` must hold the array `{MATRIX}`; got {sorted(map(str, columns))[:8]}.")
    x = np.asarray(_array(columns[MATRIX]))
    if not x.ndim:
        raise ValueError(f"`{MATRIX}` must have an axis of rows; got a single value.")
    return x


def columns_by_name(columns: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Each of the named columns as a one-dimensional array of the same length."""
    lacking = [name for name in names if name not in columns]
    if lacking and MATRIX in columns:
        x = matrix_of(columns)
        if x.ndim != 2 or x.shape[1] != len(names):
            raise ValueError(
                f"`{MATRIX}` must be shaped [row, {len(names)}], a column for each of {_list_names(names)}; "
                f"got {list(x.shape)}."
            )
        return {name: x[:, index] for index, name in enumerate(names)}
    if lacking:
        raise ValueError(
            f"`columns` lacks {_list_names(lacking)}, which the model reads; it has {_list_names(columns)}."
        )
    arrays = {name: _array(columns[name]) for name in names}
    for name, values in arrays.items():
        shape = getattr(values, "shape", (len(values),))
        if len(shape) == 2 and shape[1] == 1:
            arrays[name] = np.asarray(values)[:, 0]
        elif len(shape) != 1:
            raise ValueError(f"column {name!r} must have one value per row; got the shape {list(shape)}.")
    lengths = {len(values) for values in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(f"`columns` must be equally long; got { ({name: len(v) for name, v in arrays.items()}) }.")
    return arrays


def _list_names(names: Iterable[Any]) -> str:
    names = [repr(str(name)) for name in names]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def arrow_column(values: Any, name: str) -> Any:
    import pyarrow as pa

    if isinstance(values, np.ndarray) and values.dtype.kind == "S":
        values = values.astype(np.str_)
    try:
        return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        raise ValueError(f"column {name!r} cannot be read: {str(error).splitlines()[0]}") from None


def number_column(values: Any, name: str) -> NumpyArray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"column {name!r} must hold numbers; got {array.dtype}.")
    if not np.isfinite(array).all():
        row = int((~np.isfinite(array)).reshape(len(array), -1).any(1).argmax())
        raise ValueError(f"row {row}, column {name!r}: must be a finite number.")
    return array.astype(np.float64)
