"""The roles of the columns of a training table: numbers, booleans, categories or dates, decided from all cells."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns import cells
from dropbayes.estimators.columns.cells import MISSING, Place
from dropbayes.estimators.columns.dates import date_format_of, date_parts, is_date
from dropbayes.estimators.columns.encoding import column_values
from dropbayes.estimators.columns.notation import NUMBER, PLAIN, Notation, mixed_currencies, notation_of
from dropbayes.estimators.columns.schema import Column, Kind
from dropbayes.runtime.validation import quote

UNNAMED = "unnamed_"
"""Prefix of the names generated for unnamed columns."""

_IDENTIFIER = re.compile(r"(?i)(.*[\W_])?(id|ids|uuid|guid|index|key|row|rownum|rownumber)$")
_MANY = 20  # Fewer different texts are categories even if most rows have their own.


@dataclass(frozen=True)
class LeftOut:
    """A column that can teach nothing, with the reason."""

    reason: str


@dataclass(frozen=True)
class Problem:
    """A column that only the user can decide about: what is wrong, and the argument that settles it."""

    message: str
    remedy: str


def column_of(
    values: pa.Array,
    name: str,
    *,
    at: Place,
    missing: Collection[str] = MISSING,
    categorical: bool = False,
    max_categories: int = 100,
    decimal: str | None = None,
) -> Column | LeftOut | Problem:
    """The role of a column of training rows.

    Args:
        values: All its cells.
        name: Its name.
        at: The location of a row, in words.
        missing: The texts that mean "no value".
        categorical: Whether to take even numbers as categories.
        max_categories: The most categories of a column.
        decimal: The decimal mark where it is known.
    """
    if name.startswith(UNNAMED) or re.fullmatch(r"__index_level_\d+__", name):
        return LeftOut("an index without a name")
    values = cells.plain(values)
    if not (cells.is_text(values) or cells.is_numeric(values) or pa.types.is_temporal(values.type)):
        return LeftOut(f"values of type {values.type}, which no model reads")
    kind = "category" if categorical else kind_of(values, at=at, missing=missing, decimal=decimal)
    if isinstance(kind, Problem):
        return kind
    if kind == "category":
        return _category(values, name, missing, max_categories, forced=categorical)
    return _number(values, name, at, missing, kind, decimal)


def kind_of(
    values: pa.Array, *, at: Place, missing: Collection[str] = MISSING, decimal: str | None = None
) -> Kind | Problem:
    """Whether a column holds numbers, booleans, dates or categories; a problem if only most are numbers."""
    values = cells.plain(values)
    if pa.types.is_temporal(values.type):
        return "date"
    if not cells.is_text(values):
        return "boolean" if pa.types.is_boolean(values.type) else "number"
    texts = cells.strip_missing(values, missing)
    present = texts.drop_null()
    if not len(present):
        return "number"
    if notation_of(present, decimal=decimal) is not None or cells.first_failure(present) is None:
        coded = pc.any(pc.match_substring_regex(present, r"^0[0-9]+$")).as_py()  # 01007 is a code, not a quantity
        return "category" if coded else "number"
    if signs := mixed_currencies(present, decimal=decimal):
        return Problem(f"holds amounts in {', '.join(signs)}, which cannot be compared", "ignore")
    if pc.all(pc.is_in(pc.utf8_lower(present), value_set=pa.array(sorted(cells.BOOLEANS)))).as_py():
        return "boolean"
    if is_date(present):
        try:
            form = date_format_of(present)
        except ValueError as error:
            return Problem(f"holds dates such as {quote(present[0].as_py())}, in which {error}", "ignore")
        if form:
            return "date"
        row = int(np.argmax(~pc.match_substring_regex(texts, r"^[0-9]").to_numpy(zero_copy_only=False).astype(bool)))
        return Problem(f"holds dates of no common format, such as {quote(texts[row].as_py())}", "ignore")
    if pc.mean(pc.match_substring_regex(present, NUMBER)).as_py() > 0.5:
        row = cells.first_failure(texts) or 0
        return Problem(f"has {quote(texts[row].as_py())} among numbers at {at(row)}", "missing")
    return "category"


def _category(
    values: pa.Array, name: str, missing: Collection[str], max_categories: int, *, forced: bool
) -> Column | LeftOut | Problem:
    texts = cells.texts(values, missing)
    categories = sorted(pc.unique(texts.drop_null()).to_pylist())
    n_rows, absent = len(texts) - texts.null_count, bool(texts.null_count)
    if len(categories) + absent < 2:
        return LeftOut("no value in any row" if not categories else f"{quote(categories[0])} in every row")
    if len(categories) > max(_MANY, n_rows / 2) and not forced:
        long = np.mean([len(text) for text in categories[:1000]]) > 40
        what = "free text" if long else "an identifier"
        return LeftOut(f"{what}: {len(categories):,} different texts in {n_rows:,} rows")
    if len(categories) > max_categories:
        return Problem(f"has {len(categories):,} different texts, more than {max_categories}", "ignore")
    return Column(name, "category", categories=tuple(categories), flagged=absent)


def _number(
    values: pa.Array, name: str, at: Place, missing: Collection[str], kind: Kind, decimal: str | None
) -> Column | LeftOut:
    """The role of a column of numbers, booleans or dates."""
    is_written_date = kind == "date" and cells.is_text(values)
    form = date_format_of(cells.strip_missing(values, missing).drop_null()) if is_written_date else ""
    column = Column(name, kind, notation=number_notation(values, missing, decimal), date_format=form)
    floats = column_values(column, values, at, missing)
    present = floats[~np.isnan(floats)]
    absent = len(present) < len(floats)
    if not len(present):
        return LeftOut("no value in any row")
    low, high = float(present.min()), float(present.max())
    if not absent and low == high:
        if abs(low) >= 2**53 and pc.count_distinct(values).as_py() > 1:
            return LeftOut("numbers too large to be told apart")
        return LeftOut("one date in every row" if kind == "date" else f"{low:g} in every row")
    column = replace(column, fill=float(np.median(present)), flagged=absent, low=low, high=high)
    if kind == "date":
        return replace(column, parts=date_parts(present))
    if kind == "boolean":
        return replace(column, fill=float(present.mean() > 0.5), low=None, high=None)
    ordered = np.unique(present)
    if len(ordered) > 2 and np.ptp(ordered) > 1e18 * min(np.ptp(ordered[1:]), np.ptp(ordered[:-1])):
        far = int(np.nanargmax(np.abs(floats - np.median(present))))
        rule = f"{floats[far]:g} is so far from the others that these could not be told apart"
        raise ValueError(f"{at(far)}, column {quote(name)}: {rule}. Correct it, or leave the cell empty.")
    n_distinct, n_rows = len(ordered), len(present)
    if _IDENTIFIER.match(name) and n_rows > _MANY and (present == np.round(present)).all():
        if n_distinct == n_rows:
            return LeftOut("an identifier: another number in every row")
        if n_distinct > 0.9 * n_rows:  # with some rows entered twice
            return LeftOut(f"an identifier: {n_distinct:,} different numbers in {n_rows:,} rows")
    return column


def number_notation(values: pa.Array, missing: Collection[str], decimal: str | None) -> Notation:
    """How the numbers of a column are written."""
    values = cells.plain(values)
    if not cells.is_text(values):
        return PLAIN
    return notation_of(cells.strip_missing(values, missing).drop_null(), decimal=decimal) or PLAIN
