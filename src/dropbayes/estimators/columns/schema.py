"""The columns of a model, the inputs each becomes, and how all of it is stored as JSON.

A column is a number, a boolean, a category or a date. A missing number is replaced by the training median and, if
training rows lacked it too, flagged by an input of its own; a category has one input for each text seen in training
(one-hot); a date becomes its year and places on a circle.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.estimators.columns.cells import MISSING, Cells, Place, canonical
from dropbayes.estimators.columns.dates import PARTS, date_inputs
from dropbayes.estimators.columns.notation import PLAIN, Notation
from dropbayes.runtime.validation import Numbers, quote

Kind = Literal["number", "boolean", "category", "date"]
Task = Literal["regression", "classification"]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """How a model reads a column."""

    name: str  #: Its name in the header.
    kind: Kind  #: What it holds.
    fill: float = 0.0  #: What a missing value is taken as: the training median, as days of dates, or the usual boolean.
    categories: tuple[str, ...] = ()  #: The texts seen in training, sorted.
    flagged: bool = False  #: Whether training rows lacked it, so that a missing value has an input of its own.
    notation: Notation = PLAIN  #: How its numbers are written.
    date_format: str = ""  #: How its dates are written.
    parts: tuple[str, ...] = ()  #: The parts of a date that are inputs.
    low: float | None = None  #: The least value of the training rows; None if it is not on record.
    high: float | None = None  #: The greatest value of the training rows.

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs it becomes."""
        levels = [f"{self.name} = {text}" for text in self.categories]
        places = [f"{self.name}: {name}" for part in self.parts for name in PARTS[part]]
        return (*(levels or places or [self.name]), *[f"{self.name} is missing"] * self.flagged)


@dataclass(frozen=True)
class Schema:
    """The columns a model reads, and the one it predicts."""

    columns: tuple[Column, ...]  #: Those it reads, in the order of its inputs.
    target: str  #: The one it predicts.
    task: Task  #: What it predicts.
    left_out: dict[str, str] = field(default_factory=dict)  #: Columns it does not read, with the reason.
    missing: tuple[str, ...] = MISSING  #: The cells that mean "no value".
    target_notation: Notation = PLAIN  #: How the target's numbers are written.

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all inputs."""
        return tuple(name for column in self.columns for name in column.inputs)


def list_names(names: Collection[str], most: int = 8) -> str:
    """Some names in a sentence."""
    return ", ".join(map(quote, list(names)[:most])) + (", …" if len(names) > most else "") or "none"


def check_columns(schema: Schema, names: Collection[str], label: str, *, with_target: bool = False) -> None:
    """Raises ValueError unless the table has every column the model reads (and the target, if asked for)."""
    if lacking := [column.name for column in schema.columns if column.name not in names]:
        rest = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        named = f"column{'s' if len(lacking) > 1 else ''} {list_names(lacking[:5])}{rest}"
        raise ValueError(f"{label}: lacks the {named} that the model reads; it has {list_names(names)}.")
    if with_target and schema.target not in names:
        raise ValueError(f"{label}: lacks the target {quote(schema.target)}, without which nothing can be scored.")


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
    """The inputs of a model for the rows of a table, which `at` locates; an error if it lacks a column.

    With `allow_new`, categories that training did not know are encoded as all zeros instead of refused; `flag` is what
    a user sets to allow it, for the message.
    """
    check_columns(schema, table.column_names, at(-1))
    encoded = Encoded(np.zeros((table.num_rows, len(schema.inputs))))
    refusal = "" if allow_new else f"correct it, or encode new ones as all zeros with `{flag}`."
    ends = np.cumsum([len(column.inputs) for column in schema.columns])
    for column, inputs in zip(schema.columns, np.split(encoded.x, ends[:-1], axis=1), strict=True):
        cells = Cells(table[column.name], column.name, at, schema.missing)
        if column.kind == "category":
            absent, beyond = _fill_categories(inputs, column, cells, refusal)
            if beyond.any():
                encoded.new[column.name] = int(beyond.sum())
        else:
            values = column_values(column, cells)
            absent = np.isnan(values)
            filled = np.where(absent, column.fill, values)
            n_own = inputs.shape[1] - column.flagged
            inputs[:, :n_own] = date_inputs(filled, column.parts) if column.kind == "date" else filled[:, None]
            low, high = (np.nan if end is None else end for end in (column.low, column.high))  # nothing is beyond NaN
            beyond = (filled < low) | (filled > high)
        if column.flagged:
            inputs[:, -1] = absent
        if absent.any():
            encoded.missing[column.name] = int(absent.sum())
        if beyond.any():
            encoded.outside[column.name] = beyond
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
    if codes.null_count > texts.null_count:  # the category 1 may be written 1.0, as pandas does beside a missing one
        spellings = pa.array([canonical(text) for text in column.categories], pa.string())
        codes = pc.coalesce(codes, pc.index_in(pa.array(cells.labels(), pa.string()), value_set=spellings))
    present, known = (array.is_valid().to_numpy(zero_copy_only=False) for array in (texts, codes))
    unknown = present & ~known
    if refusal and unknown.any():
        row = int(unknown.argmax())
        among = list_names(column.categories, most=5)
        raise cells.error(row, f"{quote(texts[row].as_py())} was not seen in training ({among}); {refusal}")
    inputs[known, codes.drop_null().to_numpy(zero_copy_only=False)] = 1.0
    return ~present, unknown


def as_json(schema: Schema) -> dict[str, Any]:
    """The schema in the types JSON knows."""
    values = asdict(schema)
    for column in values["columns"]:
        low, high = column.pop("low"), column.pop("high")
        column |= {} if low is None else {"range": [low, high]}
    return values


def from_json(values: Any) -> Schema:
    """The schema that `as_json` wrote; an exception of any kind for anything else."""
    columns = []
    for entry in map(dict, values["columns"]):
        low, high = entry.pop("range", (None, None))
        given = {name: tuple(entry[name]) for name in ("categories", "parts")} | {"low": low, "high": high}
        column = Column(**entry | given | {"notation": Notation(**entry["notation"])})
        if column.kind not in get_args(Kind) or not set(column.parts) <= set(PARTS):
            raise ValueError(f"unknown kind {column.kind!r} or parts of a date {column.parts}")
        columns.append(column)
    if values["task"] not in get_args(Task) or not columns:
        raise ValueError("unknown task, or no columns")
    missing, notation = tuple(values["missing"]), Notation(**values["target_notation"])
    return Schema(tuple(columns), values["target"], values["task"], values["left_out"], missing, notation)
