"""The rows of a table as inputs of a network."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.cells import Cells, Place
from dropbayes.estimators.columns.dates import date_inputs
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
    encoded = Encoded(np.zeros((table.num_rows, len(schema.inputs))))
    start, refusal = 0, "" if allow_new else f"correct it, or encode new ones as all zeros with `{flag}`."
    for column in schema.columns:
        width, cells = len(column.inputs), Cells(table[column.name], column.name, at, schema.missing)
        inputs = encoded.x[:, start : start + width]
        if column.kind == "category":
            absent, beyond = _fill_categories(inputs, column, cells, refusal)
            if beyond.any():
                encoded.new[column.name] = int(beyond.sum())
        else:
            values = column_values(column, cells)
            absent = np.isnan(values)
            filled = np.where(absent, column.fill, values)
            n_own = width - column.flagged
            inputs[:, :n_own] = date_inputs(filled, column.parts) if column.kind == "date" else filled[:, None]
            beyond = np.zeros(len(filled), dtype=bool)
            if column.low is not None and column.high is not None:
                beyond = (filled < column.low) | (filled > column.high)
        if column.flagged:
            inputs[:, -1] = absent
        if absent.any():
            encoded.missing[column.name] = int(absent.sum())
        if beyond.any():
            encoded.outside[column.name] = beyond
        start += width
    return encoded


def column_values(column: Column, cells: Cells) -> Numbers:
    """The numbers, booleans or days of a column, NaN where there is none."""
    if column.kind == "boolean":
        return cells.booleans()
    return cells.numbers(column.notation) if column.kind == "number" else cells.days(column.date_format)


def _fill_categories(inputs: Numbers, column: Column, cells: Cells, refusal: str) -> tuple[Mask, Mask]:
    """Sets the inputs of a category; returns which rows lack one, and which have a new one."""
    texts = cells.texts
    codes = pc.index_in(texts, value_set=pa.array(column.categories, pa.string()))
    present, known = (array.is_valid().to_numpy(zero_copy_only=False) for array in (texts, codes))
    unknown = present & ~known
    if refusal and unknown.any():
        row = int(unknown.argmax())
        among = list_names(column.categories, most=5)
        raise cells.error(row, f"{quote(texts[row].as_py())} was not seen in training ({among}); {refusal}")
    inputs[known, codes.drop_null().to_numpy(zero_copy_only=False)] = 1.0
    return ~present, unknown
