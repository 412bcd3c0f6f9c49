"""`dropbayes predict`: a table with the columns of a prediction added, streamed from file to file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dropbayes import folders
from dropbayes.cli.messages import out, print_json
from dropbayes.cli.predictions import Window, check_finite, windows
from dropbayes.predictor import Predictor
from dropbayes.tables import Schema, Sink, Source, numbers, open_table
from dropbayes.tables.reading import shown

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
    delimiter: str,
    block_rows: int | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Writes the predictions of a model for a table; see `dropbayes predict --help`."""
    sink = Sink(output, delimiter=delimiter)
    model = folders.load(model_path)
    predictor = Predictor(model, n_draws=n_draws, seed=seed, interval=coverage, allow_new=allow_new)
    prefix = f"{model.schema.target}_" if prefix is None else prefix
    added = [prefix + name for name in predictor.column_names]
    n_rows = 0
    with open_table(data, delimiter=delimiter) as source:
        kept = _kept(keep, source)
        _refuse_collision(kept, added)
        with sink:
            for window in windows(model, source, block_rows=block_rows, allow_new=allow_new, title="predict"):
                columns = list(predictor.flat_columns(predictor.predict_inputs(window.x)).values())
                check_finite(columns, window, source)
                sink.write(_joined(window, kept, added, columns, model.schema, typed=sink.as_parquet))
                n_rows += len(window.x)
    _say(model, predictor, n_rows, added, output, as_json=as_json)


def _kept(keep: str, source: Source) -> list[str]:
    if keep in ("all", "none"):
        return list(source.names) if keep == "all" else []
    wanted = [name.strip() for name in keep.split(",")]
    for name in wanted:
        if name not in source.names:
            raise ValueError(f"{source.label}: has no column {shown(name)} to keep; --keep takes all, none or names.")
    return wanted


def _refuse_collision(kept: Sequence[str], added: Sequence[str]) -> None:
    for name in added:
        if name in kept:
            raise ValueError(
                f"the input has a column {shown(name)}, which the prediction would add; choose another --prefix, or "
                "leave it out with --keep."
            )


def _joined(
    window: Window, kept: list[str], added: list[str], columns: list[Any], schema: Schema, *, typed: bool
) -> pa.Table:
    """The kept columns, in a typed file numbers as numbers, with the new ones beside them."""
    old: list[Any] = []
    numeric = {column.name for column in schema.columns if column.kind == "number"}
    for name in kept:
        values = window.table[name]
        if typed and name in numeric and pa.types.is_string(values.type):
            values = pa.array(numbers(values, name, at=str, missing=schema.missing), from_pandas=True)
        old.append(values)
    new = [pa.array(column.tolist() if column.dtype.kind == "U" else column) for column in columns]
    return pa.table([*old, *new], names=[*kept, *added])


def _say(
    model: folders.Model, predictor: Predictor, n_rows: int, added: list[str], output: str, *, as_json: bool
) -> None:
    if as_json:
        interval = {"coverage": predictor.interval} if model.schema.task == "regression" else {}
        draws = predictor.total_draws
        print_json({"output": output, "n_rows": n_rows, "columns": added, "n_draws": draws, **interval})
    elif output != "-":
        from rich.markup import escape

        console = out()
        console.print(f"{n_rows:,} rows predicted, written to [bold]{escape(output)}[/bold]")
        console.print(f"added: {escape(', '.join(added))}", style="dim")
