"""Cells as numbers, booleans or texts, whatever the file: with an error that names the place of the first wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.dates import days_of
from dropbayes.estimators.columns.notation import NUMBER, PLAIN, Notation
from dropbayes.runtime.arrays import Numbers
from dropbayes.runtime.validation import quote

MISSING = ("", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?")
"""The cells that mean "no value", spaces around them not counted."""

BOOLEANS = {"true": 1.0, "yes": 1.0, "y": 1.0, "t": 1.0, "false": 0.0, "no": 0.0, "n": 0.0, "f": 0.0}
"""The texts that are booleans, in lower case."""

Place = Callable[[int], str]
"""The location of a row, in words; the table itself for -1."""


def is_text(values: pa.Array) -> bool:
    """Whether an arrow array holds texts."""
    t = pa.types
    return any(is_kind(values.type) for is_kind in (t.is_string, t.is_large_string, t.is_string_view))


def is_numeric(values: pa.Array) -> bool:
    """Whether an arrow array holds numbers or booleans."""
    t = pa.types
    return any(is_kind(values.type) for is_kind in (t.is_boolean, t.is_integer, t.is_floating))


def plain(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array: dictionaries decoded, decimals as numbers, durations in days, nulls alone as texts."""
    values = pa.chunked_array(values if hasattr(values, "chunks") else [values]).combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type) or is_text(values):
        return values.cast(pa.string())
    if pa.types.is_duration(values.type) or pa.types.is_time(values.type):
        return pa.array(days_of(values, ""))  # a time of day is the duration since midnight
    return values.cast(pa.float64()) if pa.types.is_decimal(values.type) else values


def strip_missing(values: pa.Array, missing: Collection[str]) -> pa.Array:
    """The texts without spaces around them, those that mean "no value" as nulls."""
    stripped = pc.utf8_trim_whitespace(values)
    absent = pc.is_in(stripped, value_set=pa.array(list(missing), pa.string()))
    return pc.if_else(absent, pa.scalar(None, pa.string()), stripped)


def first_failure(texts: pa.Array) -> int | None:
    """The index of the first text that is no number, by halving; None if there is none."""
    try:
        pc.cast(texts, pa.float64())
        return None
    except pa.ArrowInvalid:
        half = len(texts) // 2
        before = first_failure(texts.slice(0, half)) if half else 0
        return before if before is not None else half + (first_failure(texts.slice(half)) or 0)


def numbers(
    values: pa.Array | pa.ChunkedArray,
    name: str,
    *,
    at: Place,
    missing: Collection[str] = MISSING,
    notation: Notation = PLAIN,
) -> Numbers:
    """The numbers of a column, NaN where there is none.

    Args:
        values: An arrow array of numbers or texts.
        name: The column's name, for messages.
        at: The location of a row of this array, in words; -1 for the table itself.
        missing: The texts that mean "no value".
        notation: How the numbers are written; a number as programs write it is read, too.

    Example:
        >>> numbers(pa.array([" 1.5", "NA"]), "a", at=str)
        array([1.5, nan])
    """
    cells = written = plain(values)
    if is_text(cells):
        cells = strip_missing(cells, missing)
        written = notation.plain(cells)
        if (row := first_failure(written)) is not None:
            how = f" written as {notation.example}, as in training" if notation != PLAIN else ""
            got = quote(cells[row].as_py())
            raise ValueError(f"{at(row)}, column {quote(name)}: must be a number{how}; got {got}.")
    elif not is_numeric(cells):
        raise ValueError(f"{at(-1)}, column {quote(name)}: must hold numbers; got {cells.type}.")
    floats = pc.cast(written, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    # Beyond 1e100 a number standardised to single precision may overflow whatever the others are.
    present = cells.is_valid().to_numpy(zero_copy_only=False)
    wrong = ~(np.abs(floats) <= 1e100) & present if is_text(cells) else np.abs(floats) > 1e100
    if wrong.any():
        row = int(wrong.argmax())
        rule = f"a finite number of at most 1e+100; got {quote(cells[row].as_py())}"
        raise ValueError(f"{at(row)}, column {quote(name)}: must be {rule}. Correct it, or leave the cell empty.")
    return floats


def booleans(values: pa.Array | pa.ChunkedArray, name: str, at: Place, missing: Collection[str]) -> Numbers:
    """The booleans of a column as 1 and 0, NaN where there is none."""
    values = plain(values)
    if is_text(values):
        lowered = pc.utf8_lower(strip_missing(values, missing))
        codes = pc.index_in(lowered, value_set=pa.array(list(BOOLEANS), pa.string()))
        known = pc.fill_null(codes, len(BOOLEANS)).to_numpy(zero_copy_only=False)
        truth = np.where(lowered.is_valid(), np.array([*BOOLEANS.values(), np.inf])[known], np.nan)
    else:
        truth = numbers(values, name, at=at, missing=missing)
    wrong = ~np.isnan(truth) & ~np.isin(truth, (0, 1))
    if wrong.any():
        row = int(wrong.argmax())
        got = quote(values[row].as_py())
        raise ValueError(f"{at(row)}, column {quote(name)}: must be true or false, as in training; got {got}.")
    return truth


def texts(values: pa.Array | pa.ChunkedArray, missing: Collection[str]) -> pa.Array:
    """The cells as texts, null where there is none."""
    values = plain(values)
    if pa.types.is_floating(values.type):
        values = pa.array([None if v is None or v != v else f"{v:.15g}" for v in values.to_pylist()], pa.string())
    return strip_missing(pc.cast(values, pa.string()), missing)


def labels(values: pa.Array | pa.ChunkedArray, *, missing: Collection[str] = MISSING) -> list[str | None]:
    """The classes of a target column as texts, whole numbers without a fraction; None where there is none.

    Example:
        >>> labels(pa.array([1.0, 2.5, None]))
        ['1', '2.5', None]
    """

    def canonical(text: str | None) -> str | None:
        """One spelling for a class that is a number or a boolean, however the file writes it."""
        if text is None or text.lower() in ("true", "false"):
            return text and text.lower()
        if re.match(NUMBER, text) and float(text).is_integer() and abs(float(text)) < 1e15:
            return str(int(float(text)))
        return text

    return [canonical(text) for text in texts(values, missing).to_pylist()]
