r"""Data frames as tables, and as inputs of an estimator: scikit-learn reads those of numbers alone.

What reads the cells of a table is imported where it is used: it is slow to import, and frames of numbers do without.
"""

from __future__ import annotations

import numbers
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.runtime.validation import Numbers, quote, to_tensor

if TYPE_CHECKING:
    import pyarrow as pa

    from dropbayes.estimators.columns.schema import Schema


def frame_schema(frame: Any) -> Schema:
    """The role of each column that can teach something, inferred from its type and its cells, or an error."""
    import pyarrow as pa

    from dropbayes.estimators.columns.cells import Cells
    from dropbayes.estimators.columns.inference import LeftOut, column_of
    from dropbayes.estimators.columns.schema import Column, Schema

    table, columns, left_out = as_table(frame, "X"), [], {}
    for name in table.column_names:
        is_category = pa.types.is_dictionary(table.schema.field(name).type)
        match column_of(Cells(table[name], name, _location), categorical=is_category):
            case Column() as column:
                columns.append(column)
            case LeftOut(reason):
                left_out[name] = reason
            case problem:
                raise ValueError(f"`X` has a column {name!r} that {problem.message}; encode it, or leave it out.")
    if not columns:
        raise ValueError(f"`X` must have a column to learn from; left out are {left_out}.")
    for name, reason in left_out.items():
        warnings.warn(f"The column {name!r} of `X` is not learned from: {reason}.", UserWarning, stacklevel=2)
    return Schema(tuple(columns), "", "regression", left_out)


def frame_inputs(schema: Schema, frame: Any, *, learn_missing: bool) -> Numbers:
    """The inputs of the networks, `[row, input]`, for rows with the columns of the training frame.

    Missing cells are filled and flagged, and new categories encoded as zeros, or else refused.
    """
    from dropbayes.estimators.columns.schema import encode

    encoded = encode(schema, as_table(frame, "X"), at=_location, allow_new=learn_missing, flag='missing="learn"')
    if encoded.missing and not learn_missing:
        name, count = next(iter(encoded.missing.items()))
        rule = f"must have no missing values; {count} of column {name!r} are"
        raise ValueError(f'`X` {rule}. Fill them, or learn from their absence with missing="learn".')
    return encoded.x


def as_table(frame: Any, argument: str = "frame") -> pa.Table:
    """The rows of a data frame; of a mapping, its columns. Errors name the `argument`."""
    import pyarrow as pa

    check_names(frame, argument)
    if _package(frame) == "pyarrow" and hasattr(frame, "schema"):
        return pa.table(frame)
    if hasattr(frame, "to_arrow"):  # polars
        return frame.to_arrow()
    if isinstance(frame, Mapping) or _package(frame) == "pandas":
        return pa.table({str(name): arrow_cells(values, str(name)) for name, values in frame.items()})
    kind = type(frame).__name__
    raise TypeError(f"`{argument}` must be a data frame (pandas, polars or arrow) or a dict of columns; got {kind}.")


def check_names(frame: Any, argument: str) -> list[str]:
    """The columns of a frame or a mapping: a ValueError for two of one name, a TypeError for one without rows yet."""
    if type(frame).__name__ == "LazyFrame":
        raise TypeError(f"`{argument}` must be a data frame; got a LazyFrame without rows. Pass {argument}.collect().")
    names = frame if isinstance(frame, Mapping) else getattr(frame, "columns", ())
    counts = Counter(map(str, getattr(frame, "column_names", names)))  # the columns of arrow are arrays
    if repeated := [f"{count} are called {quote(name)}" for name, count in counts.items() if count > 1]:
        raise ValueError(f"A table must have a name of its own for each column; {repeated[0]}. Rename them.")
    return list(counts)


def arrow_cells(values: Any, name: str) -> pa.Array | pa.ChunkedArray:
    """The cells of a column of any array type; texts among numbers make all of them texts, as in a file."""
    import pyarrow as pa

    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not np.iterable(values):
        raise ValueError(f"column {name!r} must have one value per row, as a list or an array; got {quote(values)}.")
    values = as_array(values)
    try:
        values = values.astype(np.str_) if getattr(getattr(values, "dtype", None), "kind", "") == "S" else values
        return pa.array(values if getattr(values, "ndim", 0) == 1 else list(values), from_pandas=True)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        if not isinstance(error, UnicodeError) and any(isinstance(value, str) for value in values):
            return pa.array([str(value) if pa.scalar(value, from_pandas=True).is_valid else None for value in values])
        raise ValueError(f"column {name!r} cannot be read: {str(error).splitlines()[0]}") from None


def as_frame(columns: Mapping[str, Any], like: Any) -> Any:
    """Columns as the kind of data frame that `like` is, with the index of a pandas frame; a dict for a dict."""
    if _package(like) == "pyarrow":
        return type(like).from_pydict(dict(columns))
    index = {"index": like.index} if _package(like) == "pandas" else {}
    return dict(columns) if isinstance(like, Mapping) else type(like)(dict(columns), **index)


def is_mixed_frame(X: Any) -> bool:
    """Whether this is a data frame with a non-numeric column."""
    if (package := _package(X)) in ("polars", "pyarrow") and hasattr(X, "schema"):
        from dropbayes.estimators.columns.cells import is_numeric

        return not all(map(is_numeric, as_table(X.slice(0, 0)).schema))
    if package == "pandas" and hasattr(X, "dtypes") and getattr(X, "ndim", 1) == 2:
        others = [index for index, dtype in enumerate(X.dtypes) if getattr(dtype, "kind", "O") not in "biufc"]
        # A column of dtype object may hold numbers; texts, categories, dates and lists are not numeric.
        numeric = numbers.Number | np.bool_ | None
        columns = [X.iloc[:, i] if str(X.dtypes.iloc[i]) == "object" else ["of another kind"] for i in others]
        return any(not isinstance(cell, numeric) for column in columns for cell in column)
    return False


def _package(frame: object) -> str:
    return type(frame).__module__.partition(".")[0]


def _location(row: int) -> str:
    return "`X`" if row < 0 else f"`X`, row {row}"


def as_array(values: Any, name: str = "X") -> Any:
    """A torch tensor as a numpy array, masked numbers as NaN, bytes in native order; other values as they are."""
    if isinstance(values, np.ma.MaskedArray) and values.dtype.kind in "biuf":
        return np.ma.filled(values.astype(np.float64), np.nan)
    if _package(values) == "pandas" and getattr(values, "ndim", 2) == 1:
        kind = str(getattr(values.dtype, "categories", values).dtype)
        values = values.sparse.to_dense() if kind.startswith("Sparse") else values
        values = values.astype(object).map(str, na_action="ignore") if kind.startswith("interval") else values
        values = values.dt.to_timestamp() if kind.startswith("period") else values  # its first instant
        if str(values.dtype) in ("object", "string"):
            return np.where(values.isna(), np.nan, values.astype(object))  # pandas.NA is neither true nor false
    if getattr(getattr(values, "dtype", None), "byteorder", "=") in ("<", ">"):  # not native; Arrow has no other
        values = values.astype(values.dtype.newbyteorder("="))
    if isinstance(values, Tensor) and values.dtype == torch.bfloat16:  # NumPy has none
        values = values.float()
    return to_tensor(values, name=name).detach().cpu().numpy() if isinstance(values, Tensor) else values
