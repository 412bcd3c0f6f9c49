r"""Predictions of a fitted model for the rows of a table, a window of rows at a time.

The windows are cut at the same rows whatever the blocks a file is read in, so that every number is computed in the same
company and comes out with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dropbayes.cli.messages import note, reading
from dropbayes.folders import Model
from dropbayes.tables import Schema, Source, check_columns, encoded, regrouped

__all__ = ["Window", "check_finite", "windows", "with_draws"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Window:
    """Some rows of a table: as they were read, as inputs of the network, and the number of the first."""

    table: pa.Table
    x: Array
    first: int


def with_draws(model: Model, *, n_draws: int | None, seed: int | None) -> Model:
    """The model predicting from another number of draws or another seed, where one is asked for."""
    return replace(model, estimator=model.estimator.with_draws(n_draws=n_draws, seed=seed))


def windows(
    model: Model, source: Source, *, block_rows: int | None, allow_new: bool, title: str, with_target: bool = False
) -> Iterator[Window]:
    """The rows of a table as inputs of a model; says on standard error what was missing or new.

    Args:
        model: The model.
        source: The table.
        block_rows: Rows read at a time.
        allow_new: Whether new categories count as none of those known.
        title: What the progress bar says.
        with_target: Whether the target must be among the columns.
    """
    check_columns(model.schema, source.names, source.label, with_target=with_target)
    missing: dict[str, int] = {}
    new: dict[str, int] = {}
    first = 0
    with reading(source, title) as bar:
        for table in regrouped(source.blocks(block_rows), model.estimator.block_rows):
            at = _place(source, first)
            found = encoded(model.schema, table, at=at, allow_new=allow_new)
            for total, part in ((missing, found.missing), (new, found.new)):
                for name, count in part.items():
                    total[name] = total.get(name, 0) + count
            yield Window(table, found.x, first)
            first += table.num_rows
            bar.advance_to(source.position)
    if not first:
        raise ValueError(f"{source.label}: has a header but no rows.")
    _say_what_was_done(model.schema, missing, new)


def _place(source: Source, first: int) -> Any:
    return lambda row: source.label if row < 0 else source.place(first + row)


def _say_what_was_done(schema: Schema, missing: dict[str, int], new: dict[str, int]) -> None:
    for column in schema.columns:
        count = missing.get(column.name, 0)
        if count:
            filled = "as none of the categories" if column.kind == "category" else f"as {column.fill:g}"
            how = "as a category of its own" if column.kind == "category" and column.flagged else filled
            warned = "" if column.flagged else "; no training row lacked it"
            note(f"{count} missing {_values(count)} of {column.name!r} taken {how}{warned}.")
        if column.name in new:
            count = new[column.name]
            note(f"{count} {_values(count)} of {column.name!r} new to the model, taken as none of its categories.")


def _values(count: int) -> str:
    return "value" if count == 1 else "values"


def check_finite(columns: list[Array], window: Window, source: Source) -> None:
    """Raises ValueError where a row is so far from the training rows that single precision overflows."""
    for column in columns:
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            row = int((~np.isfinite(column)).argmax())
            raise ValueError(
                f"{source.place(window.first + row)}: the prediction is not finite; a value of this row is too far "
                "from those of training."
            )
