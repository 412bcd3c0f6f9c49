r"""The rows of a table: whole to learn from, or a window at a time as a fitted model reads them.

The windows are cut at the same rows whatever the blocks a file is read in, so a row is always computed in the same
batch and has the same bits.
"""

import pathlib
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dropbayes.app.cli.messages import note
from dropbayes.app.models.model import Model
from dropbayes.app.tables import Source, open_table, regroup
from dropbayes.estimators.columns import Cells, Column, Encoded, Schema, check_columns, encode
from dropbayes.runtime import files
from dropbayes.runtime.formatting import count, plain_number
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import NumpyArray, quote


def read_blocks(source: Source, blocks: Iterable[pa.Table], *, title: str) -> Iterator[pa.Table]:
    """Blocks of a table's rows, with a progress bar; raises ValueError if there are no rows."""
    n_rows = 0
    with ProgressBar(title, source.size, unit=source.unit) as bar:
        for block in blocks:
            yield block
            n_rows += block.num_rows
            bar.advance(source.position - bar.done)
    if not n_rows:
        raise ValueError(f"{source.label}: has a header but no rows.")


class Rows(NamedTuple):
    """Rows of a table as a model reads them."""

    source: Source
    numbers: NumpyArray  # of each row in its table, from 0
    table: pa.Table  # cells
    encoded: Encoded = Encoded(np.empty(0))
    y: NumpyArray = np.empty(0)  # outcomes, numbers or classes, where they are asked for

    def place(self, row: int) -> str:
        """The location of a row; of -1, that of the table."""
        return self.source.place(row if row < 0 else int(self.numbers[row]))


def windows(model: Model, source: Source, *, allow_new: bool, title: str, rows: int | None = None) -> Iterator[Rows]:
    """The rows of a table, a window at a time; notes on standard error what was missing, new or far from training."""
    missing, new, outside = Counter[str](), Counter[str](), Counter[str]()
    n_rows = 0
    for table in read_blocks(source, regroup(source.blocks(rows), model.ensemble.block_rows), title=title):
        window = Rows(source, np.arange(n_rows, n_rows := n_rows + table.num_rows), table)
        encoded = encode(model.schema, table, at=window.place, allow_new=allow_new)
        missing.update(encoded.missing)
        new.update(encoded.new)
        outside.update({name: int(mask.sum()) for name, mask in encoded.outside.items()})
        yield window._replace(encoded=encoded)
    _note_unusual_cells(model, missing, new, outside)


def _note_unusual_cells(model: Model, missing: Counter[str], new: Counter[str], outside: Counter[str]) -> None:
    lines = []
    for column in model.schema.columns:
        if missing[column.name]:
            warned = "" if column.flagged else "; no training row lacked it"
            taken = f"{count(missing[column.name], 'missing value')} of {column.name!r} taken as"
            lines.append(f"{taken} {filled_value(column)}{warned}.")
        if new[column.name]:
            values = f"{count(new[column.name], 'value')} of {column.name!r}"
            lines.append(f"{values} new to the model, encoded as all zeros.")
    for line in lines[:10]:
        note(line)
    if len(lines) > 10:
        note(f"the same of {count(len(lines) - 10, 'further column')}.")
    if beyond := {name: n for name, n in outside.items() if name not in new}:
        some = ", ".join(f"{name!r} in {count(n, 'row')}" for name, n in list(beyond.items())[:5])
        more = f" and {len(beyond) - 5} more columns" if len(beyond) > 5 else ""
        dates = [column.name for column in model.schema.columns if column.kind == "date" and column.name in beyond]
        is_late = dates and "time" not in model.origin
        remedy = f"; to predict later dates, fit with --time {shlex.quote(dates[0])}" if is_late else ""
        note(f"outside the range of the training rows: {some}{more}{remedy}.")


def filled_value(column: Column) -> str:
    """The value that a missing cell is taken as."""
    if column.kind == "category":
        return "a category of its own" if column.flagged else "none of the categories"
    if column.kind == "date":
        return str(np.datetime64(int(column.fill), "D"))
    if column.kind == "boolean":
        return "true" if column.fill else "false"
    return plain_number(column.fill)


def with_numbers(table: pa.Table, schema: Schema) -> pa.Table:
    """The table with numbers, in a typed file, for the texts that the model reads as such."""
    for index, name in enumerate(table.column_names):
        column = next((c for c in schema.columns if c.name == name and c.kind == "number"), None)
        if column is not None and pa.types.is_string(table[name].type):
            read = Cells(table[name], name, str, schema.missing).numbers(column.notation)
            table = table.set_column(index, name, pa.array(read, from_pandas=True))
    return table


def judged_windows(model: Model, source: Source, *, allow_new: bool, title: str = "read") -> Iterator[Rows]:
    """The rows of a table that have an outcome, a window at a time."""
    check_columns(model.schema, source.names, source.label, with_target=True)
    n_rows = n_known = 0
    for rows in windows(model, source, allow_new=allow_new, title=title):
        y, known = model.outcomes(rows.table, at=rows.place)
        inputs = Encoded(rows.encoded.x[known])  # what was unusual in them is counted already
        if known.any():
            yield Rows(source, rows.numbers[known], rows.table.filter(known), inputs, y[known])
        n_rows, n_known = n_rows + len(known), n_known + int(known.sum())
    if not n_known:
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to compare with.")
    if n_known < n_rows:
        note(f"{count(n_rows - n_known, 'row')} without a target left out.")


def whole_table(
    model: Model, data: str, *, allow_new: bool, judged: bool = True, title: str = "read", **reading: str | None
) -> Rows:
    """All rows of a table, or all that have an outcome."""
    with open_table(data, **reading) as source:
        parts = (judged_windows if judged else windows)(model, source, allow_new=allow_new, title=title)
        _, numbers, tables, encoded, y = zip(*parts, strict=True)
    inputs = Encoded(np.concatenate([one.x for one in encoded]))
    return Rows(source, np.concatenate(numbers), pa.concat_tables(tables), inputs, np.concatenate(y))


def fingerprint(data: str) -> str | None:
    """The SHA-256 of the data, if they are a file."""
    return files.digest(data) if data != "-" and pathlib.Path(data).is_file() else None


def note_training_rows(model: Model, data: str) -> bool:
    """Whether the data are the very file the model was fitted to, which is noted on standard error."""
    if fingerprint(data) != model.origin.get("sha256", ""):
        return False
    note("these are the rows the model was fitted to, which it fits better than others; use rows that were held out.")
    return True
