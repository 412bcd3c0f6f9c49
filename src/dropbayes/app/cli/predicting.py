"""`dropbayes predict`: a table with the columns of a prediction added, streamed from file to file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dropbayes.app.cli import options
from dropbayes.app.cli.messages import bold, escaped, print_result

if TYPE_CHECKING:
    import pyarrow as pa

    from dropbayes.estimators.columns import Schema


def predict(
    model: options.ModelFolder,
    data: options.Data,
    output: Annotated[
        str, options.output(help="A .csv or .parquet file, or with --engine a folder; - is CSV on standard output.")
    ],
    coverage: options.Coverage = 0.95,
    n_draws: Annotated[
        str | None,
        typer.Option(
            help="Draws per network, or auto: for each row until its error is small. By default as in the fit.",
            metavar="N",
        ),
    ] = None,
    max_draws: Annotated[int, options.count(help="The most draws per network with --n-draws auto.", min=64)] = 10_000,
    seed: options.Seed = None,
    method: options.Method = "sampling",
    keep: Annotated[
        str, typer.Option(help="Which input columns to keep: all, none, or names with commas.", metavar="COLUMNS")
    ] = "all",
    prefix: Annotated[
        str | None, typer.Option(help="Prefix of the new columns' names; by default the target and _.", metavar="TEXT")
    ] = None,
    allow_new: options.AllowNew = False,
    block_rows: options.BlockRows = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    engine: Annotated[
        Literal["processes", "ray", "dask", "spark"] | None,
        typer.Option(help="Predict Parquet files, or a folder of them, with many workers."),
    ] = None,
    workers: Annotated[int | None, options.count(help="Workers; one per core by default.")] = None,
    address: Annotated[
        str | None, typer.Option(help="The engine's cluster; this machine by default.", metavar="ADDRESS")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict the rows of a table, with uncertainty.

    Adds for numbers: mean, std with its parts epistemic_std and aleatoric_std, lower, upper.

    Adds for classes: predicted, probabilities, entropy, mutual information.

    Adds for both: outside, the columns whose value lies beyond those of the training rows.
    """
    if engine is not None and (keep != "all" or block_rows or delimiter or encoding):
        raise typer.BadParameter("has no --keep, --block-rows, --delimiter or --encoding", param_hint="'--engine'")
    if engine is None and (workers or address):
        raise typer.BadParameter("are those of an engine; name one with --engine", param_hint="'--workers, --address'")
    draws = _draws(n_draws)
    from dropbayes.app.cli.rows import windows
    from dropbayes.app.models.model import load
    from dropbayes.app.models.predictor import Predictor
    from dropbayes.app.tables import is_parquet, open_table, write_tables
    from dropbayes.app.tables.training import check_name

    if engine is None:
        options.check_one_output(output, as_json)
        as_parquet = is_parquet(output)  # a wrong name is refused before a model is read
    fitted = load(model)
    predictor = Predictor(
        fitted, n_draws=draws, seed=seed, coverage=coverage, allow_new=allow_new, method=method, max_draws=max_draws
    )
    if engine is not None:
        from dropbayes.app.distributed import predict_parquet

        n_rows = predict_parquet(
            predictor, data, output, engine=engine, n_workers=workers, address=address, prefix=prefix
        )
        found = {"output": output, "n_rows": n_rows, "engine": engine, "n_draws": predictor.total_draws}
        print_result(found, [f"{n_rows:,} rows predicted, written to {bold(output)}"], as_json=as_json)
        return
    prefix = predictor.prefix if prefix is None else prefix
    added = [prefix + name for name in predictor.column_names]
    n_rows = n_outside = 0
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        chosen = dict.fromkeys(name.strip() for name in keep.split(","))
        kept = list({"all": source.names, "none": ()}.get(keep, chosen))
        for name in kept:
            check_name(name, source.names, source.label, "keep")
        # The decimal mark of the table, so that one setting of a program reads old columns and new ones.
        marks = {fitted.schema.target_notation.decimal, *(c.notation.decimal for c in fitted.schema.columns)}
        decimal = "," if "," in marks and source.delimiter != "," else "."

        def predicted() -> Iterator[pa.Table]:
            nonlocal n_rows, n_outside
            for window in windows(fitted, source, rows=block_rows, allow_new=allow_new, title="predict"):
                table = window.table.select(kept)
                table = _with_numbers(table, fitted.schema) if as_parquet else table
                n_rows += table.num_rows
                n_outside += sum(map(bool, window.encoded.outside_names()))
                yield predictor.append_columns(table, window.encoded, prefix, window.place)

        write_tables(output, predicted(), delimiter=source.delimiter, decimal=decimal)
    found = {"output": output, "n_rows": n_rows, "n_outside": n_outside, "columns": added, "method": method}
    found |= {"n_draws": predictor.total_draws} | ({"coverage": coverage} if predictor.classes is None else {})
    found["calibration"] = fitted.origin.get("calibration", {}).get("method")
    lines = [f"{n_rows:,} rows predicted, written to {bold(output)}", f"[dim]added: {escaped(', '.join(added))}[/dim]"]
    if output != "-":
        print_result(found, lines, as_json=as_json)


def _draws(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"must be a number of draws, or auto; got {text!r}", param_hint="'--n-draws'")
    return int(text)


def _with_numbers(table: pa.Table, schema: Schema) -> pa.Table:
    """The table with numbers, in a typed file, for the texts that the model reads as such."""
    import pyarrow as pa

    from dropbayes.estimators.columns import numbers

    for index, name in enumerate(table.column_names):
        column = next((c for c in schema.columns if c.name == name and c.kind == "number"), None)
        if column is not None and pa.types.is_string(table[name].type):
            read = numbers(table[name], name, at=str, missing=schema.missing, notation=column.notation)
            table = table.set_column(index, name, pa.array(read, from_pandas=True))
    return table
