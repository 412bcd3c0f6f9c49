"""The roles of the columns of a training table: numbers, booleans, categories or dates, decided from all cells."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.cells import BOOLEANS, Cells, first_failure, is_numeric
from dropbayes.estimators.columns.dates import are_days, date_format_of, date_parts, is_date, period_of
from dropbayes.estimators.columns.notation import ANY_NUMBER, mixed_currencies, notation_of
from dropbayes.estimators.columns.schema import Column, Kind, column_values
from dropbayes.runtime.validation import quote

UNNAMED = "unnamed_"  #: Prefix of the names generated for unnamed columns.

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
    cells: Cells, *, categorical: bool = False, max_categories: int = 100, decimal: str | None = None
) -> Column | LeftOut | Problem:
    """The role of a column of training rows, from all its cells and the decimal mark where it is known.

    With `categorical` even numbers are categories, of which there may be at most `max_categories`.
    """
    if re.fullmatch(rf"{UNNAMED}\d+|Unnamed: \d+|__index_level_\d+__", cells.name):  # the last two are pandas'
        empty = cells.is_text and not len(cells.texts.drop_null())
        return LeftOut("no value in any row" if empty else "an index without a name")
    values = cells.values
    if not (cells.is_text or is_numeric(values) or pa.types.is_temporal(values.type)):
        return LeftOut(f"values of type {values.type}, which no model reads")
    kind = "category" if categorical else kind_of(cells, decimal=decimal)
    if isinstance(kind, Problem):
        return kind
    if kind == "category":
        return _category(cells, max_categories, forced=categorical)
    return _number(cells, kind, decimal)


def kind_of(cells: Cells, *, decimal: str | None = None) -> Kind | Problem:
    """Whether a column holds numbers, booleans, dates or categories; a problem if only most are numbers."""
    if pa.types.is_temporal(cells.values.type):
        return "date"
    is_large = cells.is_text or (is_numeric(cells.values) and (pc.min(cells.values).as_py() or 0) > 18e6)
    different = replace(cells, values=pc.unique(cells.values) if is_large else cells.values[:0]).texts.drop_null()
    if not _IDENTIFIER.match(cells.name) and are_days(different, cells.name):  # numbers such as 20210401
        return "date"
    if not cells.is_text:
        return "boolean" if pa.types.is_boolean(cells.values.type) else "number"
    texts = cells.texts
    if not len(present := texts.drop_null()):
        return "number"
    if notation_of(present, decimal=decimal) is not None or first_failure(present) is None:
        coded = pc.any(pc.match_substring_regex(present, r"^0[0-9]+$")).as_py()  # 01007 is a code, not a quantity
        return "category" if coded else "number"
    if signs := mixed_currencies(present, decimal=decimal):
        return Problem(f"holds amounts in {', '.join(signs)}, which cannot be compared", "ignore")
    # F and N, T and Y, or T and 1 are codes: taken as booleans, they would be one value.
    spellings = [[word for word in BOOLEANS if word not in codes] for codes in ("tf10", "yn10", "tfyn")]
    lowered = pc.utf8_lower(present)
    if any(pc.all(pc.is_in(lowered, value_set=pa.array(words))).as_py() for words in spellings):
        return "boolean"
    if is_date(present) or period_of(present) is not None:
        try:
            date_format_of(present)
        except ValueError as error:
            return Problem(f"holds dates such as {quote(present[0].as_py())}, in which {error}", "ignore")
        return "date"
    if pc.mean(pc.match_substring_regex(present, ANY_NUMBER)).as_py() > 0.5:
        odd = ~pc.match_substring_regex(texts, ANY_NUMBER).fill_null(True).to_numpy(zero_copy_only=False)
        row = int(odd.argmax()) or first_failure(texts) or 0
        return Problem(f"has {quote(texts[row].as_py())} among numbers at {cells.at(row)}", "missing")
    return "category"


def _category(cells: Cells, max_categories: int, *, forced: bool) -> Column | LeftOut | Problem:
    texts = cells.texts
    categories = sorted(pc.unique(texts.drop_null()).to_pylist())
    n_rows, absent = len(texts) - texts.null_count, bool(texts.null_count)
    if len(categories) + absent < 2:
        return LeftOut("no value in any row" if not categories else f"{quote(categories[0])} in every row")
    if len(categories) > max(_MANY, n_rows / 2) and not forced:
        what = "free text" if np.mean([len(text) for text in categories[:1000]]) > 40 else "an identifier"
        if pc.mean(pc.match_substring_regex(texts, r"^\W*[0-9]")).as_py() > 0.9:
            what += f", or numbers in a notation that is not read (such as {quote(categories[0])})"
        return LeftOut(f"{what}: {len(categories):,} different texts in {n_rows:,} rows")
    if len(categories) > max_categories:
        return Problem(f"has {len(categories):,} different texts, more than {max_categories}", "many")
    return Column(cells.name, "category", categories=tuple(categories), flagged=absent)


def _number(cells: Cells, kind: Kind, decimal: str | None) -> Column | LeftOut:
    """The role of a column of numbers, booleans or dates."""
    column = as_written(cells, kind, decimal)
    floats = column_values(column, cells)
    present = floats[~np.isnan(floats)]
    absent = len(present) < len(floats)
    if not len(present):
        return LeftOut("no value in any row")
    low, high = float(present.min()), float(present.max())
    if not absent and low == high:
        if abs(low) >= 2**53 and pc.count_distinct(cells.values).as_py() > 1:
            return LeftOut("numbers too large to be told apart")
        return LeftOut("one date in every row" if kind == "date" else f"{low:g} in every row")
    median = float(np.quantile(present, 0.5, method="inverted_cdf"))  # a value that occurs, never one between two days
    column = replace(column, fill=median, flagged=absent, low=low, high=high)
    if kind == "date":
        return replace(column, parts=date_parts(present))
    if kind == "boolean":
        return replace(column, fill=float(present.mean() > 0.5), low=None, high=None)
    ordered, n_rows = np.unique(present), len(present)
    if len(ordered) > 2 and np.ptp(ordered) > 1e18 * min(np.ptp(ordered[1:]), np.ptp(ordered[:-1])):
        far = int(np.nanargmax(np.abs(floats - np.median(present))))
        rule = f"{floats[far]:g} is so far from the others that these could not be told apart"
        raise cells.error(far, f"{rule}. Correct it, or leave the cell empty.")
    many = n_rows > _MANY and len(ordered) > 0.9 * n_rows  # some rows may be entered twice
    if many and _IDENTIFIER.match(cells.name) and (present == np.round(present)).all():
        return LeftOut(f"an identifier: {len(ordered):,} different numbers in {n_rows:,} rows")
    return column


def as_written(cells: Cells, kind: Kind, decimal: str | None) -> Column:
    """A column of numbers, booleans or dates with how these are written."""
    dates = cells.values if pa.types.is_temporal(cells.values.type) else cells.texts.drop_null()
    form = date_format_of(dates) if kind == "date" else ""
    return Column(cells.name, kind, notation=cells.notation(decimal), date_format=form)
