"""Columns as inputs of a network: what each means, and how its cells are encoded.

A column is a number, a boolean or a category. A missing number is replaced by the training median and, where training
rows lacked it too, flagged by an input of its own; a category has one input for each text seen in training (one-hot).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.tables import cells
from dropbayes.tables.cells import MISSING, NUMBER, Floats, Place
from dropbayes.tables.reading import shown

__all__ = ["Column", "Encoded", "Schema", "check_columns", "encoded", "inferred", "kind_of"]

Kind = Literal["number", "boolean", "category"]

_DATE = (
    r"^([0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([T ][0-9:.]+(Z|[+-][0-9:]+)?)?|[0-9]{1,2}[./][0-9]{1,2}[./][0-9]{2,4}.*"
    r"|[0-9]{4}/[0-9]{1,2}/[0-9]{1,2}.*)$"
)


@dataclass(frozen=True)
class Column:
    """What a column means to a model.

    Attributes:
        name: Its name in the header.
        kind: "number", "boolean" or "category".
        fill: What stands in for a missing number (the training median) or boolean (the more frequent value).
        categories: The texts seen in training, sorted.
        flagged: Whether training rows lacked it, so that a missing value has an input of its own.
    """

    name: str
    kind: Kind
    fill: float = 0.0
    categories: tuple[str, ...] = ()
    flagged: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs it becomes."""
        own = tuple(f"{self.name} = {text}" for text in self.categories) if self.kind == "category" else (self.name,)
        return (*own, f"{self.name} is missing") if self.flagged else own


@dataclass(frozen=True)
class Schema:
    """The columns a model reads, and the one it predicts.

    Attributes:
        columns: What it reads, in the order of its inputs.
        target: What it predicts.
        task: "regression" or "classification".
        left_out: Columns it does not read, with the reason.
        missing: The cells that mean "no value".
    """

    columns: tuple[Column, ...]
    target: str
    task: Literal["regression", "classification"]
    left_out: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = MISSING

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all inputs."""
        return tuple(name for column in self.columns for name in column.inputs)


@dataclass(frozen=True)
class Encoded:
    """Rows as inputs `[row, input]`, and how many cells were missing or new, by column."""

    x: Floats
    missing: dict[str, int]
    new: dict[str, int]


# --- what columns mean ---------------------------------------------------------------------------------------------


def inferred(
    values: Any,
    name: str,
    *,
    at: Place,
    missing: Collection[str] = MISSING,
    categorical: bool = False,
    max_categories: int = 100,
) -> Column | str:
    """What a column of training rows means; or, where it can teach nothing, the reason in words.

    A column whose texts are mostly, but not all, numbers is refused rather than taken for categories.

    Args:
        values: All its cells.
        name: Its name.
        at: Where a row is found.
        missing: The texts that mean "no value".
        categorical: Whether to take even numbers as categories.
        max_categories: The most categories that are no sign of an identifier.
    """
    values = cells.plain(values, name, at)
    kind = "category" if categorical else kind_of(values, name, at=at, missing=missing)
    if kind == "category":
        texts = cells.texts(values, name, at, missing)
        categories = sorted(pc.unique(texts.drop_null()).to_pylist())
        if len(categories) > max_categories:
            raise ValueError(
                f"{at(-1)}, column {shown(name)}: has {len(categories)} different texts, more than "
                f"{max_categories}; if it is an identifier leave it out with --ignore, else raise --max-categories."
            )
        absent = bool(texts.null_count)
        if len(categories) + absent < 2:
            return "no value in any row" if not categories else f"{shown(categories[0])} in every row"
        return Column(name, "category", categories=tuple(categories), flagged=absent)
    found = (cells.booleans if kind == "boolean" else cells.numbers)(values, name, at=at, missing=missing)
    present = found[~np.isnan(found)]
    absent = len(present) < len(found)
    if not len(present):
        return "no value in any row"
    if not absent and present.min() == present.max():
        return f"{present[0]:g} in every row"
    fill = float(present.mean() > 0.5) if kind == "boolean" else float(np.median(present))
    return Column(name, kind, fill=fill, flagged=absent)


def kind_of(values: Any, name: str, *, at: Place, missing: Collection[str] = MISSING) -> Kind:
    """Whether a column holds numbers, booleans or categories; see `inferred`."""
    values = cells.plain(values, name, at)
    if not cells.is_text(values):
        return "boolean" if pa.types.is_boolean(values.type) else "number"
    texts = cells.trimmed(values, missing)
    present = texts.drop_null()
    if not len(present):
        return "number"
    try:
        pc.cast(present, pa.float64())
        return "number"
    except pa.ArrowInvalid:
        pass
    if pc.all(pc.is_in(pc.utf8_lower(present), value_set=pa.array(["true", "false"]))).as_py():
        return "boolean"
    if pc.mean(pc.match_substring_regex(present, _DATE)).as_py() > 0.5:
        raise ValueError(
            f"{at(-1)}, column {shown(name)}: holds dates such as {shown(present[0].as_py())}, which no model "
            "reads; turn them into numbers (a year, days since the first) or leave the column out with --ignore."
        )
    if pc.mean(pc.match_substring_regex(present, NUMBER)).as_py() > 0.5:
        row = cells.first_failure(texts)
        raise ValueError(
            f"{at(row)}, column {shown(name)}: {shown(texts[row].as_py())} among numbers; correct it, leave the cell "
            "empty, name it with --missing, or take the column as categories with --categorical."
        )
    return "category"


def check_columns(schema: Schema, names: Collection[str], label: str, *, with_target: bool = False) -> None:
    """Raises ValueError unless the table has every column the model reads (and the target, if asked for)."""
    wanted = [column.name for column in schema.columns]
    lacking = [name for name in wanted if name not in names]
    if lacking:
        listed = ", ".join(map(shown, lacking[:5])) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        have = ", ".join(map(shown, list(names)[:8])) + (", …" if len(names) > 8 else "")
        plural = "s" if len(lacking) > 1 else ""
        raise ValueError(f"{label}: lacks the column{plural} {listed} that the model reads; it has {have}.")
    if with_target and schema.target not in names:
        raise ValueError(f"{label}: lacks the target {shown(schema.target)}, without which nothing can be scored.")


# --- encoding ------------------------------------------------------------------------------------------------------


def encoded(schema: Schema, table: pa.Table, *, at: Place, allow_new: bool = False) -> Encoded:
    """The inputs of a model for the rows of a table.

    Args:
        schema: What the model reads.
        table: Rows with at least its columns.
        at: Where a row of this table is found; -1 for the table itself.
        allow_new: Whether a category that training did not know counts as none of those it knew, rather than as wrong.
    """
    x = np.zeros((table.num_rows, len(schema.inputs)))
    missing: dict[str, int] = {}
    new: dict[str, int] = {}
    place = 0
    for column in schema.columns:
        width = len(column.inputs)
        part = x[:, place : place + width]
        values = table[column.name]
        if column.kind == "category":
            absent, n_new = _fill_categories(part, column, values, at, schema.missing, allow_new)
            if n_new:
                new[column.name] = n_new
        else:
            read = cells.booleans if column.kind == "boolean" else cells.numbers
            found = read(values, column.name, at=at, missing=schema.missing)
            absent = np.isnan(found)
            part[:, 0] = np.where(absent, column.fill, found)
        if column.flagged:
            part[:, -1] = absent
        if absent.any():
            missing[column.name] = int(absent.sum())
        place += width
    return Encoded(x, missing, new)


def _fill_categories(
    part: Floats, column: Column, values: Any, at: Place, missing: Collection[str], allow_new: bool
) -> tuple[npt.NDArray[np.bool_], int]:
    texts = cells.texts(values, column.name, at, missing)
    codes = pc.index_in(texts.drop_null(), value_set=pa.array(column.categories, pa.string()))
    present = texts.is_valid().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(present)
    known = codes.is_valid().to_numpy(zero_copy_only=False)
    if not known.all() and not allow_new:
        row = int(rows[known.argmin()])
        seen = ", ".join(map(shown, column.categories[:5])) + (", …" if len(column.categories) > 5 else "")
        raise ValueError(
            f"{at(row)}, column {shown(column.name)}: {shown(texts[row].as_py())} was not seen in training ({seen}); "
            "correct it, or take new categories as none of these with --allow-new."
        )
    part[rows[known], codes.drop_null().to_numpy(zero_copy_only=False)] = 1.0
    return ~present, int((~known).sum())


def as_json(schema: Schema) -> dict[str, Any]:
    """The schema in the types JSON knows."""
    return {
        "target": schema.target,
        "task": schema.task,
        "columns": [
            {
                "name": column.name,
                "kind": column.kind,
                "flagged": column.flagged,
                **({"categories": list(column.categories)} if column.kind == "category" else {"fill": column.fill}),
            }
            for column in schema.columns
        ],
        "left_out": dict(schema.left_out),
        "missing": list(schema.missing),
    }


def from_json(values: Any) -> Schema:
    """The schema that `as_json` wrote; an exception of any kind for anything else."""
    columns = tuple(_column_from_json(entry) for entry in values["columns"])
    if values["task"] not in ("regression", "classification") or not columns:
        raise ValueError("unknown task, or no columns")
    left_out = {str(name): str(reason) for name, reason in values["left_out"].items()}
    return Schema(columns, str(values["target"]), values["task"], left_out, _strings(values["missing"]))


def _column_from_json(entry: Any) -> Column:
    if entry["kind"] not in ("number", "boolean", "category"):
        raise ValueError(f"unknown kind {entry['kind']!r}")
    fill, categories = float(entry.get("fill", 0.0)), _strings(entry.get("categories", []))
    return Column(str(entry["name"]), entry["kind"], fill, categories, bool(entry["flagged"]))


def _strings(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
