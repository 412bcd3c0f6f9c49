r"""The rows of a table as a fitted model reads them, a window of rows at a time.

The windows are cut at the same rows whatever the blocks a file is read in, so a row is always computed in the same
batch and has the same bits.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dropbayes.app.cli.messages import count, note, number, reading_bar
from dropbayes.app.models.model import Model
from dropbayes.app.tables import Source, regroup
from dropbayes.columns import Column, Encoded, Schema, check_columns, encode, labels, numbers
from dropbayes.columns.schema import list_names
from dropbayes.runtime.arrays import NumpyArray
from dropbayes.runtime.validation import quote

__all__ = ["Window", "check_finite", "fingerprint", "note_training_rows", "targets", "windows"]

_MOST_NOTES = 10  # Columns told of one by one.


@dataclass(frozen=True, eq=False)
class Window:
    """Some rows of a table: as they were read, as inputs of the network, and the index of the first."""

    table: pa.Table
    encoded: Encoded
    first: int

    @property
    def x(self) -> NumpyArray:
        """The inputs, `[row, input]`."""
        return self.encoded.x


def windows(
    model: Model, source: Source, *, block_rows: int | None, allow_new: bool, title: str, with_target: bool = False
) -> Iterator[Window]:
    """The rows of a table as inputs of a model; says on standard error what was missing, new or far from training.

    Args:
        model: The model.
        source: The table.
        block_rows: Rows read at a time.
        allow_new: Whether to encode unseen categories as all zeros instead of failing.
        title: The title of the progress bar.
        with_target: Whether the target must be among the columns.
    """
    check_columns(model.schema, source.names, source.label, with_target=with_target)
    missing, new, outside = Counter[str](), Counter[str](), Counter[str]()
    first = 0
    with reading_bar(source, title) as bar:
        for table in regroup(source.blocks(block_rows), model.ensemble.block_rows):
            encoded = encode(model.schema, table, at=_locator(source, first), allow_new=allow_new)
            missing.update(encoded.missing)
            new.update(encoded.new)
            outside.update({name: int(mask.sum()) for name, mask in encoded.outside.items()})
            yield Window(table, encoded, first)
            first += table.num_rows
            bar.advance_to(source.position)
    if not first:
        raise ValueError(f"{source.label}: has a header but no rows.")
    _note_what_was_done(model.schema, missing, new, outside)


def _locator(source: Source, first: int) -> Any:
    return lambda row: source.label if row < 0 else source.place(first + row)


def _note_what_was_done(schema: Schema, missing: Counter[str], new: Counter[str], outside: Counter[str]) -> None:
    lines = []
    for column in schema.columns:
        if missing[column.name]:
            lines.append(_missing_text(column, missing[column.name]))
        if new[column.name]:
            lines.append(
                f"{count(new[column.name], 'value')} of {column.name!r} new to the model, encoded as all zeros."
            )
    for line in lines[:_MOST_NOTES]:
        note(line)
    if len(lines) > _MOST_NOTES:
        note(f"the same of {count(len(lines) - _MOST_NOTES, 'further column')}.")
    beyond = {name: n for name, n in outside.items() if name not in new}
    if beyond:
        some = ", ".join(f"{name!r} in {count(n, 'row')}" for name, n in list(beyond.items())[:5])
        more = f" and {len(beyond) - 5} more columns" if len(beyond) > 5 else ""
        note(f"outside the range of the training rows: {some}{more}.")


def _missing_text(column: Column, n_missing: int) -> str:
    if column.kind == "category":
        how = "as a category of its own" if column.flagged else "as none of the categories"
    elif column.kind == "date":
        how = f"as {np.datetime64(int(column.fill), 'D')}"
    elif column.kind == "boolean":
        how = "as true" if column.fill else "as false"
    else:
        how = f"as {number(column.fill)}"
    warned = "" if column.flagged else "; no training row lacked it"
    return f"{count(n_missing, 'missing value')} of {column.name!r} taken {how}{warned}."


def targets(model: Model, window: Window, source: Source) -> tuple[NumpyArray, NumpyArray]:
    """The outcomes of a window's rows (class numbers for classes), and which rows have one."""
    name, missing, at = model.schema.target, model.schema.missing, _locator(source, window.first)
    if model.schema.task == "regression":
        y = numbers(window.table[name], name, at=at, missing=missing, notation=model.schema.target_notation)
        return y, ~np.isnan(y)
    texts = labels(window.table[name], missing=missing)
    known = {str(label): code for code, label in enumerate(model.ensemble.classes_.tolist())}
    for row, text in enumerate(texts):
        if text is not None and text not in known:
            raise ValueError(
                f"{at(row)}, column {quote(name)}: the class {quote(text)} was not seen in training "
                f"({list_names(known, most=5)})."
            )
    codes = np.array([-1 if text is None else known[text] for text in texts], dtype=np.int64)
    return codes, codes >= 0


def fingerprint(data: str) -> str | None:
    """The SHA-256 of the data, if they are a file."""
    path = pathlib.Path(data)
    if data == "-" or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_training_rows(model: Model, data: str) -> bool:
    """Whether the data are the very file the model was fitted to; says so on standard error."""
    known = model.origin.get("sha256")
    if known is None or fingerprint(data) != known:
        return False
    note("these are the rows the model was fitted to, which it fits better than others; use rows that were held out.")
    return True


def check_finite(columns: list[NumpyArray], window: Window, source: Source) -> None:
    """Raises ValueError where a row is so far from the training rows that single precision overflows."""
    for column in columns:
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            row = int((~np.isfinite(column)).argmax())
            raise ValueError(
                f"{source.place(window.first + row)}: the prediction is not finite; a value of this row is too far "
                "from those of training."
            )
