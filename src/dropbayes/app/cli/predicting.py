"""`dropbayes predict`: a table with the columns of a prediction added, streamed from file to file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dropbayes.app.cli.messages import out, print_json
from dropbayes.app.cli.predictions import Window, check_finite, windows
from dropbayes.app.models.model import Model, load
from dropbayes.app.models.predictor import Predictor
from dropbayes.app.tables import Sink, Source, open_table
from dropbayes.app.tables.training import check_name
from dropbayes.columns import Schema, numbers
from dropbayes.runtime.validation import quote

__all__ = ["predict"]


def predict(
    model_path: str,
    data: str,
    *,
    output: str,
    coverage: float,
    n_draws: int | None,
    seed: int | None,
    keep: str,
    prefix: str | None,
    delimiter: str | None,
    encoding: str | None,
    block_rows: int | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Writes the predictions of a model for a table; see `dropbayes predict --help`."""
    Sink(output)  # a wrong name is refused before a model is read
    model = load(model_path)
    predictor = Predictor(model, n_draws=n_draws, seed=seed, coverage=coverage, allow_new=allow_new)
    prefix = predictor.prefix if prefix is None else prefix
    added = [prefix + name for name in predictor.column_names]
    n_rows = n_outside = 0
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        kept_names = _kept_columns(keep, source)
        _refuse_collision(kept_names, added)
        with Sink(output, delimiter=source.delimiter, decimal=_decimal_mark(model.schema, source)) as sink:
            for window in windows(model, source, block_rows=block_rows, allow_new=allow_new, title="predict"):
                columns = list(predictor.table_columns(window.encoded).values())
                check_finite(columns, window, source)
                sink.write(_joined_table(window, kept_names, added, columns, model.schema, typed=sink.as_parquet))
                n_rows += len(window.x)
                n_outside += int((columns[-1] != "").sum())
    _say(model, predictor, n_rows, n_outside, added, output, as_json=as_json)


def _decimal_mark(schema: Schema, source: Source) -> str:
    """The decimal mark of the table, so that one setting of a program reads old columns and new ones.

    A comma is taken where the numbers of training were written so and the fields are separated by something else.
    """
    marks = [schema.target_notation.decimal, *(column.notation.decimal for column in schema.columns)]
    return "," if "," in marks and source.delimiter != "," else "."


def _kept_columns(keep: str, source: Source) -> list[str]:
    if keep in ("all", "none"):
        return list(source.names) if keep == "all" else []
    wanted = [name.strip() for name in keep.split(",")]
    for name in wanted:
        check_name(name, source.names, source.label, "keep")
    return wanted


def _refuse_collision(kept_names: Sequence[str], added: Sequence[str]) -> None:
    for name in added:
        if name in kept_names:
            raise ValueError(
                f"the input has a column {quote(name)}, which the prediction would add; choose another `prefix`, or "
                "leave it out with `keep`."
            )


def _joined_table(
    window: Window, kept_names: list[str], added: list[str], columns: list[Any], schema: Schema, *, typed: bool
) -> pa.Table:
    """The columns to keep (as numbers in a typed file), followed by the new ones."""
    old: list[Any] = []
    numeric = {column.name: column.notation for column in schema.columns if column.kind == "number"}
    for name in kept_names:
        values = window.table[name]
        if typed and name in numeric and pa.types.is_string(values.type):
            read = numbers(values, name, at=str, missing=schema.missing, notation=numeric[name])
            values = pa.array(read, from_pandas=True)
        old.append(values)
    new = [pa.array(column.tolist() if column.dtype.kind == "U" else column) for column in columns]
    return pa.table([*old, *new], names=[*kept_names, *added])


def _say(
    model: Model, predictor: Predictor, n_rows: int, n_outside: int, added: list[str], output: str,
    *, as_json: bool,
) -> None:  # fmt: skip
    if as_json:
        interval = {"coverage": predictor.coverage} if model.schema.task == "regression" else {}
        print_json({
            "output": output, "n_rows": n_rows, "n_outside": n_outside, "columns": added,
            "n_draws": predictor.total_draws, **interval,
            "calibration": model.origin.get("calibration", {}).get("method"),
        })  # fmt: skip
    elif output != "-":
        from rich.markup import escape

        console = out()
        console.print(f"{n_rows:,} rows predicted, written to [bold]{escape(output)}[/bold]")
        console.print(f"added: {escape(', '.join(added))}", style="dim")
