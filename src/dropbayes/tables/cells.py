"""Cells as numbers, booleans or texts, whatever the file: with an error that names the place of the first wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.tables.reading import shown

__all__ = [
    "MISSING", "NUMBER", "Floats", "Place", "booleans", "first_failure", "is_text", "labels", "numbers", "plain",
    "texts", "trimmed",
]  # fmt: skip

MISSING = ("", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?")
"""The cells that mean "no value", spaces around them not counted."""

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""What a number looks like."""

Floats = npt.NDArray[np.float64]
Place = Callable[[int], str]
"""Where a row is found, in words; the table itself for -1."""

# Beyond it a number standardised to single precision may overflow whatever the others are.
_LARGEST = 1e100


def is_text(values: Any) -> bool:
    """Whether an arrow array holds texts."""
    t = pa.types
    return bool(t.is_string(values.type) or t.is_large_string(values.type) or t.is_string_view(values.type))


def plain(values: Any, name: str, at: Place) -> Any:
    """The column as text, numbers or booleans; other types are refused with a remedy."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    t = pa.types
    if t.is_dictionary(values.type):
        values = pc.cast(values, values.type.value_type)
    if t.is_null(values.type):
        return pc.cast(values, pa.string())
    if is_text(values):
        return pc.cast(values, pa.string())
    if t.is_boolean(values.type) or t.is_integer(values.type) or t.is_floating(values.type):
        return values
    if t.is_decimal(values.type):
        return pc.cast(values, pa.float64())
    what = "dates or times" if t.is_temporal(values.type) else f"values of type {values.type}"
    raise ValueError(
        f"{at(-1)}, column {shown(name)}: holds {what}, which no model reads; turn them into numbers (a year, days "
        f"since the first) or leave the column out with --ignore."
    )


def trimmed(values: Any, missing: Collection[str]) -> Any:
    """The texts without spaces around them, those that mean "no value" as nulls."""
    texts = pc.utf8_trim_whitespace(values)
    absent = pc.is_in(texts, value_set=pa.array(list(missing), pa.string()))
    return pc.if_else(absent, pa.scalar(None, pa.string()), texts)


def first_failure(texts: Any) -> int:
    """The index of the first text that is no number, by halving."""
    low, high = 0, len(texts)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pc.cast(texts.slice(low, middle - low), pa.float64())
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def numbers(values: Any, name: str, *, at: Place, missing: Collection[str] = MISSING) -> Floats:
    """The numbers of a column, NaN where there is none.

    Args:
        values: An arrow array of numbers or texts.
        name: The column's name, for messages.
        at: Where a row of this array is found, in words; -1 for the table itself.
        missing: The texts that mean "no value".

    Example:
        >>> numbers(pa.array([" 1.5", "NA"]), "a", at=str)
        array([1.5, nan])
    """
    values = plain(values, name, at)
    if is_text(values):
        cells = trimmed(values, missing)
        try:
            values = pc.cast(cells, pa.float64())
        except pa.ArrowInvalid:
            row = first_failure(cells)
            text = cells[row].as_py()
            hint = " (a decimal comma? write 1.5)" if re.fullmatch(r"[+-]?[0-9]+,[0-9]+", text) else ""
            raise ValueError(f"{at(row)}, column {shown(name)}: must be a number; got {shown(text)}{hint}.") from None
        found = values.to_numpy(zero_copy_only=False).astype(np.float64)
        wrong = ~(np.abs(found) <= _LARGEST) & cells.is_valid().to_numpy(zero_copy_only=False)
    else:
        found = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        wrong = np.abs(found) > _LARGEST
        cells = values
    if wrong.any():
        row = int(wrong.argmax())
        rule = f"a finite number of at most {_LARGEST:g}; got {shown(cells[row].as_py())}"
        raise ValueError(f"{at(row)}, column {shown(name)}: must be {rule}. Correct it, or leave the cell empty.")
    return found


def booleans(values: Any, name: str, at: Place, missing: Collection[str]) -> Floats:
    """The booleans of a column as 1 and 0, NaN where there is none."""
    values = plain(values, name, at)
    if is_text(values):
        cells = pc.utf8_lower(trimmed(values, missing))
        known = pc.is_in(cells, value_set=pa.array(["true", "false", None], pa.string()))
        if pc.any(pc.invert(known)).as_py():
            row = pc.index(known, False).as_py()
            raise ValueError(
                f"{at(row)}, column {shown(name)}: must be true or false, as in training; got "
                f"{shown(values[row].as_py())}."
            )
        values = pc.equal(cells, "true")
    return numbers(values, name, at=at, missing=missing)


def texts(values: Any, name: str, at: Place, missing: Collection[str]) -> Any:
    """The cells as texts, null where there is none."""
    values = plain(values, name, at)
    if pa.types.is_floating(values.type):
        values = pa.array([None if v is None or v != v else f"{v:.15g}" for v in values.to_pylist()], pa.string())
    return trimmed(pc.cast(values, pa.string()), missing)


def labels(values: Any, name: str, *, at: Place, missing: Collection[str] = MISSING) -> list[str | None]:
    """The classes of a target column as texts, whole numbers without a fraction; None where there is none.

    Example:
        >>> labels(pa.array([1.0, 2.5, None]), "a", at=str)
        ['1', '2.5', None]
    """
    return [_canonical(text) for text in texts(values, name, at, missing).to_pylist()]


def _canonical(text: str | None) -> str | None:
    """One spelling for a class that is a number or a boolean, however the file writes it."""
    if text is None:
        return None
    if text.lower() in ("true", "false"):
        return text.lower()
    if re.match(NUMBER, text) and float(text).is_integer() and abs(float(text)) < 1e15:
        return str(int(float(text)))
    return text
