"""Cells as numbers, booleans, days or texts, whatever the file, with an error that names the first wrong one."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.dates import days_of
from dropbayes.estimators.columns.notation import NUMBER, PLAIN, Notation, notation_of
from dropbayes.runtime.validation import Numbers, quote

MISSING = ("", "NA", "N/A", "NaN", "nan", "NAN", "null", "NULL", "?", "#N/A", "<NA>")
"""The cells that mean "no value", spaces around them not counted."""

BOOLEANS = dict.fromkeys(("true", "yes", "y", "t", "1"), 1.0) | dict.fromkeys(("false", "no", "n", "f", "0"), 0.0)
"""The texts that are booleans, in lower case."""

Place = Callable[[int], str]  #: The location of a row, in words; the table itself for -1.


def is_numeric(values: pa.Array) -> bool:
    """Whether an arrow array holds numbers or booleans."""
    return pa.types.is_boolean(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)


def first_failure(texts: pa.Array) -> int | None:
    """The index of the first text that is no number, by halving; None if there is none."""
    try:
        pc.cast(texts, pa.float64())
        return None
    except pa.ArrowInvalid:
        half = len(texts) // 2
        before = first_failure(texts.slice(0, half)) if half else 0
        return before if before is not None else half + (first_failure(texts.slice(half)) or 0)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a column, and how messages call them."""

    values: pa.Array  # as one: dictionaries decoded, decimals as floats, durations in days, nulls and texts as strings
    name: str
    at: Place
    missing: Collection[str] = MISSING  # the texts that mean "no value"

    def __post_init__(self) -> None:
        given = self.values
        values = pa.chunked_array(given if hasattr(given, "chunks") else [given]).combine_chunks()
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.type in (pa.null(), pa.large_string(), pa.string_view()):
            values = values.cast(pa.string())
        elif pa.types.is_duration(values.type) or pa.types.is_time(values.type):
            values = pa.array(days_of(values, ""))  # a time of day is the duration since midnight
        elif pa.types.is_decimal(values.type) or pa.types.is_float16(values.type):
            values = values.cast(pa.float64())
        object.__setattr__(self, "values", values)

    @property
    def is_text(self) -> bool:
        """Whether they are texts, as those of a CSV file."""
        return pa.types.is_string(self.values.type)

    @property
    def texts(self) -> pa.Array:
        """The cells as texts without spaces around them, null where there is none."""
        values = self.values
        if pa.types.is_floating(values.type):
            values = pa.array([None if v is None or v != v else f"{v:.15g}" for v in values.to_pylist()], pa.string())
        stripped = pc.utf8_trim_whitespace(pc.cast(values, pa.string()))
        absent = pc.is_in(stripped, value_set=pa.array(list(self.missing), pa.string()))
        return pc.if_else(absent, pa.scalar(None, pa.string()), stripped)

    def error(self, row: int, rule: str) -> ValueError:
        """The refusal of the cell in a row; of the column for -1."""
        return ValueError(f"{self.at(row)}, column {quote(self.name)}: {rule}")

    def refuse(self, wrong: npt.NDArray[np.bool_], rule: str, remedy: str = "") -> None:
        """Raises the refusal of the first wrong cell, if there is one."""
        if wrong.any():
            row = int(wrong.argmax())
            raise self.error(row, f"{rule}; got {quote(self.values[row].as_py())}.{remedy}")

    def numbers(self, notation: Notation = PLAIN) -> Numbers:
        """The numbers, in a notation or as programs write them, NaN where there is none."""
        cells = written = self.texts if self.is_text else self.values
        if self.is_text:
            written = notation.plain(cells)
            if (row := first_failure(written)) is not None:
                how = notation.example + (", as in training" if notation != PLAIN else "")
                raise self.error(row, f"must be a number written as {how}; got {quote(cells[row].as_py())}.")
        elif not is_numeric(cells):
            raise self.error(-1, f"must hold numbers; got {cells.type}.")
        floats = pc.cast(written, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        # Beyond 1e100 a number standardised to single precision may overflow whatever the others are.
        present = cells.is_valid().to_numpy(zero_copy_only=False)
        wrong = ~(np.abs(floats) <= 1e100) & present if self.is_text else np.abs(floats) > 1e100
        self.refuse(wrong, "must be a finite number of at most 1e+100", " Correct it, or leave the cell empty.")
        absent = [float(text) for text in self.missing if re.match(NUMBER, text)]  # of a typed column, too
        return np.where(np.isin(floats, absent), np.nan, floats)

    def notation(self, decimal: str | None) -> Notation:
        """How the numbers are written, with the decimal mark where it is known."""
        return (notation_of(self.texts.drop_null(), decimal=decimal) if self.is_text else None) or PLAIN

    def booleans(self) -> Numbers:
        """The booleans as 1 and 0, NaN where there is none."""
        if self.is_text:
            encoded = pc.utf8_lower(self.texts).dictionary_encode()
            truths = [BOOLEANS.get(canonical(text) or "", np.inf) for text in encoded.dictionary.to_pylist()]
            truth = np.array([*truths, np.nan])[encoded.indices.fill_null(-1).to_numpy()]  # the last for a null
        else:
            truth = self.numbers()
        self.refuse(~np.isnan(truth) & ~np.isin(truth, (0, 1)), "must be true or false, as in training")
        return truth

    def days(self, form: str) -> Numbers:
        """The dates, written in a form of `date_format_of`, as days since 1970, NaN where there is none."""
        values = self.texts if self.is_text or (form == "%Y%m%d" and is_numeric(self.values)) else self.values
        other_zone = (getattr(values.type, "tz", None) is None) == (form == "iso zone")
        # The form of a typed column says whether it has a zone; that of an earlier model is empty.
        if not pa.types.is_string(values.type) and (not pa.types.is_temporal(values.type) or (form and other_zone)):
            zone = {"": "", "iso zone": " with a time zone"}.get(form, " without a time zone")
            raise self.error(-1, f"must hold dates{zone}, as in training; got {values.type}.")
        days = days_of(values, form or "iso")
        wrong = np.isnan(days) & values.is_valid().to_numpy(zero_copy_only=False)
        pattern = {"": "%Y-%m-%d", "iso": "%Y-%m-%d", "iso zone": "%Y-%m-%dT%H:%M:%SZ"}.get(form, form)
        self.refuse(wrong, f"must be a date written as {datetime(2020, 12, 31, 23, 59, 59):{pattern}}, as in training")
        return days

    def labels(self) -> list[str | None]:
        """The classes of a target as texts, whole numbers without a fraction; None where there is none."""
        texts = self.texts
        known = {text: canonical(text) for text in texts.unique().to_pylist()}
        return [known[text] for text in texts.to_pylist()]


def in_one_case(labels: Sequence[str | None]) -> Sequence[str | None]:
    """The labels in lower case where they are booleans in several cases, such as Yes, yes and NO."""
    known = {label: label.lower() for label in labels if label is not None}
    lowered = set(known.values())
    has_several = len(lowered) < len(known) and lowered <= BOOLEANS.keys()
    return [label and known[label] for label in labels] if has_several else labels


def canonical(text: str | None) -> str | None:
    """One spelling of a label that is a number or a boolean, however the file writes it; 007 is a code, and stays."""
    if text is None or text.lower() in ("true", "false"):
        return text and text.lower()
    if re.match(NUMBER, text) and not re.match("0[0-9]", text) and float(text).is_integer() and abs(float(text)) < 1e15:
        return str(int(float(text)))
    return text
