"""The rows of a table as a model learns from them: columns interpreted, rows without target dropped, cells encoded."""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dropbayes.estimators.columns.cells import MISSING, Cells, Place, in_one_case
from dropbayes.estimators.columns.inference import LeftOut, Problem, as_written, column_of, kind_of
from dropbayes.estimators.columns.notation import NUMBER, PLAIN, Notation, notation_of
from dropbayes.estimators.columns.schema import Column, Mask, Schema, Task, column_values, encode, list_names
from dropbayes.runtime.validation import Numbers, check_choice, quote


class ColumnProblems(ValueError):
    """Columns that only the user can decide about, with one note each; `problems` has that of each column."""

    def __init__(self, label: str, problems: dict[str, Problem]) -> None:
        self.problems = problems
        cell = "correct it, leave the cell empty, name it with `missing`"
        remedies = {
            "ignore": "leave it out with `ignore`",
            "many": "allow as many with `max_categories`, or leave it out with `ignore`",
            "missing": f"{cell}, or take the column as categories with `categorical`",
        }
        lines = [f"column {quote(name)} {p.message}; {remedies[p.remedy]}." for name, p in problems.items()]
        super().__init__(f"{label}: " + (lines[0] if len(lines) == 1 else f"{len(lines)} columns need a decision."))
        if len(lines) > 1:
            for line in lines:
                self.add_note(line)


@dataclass(frozen=True)
class Reading:
    """How the columns of a training table are to be read."""

    ignore: Sequence[str] = ()  # columns to leave out
    categorical: Sequence[str] = ()  # columns of numbers that are categories
    missing: Sequence[str] = ()  # texts that mean "no value", besides the usual ones
    max_categories: int = 100  # of a column
    decimal: str | None = None  # the decimal mark, "." or ","; by default, from the cells themselves
    weights: str | None = None  # the column with the weight of each row
    group: str | None = None  # the column of groups that are held out together
    time: str | None = None  # the column of times, to learn from the past and hold out what follows


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows of a table as a model learns from them."""

    x: Numbers  # the inputs, [row, input]
    y: npt.NDArray[Any]  # the targets; texts for classes
    schema: Schema
    weight: Numbers | None = None  # of each row, like the next two
    group: npt.NDArray[np.intp] | None = None
    time: npt.NDArray[np.intp] | None = None  # its rank among all times
    missing: dict[str, int] = field(default_factory=dict)  # how many cells, by column
    n_dropped: int = 0  # rows without a target
    kept: npt.NDArray[np.intp] | None = None  # the rows of the table that have one


def check_name(name: str, names: Collection[str], label: str, argument: str) -> None:
    """Raises ValueError for a column that the table lacks, with the name that was probably meant."""
    if name in names:
        return
    folded = {other.casefold(): other for other in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    meant = f" Did you mean {quote(folded[near[0]])}?" if near else ""
    parts = [part.strip() for part in name.split(",")]
    first, *others = names or [""]
    fields = [first, *others] if others else first.split()
    if not others and name in fields:
        meant = " Its fields seem to be separated by spaces; set the `delimiter` to a space."
    elif first.casefold().startswith("sep="):
        meant = " Its first line is a setting of a spreadsheet program; remove it."
    elif len(parts) > 1 and set(parts) <= set(names):
        meant = " Give it once for each column." if argument != "target" else " Fit one model for each target."
    elif not meant and fields and all(re.fullmatch(NUMBER, text) for text in fields):
        meant = " Its first line holds numbers; a header line with the names of the columns is needed."
    raise ValueError(f"{label}: has no column {quote(name)} (`{argument}`); it has {list_names(names)}.{meant}")


def training_rows(
    table: pa.Table, *, target: str, at: Place, task: Task | None = None, reading: Reading | None = None
) -> TrainingRows:
    """The training rows of a table; columns that the user must decide about raise `ColumnProblems`.

    The task is by default regression for a numeric target, classification for text and for a target of 0 and 1.
    """
    reading, label = reading or Reading(), at(-1)
    special = {"weights": reading.weights, "group": reading.group, "time": reading.time}
    named = [("target", target), *(("ignore", n) for n in reading.ignore)]
    named += [("categorical", n) for n in reading.categorical] + [(a, n) for a, n in special.items() if n is not None]
    for argument, name in named:
        check_name(name, table.column_names, label, argument)
        if argument != "target" and name == target:
            raise ValueError(f"`{argument}` must not name the target {quote(target)}.")
    if both := set(reading.categorical) & set(reading.ignore):
        raise ValueError(f"`categorical` must not name a column to `ignore`; both name {list_names(sorted(both))}.")
    tokens = tuple(dict.fromkeys([*MISSING, *reading.missing]))
    reading = replace(reading, decimal=reading.decimal or _decimal_mark(table, tokens))
    task = task or ("classification" if pa.types.is_dictionary(table[target].type) else None)
    task, y, present, notation = _targets(Cells(table[target], target, at, tokens), task, reading.decimal)
    if len(kept := np.flatnonzero(present)) == 1:
        raise ValueError(f"{label}: 1 row with a target; at least 2 are needed, and many more to learn.")

    def place(row: int) -> str:
        return at(row if row < 0 else int(kept[row]))

    rows = table if len(kept) == table.num_rows else table.take(pa.array(kept))
    columns, left_out = _columns(rows, target, place, tokens, reading)
    schema = Schema(tuple(columns), target, task, left_out, tokens, notation)
    encoded = encode(schema, rows, at=place)

    def cells(name: str) -> Cells:
        return Cells(rows[name], name, place, tokens)

    weight = None if reading.weights is None else _weights(cells(reading.weights), reading.decimal)
    if reading.group is not None and reading.time is not None:
        raise ValueError("`group` and `time` are two ways to hold rows out; give one of them.")
    held_out = {"group": reading.group, "time": reading.time}.items()
    group, time = (None if name is None else _ranks(role, cells(name), reading.decimal) for role, name in held_out)
    n_dropped = len(present) - len(kept)
    return TrainingRows(encoded.x, y[kept], schema, weight, group, time, encoded.missing, n_dropped, kept)


def _decimal_mark(table: pa.Table, tokens: tuple[str, ...]) -> str | None:
    """A comma if the first rows of some columns can be read with no other mark and none need a point; else None."""
    columns = [Cells(values, "", str, tokens) for values in table.slice(0, 1000).columns]
    texts = [column.texts.drop_null() for column in columns if column.is_text]
    marks = [[mark for mark in ".," if notation_of(column, decimal=mark)] for column in texts]
    return "," if [","] in marks and ["."] not in marks else None


def _columns(
    rows: pa.Table, target: str, at: Place, tokens: tuple[str, ...], reading: Reading
) -> tuple[list[Column], dict[str, str]]:
    columns: list[Column] = []
    left_out = dict.fromkeys(reading.ignore, "as asked")
    roles = {reading.weights: "the weight of each row", reading.group: "the group of each row"}
    left_out |= {name: reason for name, reason in roles.items() if name is not None}
    problems: dict[str, Problem] = {}
    options: dict[str, Any] = {"max_categories": reading.max_categories, "decimal": reading.decimal}
    for name in rows.column_names:
        if name == target or name in left_out:
            continue
        if rows[name].equals(rows[target]):
            left_out[name] = "a copy of the target"
            continue
        is_category = name in reading.categorical or pa.types.is_dictionary(rows[name].type)
        match column_of(Cells(rows[name], name, at, tokens), categorical=is_category, **options):
            case LeftOut(reason=reason):
                left_out[name] = reason
            case Problem() as problem:
                problems[name] = problem
            case column:
                columns.append(column)
    if problems:
        raise ColumnProblems(at(-1), problems)
    if not columns:
        reasons = "; ".join(f"{quote(name)}: {reason}" for name, reason in list(left_out.items())[:5])
        rule = "no column is left to learn from; a varying one besides the target is needed"
        raise ValueError(f"{at(-1)}: {rule}{f' ({reasons})' if reasons else ''}.")
    return columns, left_out


def _targets(cells: Cells, task: Task | None, decimal: str | None) -> tuple[Task, npt.NDArray[Any], Mask, Notation]:
    """The task, the targets, which rows have one, and how its numbers are written."""
    notation = cells.notation(decimal)
    check_choice("task", task or "regression", ("regression", "classification"))
    if task is None:
        match kind_of(cells, decimal=decimal):
            case Problem(remedy="ignore", message=message):  # a target cannot be left out
                raise cells.error(-1, f"{message}; a target is a number or a class.")
            case Problem() as problem:
                raise ColumnProblems(cells.at(-1), {cells.name: problem})
            case "date":
                raise cells.error(-1, "holds dates; a target is a number or a class.")
            case "boolean" if len(ways := {*in_one_case(cells.labels())} - {None}) > 2:
                raise cells.error(
                    -1, f"writes two classes as {list_names(sorted(map(str, ways)))}; write each in one way."
                )
            case "number":
                task = "classification" if set(cells.labels()) - {None} == {"0", "1"} else "regression"  # a flag
            case _:
                task = "classification"
    if task == "regression":
        y: npt.NDArray[Any] = cells.numbers(notation)
        present = ~np.isnan(y)
    else:
        notation = PLAIN
        classes = in_one_case(cells.labels())
        present = np.array([text is not None for text in classes], dtype=bool)
        y = np.array(["" if text is None else text for text in classes], dtype=np.str_)
    distinct: Any = np.unique(y[present])
    if task == "classification" and len(distinct) > max(20, 0.5 * present.sum()):
        remedy = "If its texts are numbers, the odd one out is found with `task` regression."
        some = f"{len(distinct)} classes in {present.sum()} rows, such as {list_names(distinct.tolist(), most=2)}"
        raise cells.error(-1, f"has {some}; is it the target? {remedy}")
    if len(distinct) < 2 and present.sum() != 1:
        alike = (f"the value {one:g}" if task == "regression" else f"the class {quote(one)}" for one in distinct)
        what = next(alike, "no value")
        raise cells.error(-1, f"has {what} in every row; there is nothing to learn.")
    return task, y, present, notation


def _weights(cells: Cells, decimal: str | None) -> Numbers:
    weight = cells.numbers(cells.notation(decimal))
    cells.refuse(~(weight >= 0), "a weight must be a number of 0 or more (`weights`)")
    if not weight.any():
        raise cells.error(-1, "every weight is 0 (`weights`).")
    return weight


def _ranks(role: str, cells: Cells, decimal: str | None) -> npt.NDArray[np.intp]:
    """The rank of each row's group or time among all of them."""
    values: npt.ArrayLike = cells.texts.fill_null("").to_pylist()
    if role == "time":
        kind = kind_of(cells, decimal=decimal)
        if kind != "number" and kind != "date":
            raise cells.error(-1, "must hold numbers or dates (`time`).")
        values = column_values(as_written(cells, kind, decimal), cells)
        cells.refuse(np.isnan(values), "must have a time in every row (`time`)")
    if (ranks := np.unique(values, return_inverse=True)[1]).max() == 0:
        raise cells.error(-1, f"one {role} holds every row (`{role}`).")
    return ranks
