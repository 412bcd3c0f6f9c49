"""The columns of a model, the inputs each becomes, and how all of it is stored as JSON.

A column is a number, a boolean, a category or a date. A missing number is replaced by the training median and, if
training rows lacked it too, flagged by an input of its own; a category has one input for each text seen in training
(one-hot); a date becomes its year and places on a circle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from dropbayes.estimators.columns.cells import MISSING
from dropbayes.estimators.columns.dates import PARTS
from dropbayes.estimators.columns.notation import PLAIN, Notation
from dropbayes.runtime.validation import quote

Kind = Literal["number", "boolean", "category", "date"]
Task = Literal["regression", "classification"]


@dataclass(frozen=True)
class Column:
    """How a model reads a column."""

    name: str  #: Its name in the header.
    kind: Kind  #: What it holds.
    #: The stand-in for a missing value: the training median, or the more frequent boolean; days since 1970.
    fill: float = 0.0
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
        names: tuple[str, ...] = (self.name,)
        if self.kind == "category":
            names = tuple(f"{self.name} = {text}" for text in self.categories)
        elif self.kind == "date":
            names = tuple(f"{self.name}: {name}" for part in self.parts for name in PARTS[part])
        return (*names, f"{self.name} is missing") if self.flagged else names


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
    """Some names in a sentence.

    Example:
        >>> list_names(["a", "b", "c"], most=2)
        "'a', 'b', …"
    """
    return ", ".join(map(quote, list(names)[:most])) + (", …" if len(names) > most else "")


def check_columns(schema: Schema, names: Collection[str], label: str, *, with_target: bool = False) -> None:
    """Raises ValueError unless the table has every column the model reads (and the target, if asked for)."""
    lacking = [column.name for column in schema.columns if column.name not in names]
    if lacking:
        rest = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        plural = "s" if len(lacking) > 1 else ""
        raise ValueError(
            f"{label}: lacks the column{plural} {list_names(lacking[:5])}{rest} that the model reads; it has "
            f"{list_names(names)}."
        )
    if with_target and schema.target not in names:
        raise ValueError(f"{label}: lacks the target {quote(schema.target)}, without which nothing can be scored.")


# --- JSON ----------------------------------------------------------------------------------------------------------


def as_json(schema: Schema) -> dict[str, Any]:
    """The schema in the types JSON knows."""
    values = asdict(schema)
    for column in values["columns"]:
        low, high = column.pop("low"), column.pop("high")
        column |= {} if low is None else {"range": [low, high]}
    return values


def from_json(values: Any) -> Schema:
    """The schema that `as_json` wrote; an exception of any kind for anything else."""
    columns = tuple(_column_from_json(entry) for entry in values["columns"])
    if values["task"] not in get_args(Task) or not columns:
        raise ValueError("unknown task, or no columns")
    left_out = {str(name): str(reason) for name, reason in values["left_out"].items()}
    missing, notation = tuple(map(str, values["missing"])), _notation_from_json(values["target_notation"])
    return Schema(columns, str(values["target"]), values["task"], left_out, missing, notation)


def _column_from_json(entry: Any) -> Column:
    parts = tuple(map(str, entry["parts"]))
    if entry["kind"] not in get_args(Kind) or not set(parts) <= set(PARTS):
        raise ValueError(f"unknown kind {entry['kind']!r} or parts of a date {parts}")
    low, high = map(float, entry["range"]) if "range" in entry else (None, None)
    return Column(
        name=str(entry["name"]),
        kind=entry["kind"],
        fill=float(entry["fill"]),
        categories=tuple(map(str, entry["categories"])),
        flagged=bool(entry["flagged"]),
        notation=_notation_from_json(entry["notation"]),
        date_format=str(entry["date_format"]),
        parts=parts,
        low=low,
        high=high,
    )


def _notation_from_json(values: Any) -> Notation:
    return Notation(str(values["decimal"]), str(values["thousands"]), str(values["sign"]))
