r"""Data frames with categories, texts and dates as inputs of an estimator; scikit-learn reads frames of numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:  # slow to import, and a frame of numbers does not need it
    from dropbayes.estimators.columns.schema import Schema

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FrameColumns:
    """The roles of the columns of a training frame.

    Attributes:
        schema: The columns and the inputs that each becomes (see `dropbayes.app.tables`).
    """

    schema: Schema

    @classmethod
    def of(cls, frame: Any) -> FrameColumns:
        """The role of each column, inferred from its type and its cells; uninformative columns are left out.

        Raises:
            ValueError: The role of a column cannot be inferred.
        """
        import pyarrow as pa

        from dropbayes.estimators.columns.frames import as_table
        from dropbayes.estimators.columns.inference import LeftOut, column_of
        from dropbayes.estimators.columns.schema import Column, Schema

        table, columns, left_out = as_table(frame), [], {}
        for name in table.column_names:
            is_category = pa.types.is_dictionary(table.schema.field(name).type)
            column = column_of(table[name], name, at=_location, categorical=is_category)
            if isinstance(column, Column):
                columns.append(column)
            elif isinstance(column, LeftOut):
                left_out[name] = column.reason
            else:
                raise ValueError(f"`X` has a column {name!r} that {column.message}; encode it, or leave it out.")
        if not columns:
            raise ValueError(f"`X` must have a column to learn from; left out are {left_out}.")
        for name, reason in left_out.items():
            warnings.warn(f"The column {name!r} of `X` is not learned from: {reason}.", UserWarning, stacklevel=2)
        return cls(Schema(tuple(columns), "", "regression", left_out))

    def as_json(self) -> dict[str, Any]:
        """The columns as JSON values."""
        from dropbayes.estimators.columns.schema import as_json

        return as_json(self.schema)

    @classmethod
    def from_json(cls, values: Any) -> FrameColumns:
        """The columns that `as_json` wrote."""
        from dropbayes.estimators.columns.schema import from_json

        return cls(from_json(values))

    def encode(self, frame: Any, *, learn_missing: bool) -> Array:
        """The inputs of the networks, `[row, input]`.

        Args:
            frame: Rows with the columns of the training frame.
            learn_missing: Whether missing cells are filled and flagged, and new categories encoded as zeros, instead
                of raising.
        """
        from dropbayes.estimators.columns.encoding import encode
        from dropbayes.estimators.columns.frames import as_table

        encoded = encode(self.schema, as_table(frame), at=_location, allow_new=learn_missing)
        if encoded.missing and not learn_missing:
            name, count = next(iter(encoded.missing.items()))
            raise ValueError(
                f"`X` must have no missing values; {count} of column {name!r} are. Fill them, or learn from their "
                'absence with missing="learn".'
            )
        return encoded.x


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
