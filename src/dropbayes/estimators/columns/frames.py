"""Data frames as tables: pandas, polars, arrow, or columns in a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa


def as_table(frame: Any) -> pa.Table:
    """The rows of a data frame; of a mapping, its columns.

    Example:
        >>> as_table({"a": [1, 2]}).num_rows
        2
    """
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
    return pa.table(dict(columns)) if isinstance(like, pa.Table) else dict(columns)
