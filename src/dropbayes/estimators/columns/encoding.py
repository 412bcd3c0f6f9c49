"""The rows of a table as inputs of a network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns import cells
from dropbayes.estimators.columns.cells import Place
from dropbayes.estimators.columns.dates import date_inputs, days_of
from dropbayes.estimators.columns.schema import Column, Schema, check_columns, list_names
from dropbayes.runtime.arrays import Numbers
from dropbayes.runtime.validation import quote

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Encoded:
    """Rows as inputs of a network, and what is unusual in them, by column."""

    x: Numbers  #: The inputs, `[row, input]`.
    missing: dict[str, int] = field(default_factory=dict)  #: How many cells were missing.
    new: dict[str, int] = field(default_factory=dict)  #: How many categories were new.
    outside: dict[str, Mask] = field(default_factory=dict)  #: Which rows lie beyond those of training.

    def outside_names(self) -> list[str]:
        """For each row, the columns whose value is beyond those of the training rows, with "; " between them."""
        names: list[list[str]] = [[] for _ in range(len(self.x))]
        for name, mask in self.outside.items():
            for row in np.flatnonzero(mask):
                names[row].append(name)
        return ["; ".join(row) for row in names]


def encode(schema: Schema, table: pa.Table, *, at: Place, allow_new: bool = False, flag: str = "allow_new") -> Encoded:
    """The inputs of a model for the rows of a table; an error if it lacks a column.

    Args:
        schema: The columns of the model.
        table: Rows with at least its columns.
        at: The location of a row of this table; -1 for the table itself.
        allow_new: Whether a category that training did not know is encoded as all zeros instead of refused.
        flag: What a user sets to allow it, for the message.
    """
    check_columns(schema, table.column_names, at(-1))
    x = np.zeros((table.num_rows, len(schema.inputs)))
    missing: dict[str, int] = {}
    new: dict[str, int] = {}
    outside: dict[str, Mask] = {}
    start, refusal = 0, "" if allow_new else f"correct it, or encode new ones as all zeros with `{flag}`."
    for column in schema.columns:
        width = len(column.inputs)
        inputs = x[:, start : start + width]
        if column.kind == "category":
            absent, beyond = _fill_categories(inputs, column, table[column.name], at, schema.missing, refusal)
            if beyond.any():
                new[column.name] = int(beyond.sum())
        else:
            values = column_values(column, table[column.name], at, schema.missing)
            absent = np.isnan(values)
            filled = np.where(absent, column.fill, values)
            n_own = width - column.flagged
            inputs[:, :n_own] = date_inputs(filled, column.parts) if column.kind == "date" else filled[:, None]
            beyond = np.zeros(len(x), dtype=bool)
            if column.low is not None and column.high is not None:
                beyond = (filled < column.low) | (filled > column.high)
        if column.flagged:
            inputs[:, -1] = absent
        if absent.any():
            missing[column.name] = int(absent.sum())
        if beyond.any():
            outside[column.name] = beyond
        start += width
    return Encoded(x, missing, new, outside)


def column_values(column: Column, cells_of_column: pa.ChunkedArray, at: Place, missing: Collection[str]) -> Numbers:
    """The numbers, booleans or days of a column, NaN where there is none."""
    if column.kind == "boolean":
        return cells.booleans(cells_of_column, column.name, at, missing)
    if column.kind == "number":
        return cells.numbers(cells_of_column, column.name, at=at, missing=missing, notation=column.notation)
    values = cells.plain(cells_of_column)
    if cells.is_text(values):
        values = cells.strip_missing(values, missing)
    elif not pa.types.is_temporal(values.type):
        raise ValueError(f"{at(-1)}, column {quote(column.name)}: must hold dates, as in training; got {values.type}.")
    days = days_of(values, column.date_format or "iso")
    wrong = np.isnan(days) & values.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(wrong.argmax())
        form = {"iso": "2020-12-31", "": "2020-12-31"}.get(column.date_format, column.date_format)
        raise ValueError(
            f"{at(row)}, column {quote(column.name)}: must be a date written as {form}, as in training; got "
            f"{quote(values[row].as_py())}."
        )
    return days


def _fill_categories(
    inputs: Numbers, column: Column, values: pa.ChunkedArray, at: Place, missing: Collection[str], refusal: str
) -> tuple[Mask, Mask]:
    """Sets the inputs of a category; returns which rows lack one, and which have a new one."""
    texts = cells.texts(values, missing)
    codes = pc.index_in(texts, value_set=pa.array(column.categories, pa.string()))
    present, known = (array.is_valid().to_numpy(zero_copy_only=False) for array in (texts, codes))
    unknown = present & ~known
    if refusal and unknown.any():
        row = int(unknown.argmax())
        raise ValueError(
            f"{at(row)}, column {quote(column.name)}: {quote(texts[row].as_py())} was not seen in training "
            f"({list_names(column.categories, most=5)}); {refusal}"
        )
    inputs[known, codes.drop_null().to_numpy(zero_copy_only=False)] = 1.0
    return ~present, unknown
