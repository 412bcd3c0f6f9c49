r"""Data frames as tables, and as inputs of an estimator: scikit-learn reads those of numbers alone.

What reads the cells of a table is imported where it is used: it is slow to import, and frames of numbers do without.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dropbayes.runtime.arrays import Numbers

if TYPE_CHECKING:
    import pyarrow as pa

    from dropbayes.estimators.columns.schema import Schema


@dataclass(frozen=True)
class FrameColumns:
    """The roles of the columns of a training frame, and the inputs that each becomes."""

    schema: Schema

    @classmethod
    def of(cls, frame: Any) -> FrameColumns:
        """The role of each column, inferred from its type and its cells; uninformative columns are left out.

        Raises:
            ValueError: The role of a column cannot be inferred.
        """
        import pyarrow as pa

        from dropbayes.estimators.columns.inference import LeftOut, column_of
        from dropbayes.estimators.columns.schema import Column, Schema

        table, columns, left_out = as_table(frame), [], {}
        for name in table.column_names:
            is_category = pa.types.is_dictionary(table.schema.field(name).type)
            match column_of(table[name], name, at=_location, categorical=is_category):
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
        return cls(Schema(tuple(columns), "", "regression", left_out))

    def encode(self, frame: Any, *, learn_missing: bool) -> Numbers:
        """The inputs of the networks, `[row, input]`, for rows with the columns of the training frame.

        Missing cells are filled and flagged, and new categories encoded as zeros, or else refused.
        """
        from dropbayes.estimators.columns.encoding import encode

        encoded = encode(self.schema, as_table(frame), at=_location, allow_new=learn_missing)
        if encoded.missing and not learn_missing:
            name, count = next(iter(encoded.missing.items()))
            raise ValueError(
                f"`X` must have no missing values; {count} of column {name!r} are. Fill them, or learn from their "
                'absence with missing="learn".'
            )
        return encoded.x


def as_table(frame: Any) -> pa.Table:
    """The rows of a data frame; of a mapping, its columns.

    Example:
        >>> as_table({"a": [1, 2]}).num_rows
        2
    """
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        table = frame
    elif isinstance(frame, Mapping):
        table = pa.table({str(name): list(values) for name, values in frame.items()})
    elif hasattr(frame, "to_arrow"):  # polars
        table = frame.to_arrow()
    elif type(frame).__module__.partition(".")[0] == "pandas":
        table = pa.Table.from_pandas(frame, preserve_index=False)
    else:
        raise TypeError(
            f"`frame` must be a data frame (pandas, polars or arrow) or a dict of columns; got {type(frame).__name__}."
        )
    return table.rename_columns([str(name) for name in table.column_names])


def as_frame(columns: Mapping[str, Any], like: Any) -> Any:
    """Columns as the kind of data frame that `like` is, with the index of a pandas frame; a dict for a dict."""
    module = type(like).__module__.partition(".")[0]
    if module == "pandas":
        import pandas as pd

        return pd.DataFrame(dict(columns), index=like.index)
    if module == "polars":
        import polars as pl

        return pl.DataFrame(dict(columns))
    return type(like).from_pydict(dict(columns)) if module == "pyarrow" else dict(columns)


def is_mixed_frame(X: Any) -> bool:
    """Whether this is a data frame with a non-numeric column.

    Example:
        >>> import pandas as pd
        >>> is_mixed_frame(pd.DataFrame({"a": [1.0]})), is_mixed_frame(pd.DataFrame({"a": ["x"]}))
        (False, True)
    """
    module = type(X).__module__.partition(".")[0]
    if module == "polars" and hasattr(X, "schema"):
        return not all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in X.schema.values())
    if module == "pandas" and hasattr(X, "dtypes") and getattr(X, "ndim", 1) == 2:
        others = [index for index, dtype in enumerate(X.dtypes) if getattr(dtype, "kind", "O") not in "biufc"]
        # A column of dtype object may hold numbers; text, categories and dates are not numeric.
        return any(str(X.dtypes.iloc[i]) != "object" or any(isinstance(v, str) for v in X.iloc[:, i]) for i in others)
    return False


def _location(row: int) -> str:
    return "`X`" if row < 0 else f"`X`, row {row}"


def as_array(values: Any) -> Any:
    """A torch tensor as a numpy array; other values unchanged, since scikit-learn converts them."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values
