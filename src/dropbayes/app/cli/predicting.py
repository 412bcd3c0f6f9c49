"""`dropbayes predict`, `evaluate`, `calibrate`, `report` and `explain`: a model and the rows of a table."""

from __future__ import annotations

import itertools
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dropbayes import app
from dropbayes.app.cli import options
from dropbayes.app.cli.messages import bold, escaped, note, print_result, table
from dropbayes.runtime.formatting import count, plain_number

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import RenderableType


def predict(
    model: options.ModelFolder,
    data: options.Data,
    output: Annotated[
        str, options.output(help="A .csv or .parquet file, or with --engine a folder; - is CSV on standard output.")
    ],
    coverage: options.Coverage = None,
    n_draws: Annotated[
        str | None,
        typer.Option(
            help="Draws per network, or auto: for each row until its error is small. By default as in the fit.",
            metavar="N",
        ),
    ] = None,
    max_draws: Annotated[
        int | None, options.count(help="The most draws per network with --n-draws auto; 10,000 by default.", min=64)
    ] = None,
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
    of_files, of_draws = keep != "all" or block_rows or delimiter or encoding, n_draws or seed is not None
    for option, is_wrong, rule in (
        ("--engine", engine and of_files, "has no --keep, --block-rows, --delimiter or --encoding"),
        ("-o", engine and output == "-", "must name a folder with --engine, which writes parts; got '-'"),
        ("--workers, --address", (workers or address) and not engine, "are those of an engine; name one with --engine"),
        ("--method", method != "sampling" and of_draws, f"{method} makes no draws; leave out --n-draws and --seed"),
        ("--max-draws", max_draws and n_draws != "auto", "is for --n-draws auto; give both, or neither"),
    ):
        if is_wrong:
            raise typer.BadParameter(rule, param_hint=f"'{option}'")
    draws = _draws(n_draws)
    from dropbayes.app.cli.rows import windows, with_numbers
    from dropbayes.app.tables import is_parquet, open_table, write_tables
    from dropbayes.app.tables.training import check_name

    options.check_destination(output, as_json, data)
    if engine is None:
        as_parquet = is_parquet(output)  # a wrong name is refused before a model is read
    fitted = app.load(model)
    limit = max_draws or 10_000
    predictor = app.Predictor(fitted, n_draws=draws, seed=seed, allow_new=allow_new, method=method, max_draws=limit)
    predictor = predictor.with_settings(coverage=coverage)
    covered = {"lower", "labels"} & set(predictor.column_names)
    if coverage is not None and not covered:
        note("--coverage is that of intervals and of conformal sets; these probabilities have neither, and stay.")
    if engine is not None:
        from dropbayes.app.distributed import predict_parquet

        n_rows = predict_parquet(
            predictor, data, output, engine=engine, n_workers=workers, address=address, prefix=prefix
        )
        found = {"output": output, "n_rows": n_rows, "engine": engine, "n_draws": predictor.total_draws}
        print_result(found, [f"{count(n_rows, 'row')} predicted, written to {bold(output)}"], as_json=as_json)
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
                table = with_numbers(table, fitted.schema) if as_parquet else table
                n_rows += table.num_rows
                n_outside += sum(map(bool, window.encoded.outside_names()))
                yield predictor.append_columns(table, window.encoded, prefix, window.place)

        write_tables(output, predicted(), delimiter=source.delimiter, decimal=decimal)
    found = {"output": output, "n_rows": n_rows, "n_outside": n_outside, "columns": added, "method": method}
    found |= {"n_draws": predictor.total_draws} | ({"coverage": predictor.coverage} if covered else {})
    found["calibration"] = fitted.origin.get("calibration", {}).get("method")
    lines = [f"{count(n_rows, 'row')} predicted, written to {bold(output)}"]
    if output != "-":
        print_result(found, [*lines, f"[dim]added: {escaped(', '.join(added))}[/dim]"], as_json=as_json)


def _draws(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"must be a number of draws, or auto; got {text!r}", param_hint="'--n-draws'")
    return int(text)


def evaluate(
    model: options.ModelFolder,
    data: options.Outcomes,
    n_draws: options.Draws = None,
    seed: options.Seed = None,
    allow_new: options.AllowNew = False,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Score a model against the outcomes in a table.

    Beside each score: its standard error, and the score of a prediction that is the same for every row.
    """
    from dropbayes.app.cli.explaining import scores_of
    from dropbayes.app.cli.rows import judged_windows, note_training_rows
    from dropbayes.app.models.fields import outcome_columns
    from dropbayes.app.tables import open_table

    fitted = app.load(model).with_draws(n_draws=n_draws, seed=seed)
    regression = fitted.schema.task == "regression"
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        judged = judged_windows(fitted, source, allow_new=allow_new)
        codes = (lambda y: y) if regression else fitted.ensemble.classes_.searchsorted
        _, columns = outcome_columns(fitted.ensemble, ((one.encoded.x, codes(one.y), one.place) for one in judged))
    n_rows = len(columns["epistemic"])
    note_training_rows(fitted, data)
    n_draws = int(fitted.ensemble.n_draws) * len(fitted.ensemble.population_)
    scores, constant = scores_of(columns)
    errors = {name: one.error for name, one in scores.items() if one.error is not None}
    some = f" ({len(columns['crps']):,} rows)" if len(columns.get("crps", ())) not in (0, n_rows) else ""

    def lines() -> Iterator[RenderableType]:
        sizes = f"{count(n_rows, 'row')}, {count(n_draws, 'draw')}"
        yield f"{bold(fitted.schema.target)} in {escaped(source.label)}: {sizes}\n"
        cells = []
        for name, one in scores.items():
            error = plain_number(errors[name], digits=2) if name in errors else ""
            alike = plain_number(constant[name]) if name in constant else ""
            meaning = one.meaning + (some if name == "crps" else "")
            cells.append([one.score.label, plain_number(one.value), error, alike, meaning])
        yield table("", ["score", "value", "±", "constant", "meaning"], cells, numbers=(1, 2, 3))
        what = "mean and standard deviation" if regression else "class shares"
        yield f"\n± one standard error; constant: the {what} of these very outcomes, predicted for every row"

    found = {"model": str(fitted.path), "data": source.label, "n_rows": n_rows, "n_draws": n_draws}
    found |= {name: one.value for name, one in scores.items()}
    print_result(found | {"standard_errors": errors, "constant": constant}, lines(), as_json=as_json)


def calibrate(
    model: options.ModelFolder,
    data: Annotated[str | None, options.data(help="Held-out rows with the target column.")] = None,
    method: Annotated[
        Literal["scale", "isotonic", "conformal", "none"], typer.Option(help="How to correct; none takes it back.")
    ] = "scale",
    allow_new: options.AllowNew = False,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Correct a model's intervals or probabilities on held-out rows.

    The correction is recorded in the model: predict, evaluate and report use it from then on.
    """
    from dropbayes.app.cli.rows import note_training_rows, whole_table

    if (data is None) != (method == "none"):
        raise ValueError("`method` none takes no rows: leave DATA out; the others need DATA, a table of held-out rows.")
    fitted = app.load(model)
    found: dict[str, object] = {"model": str(fitted.path), "method": None, "n_rows": None, "factor": None}
    if data is None or method == "none":
        fitted.uncalibrated().save_calibration()
        print_result(found, [f"{bold(model)} predicts uncalibrated, as it was fitted"], as_json=as_json)
        return
    rows = whole_table(fitted, data, delimiter=delimiter, encoding=encoding, allow_new=allow_new)
    label = rows.source.label
    if not note_training_rows(fitted, data) and label == fitted.origin.get("file"):
        note(f"{label!r} has the name of the training table; calibrate on rows that the model has not seen.")
    calibrated = fitted.recalibrated(rows.encoded.x, rows.y, method, label)
    calibrated.save_calibration()
    recalibration = calibrated.ensemble.recalibration
    factor = recalibration.factor if method == "scale" else None
    regression = fitted.schema.task == "regression"
    scaled = "standard deviation is multiplied" if regression else "logit, relative to the class shares, is divided"
    changes = {
        "scale": f"every {scaled} by {plain_number(recalibration.factor)}",
        "isotonic": "the levels of every interval are mapped to those observed",
        "conformal": "intervals are conformal" if regression else "each row is given the labels of a conformal set",
    }
    done = f"calibrated on {count(recalibration.n_rows, 'row')}: {changes[method]}"
    kept = f"recorded in {bold(model)}; predict, evaluate and report use it from now on"
    found |= {"method": method, "n_rows": recalibration.n_rows, "factor": factor}
    print_result(found, [done, kept], as_json=as_json)


def report(
    context: typer.Context,
    model: options.ModelFolder,
    data: options.Outcomes,
    output: Annotated[str, options.output(help="The HTML file to write; - is standard output.")],
    training: Annotated[
        str | None, typer.Option(help="The training table, for simple models and a comparison of rows.", metavar="DATA")
    ] = None,
    n_draws: options.Draws = None,
    seed: options.Seed = None,
    allow_new: options.AllowNew = False,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Write an HTML report on a model's predictions for a table."""
    options.check_destination(output, as_json, data, training)
    from dropbayes.app.cli import explaining
    from dropbayes.app.cli.rows import note_training_rows, whole_table
    from dropbayes.runtime import files

    if output != "-":
        if pathlib.Path(output).suffix.lower() not in ("", ".html", ".htm"):
            raise typer.BadParameter(f"must name an HTML file, such as report.html; got {output!r}", param_hint="'-o'")
        files.check_output(output)
    fitted = app.load(model).with_draws(n_draws=n_draws, seed=seed)
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new}
    rows = whole_table(fitted, data, **reading)
    if len(rows.y) < 2:
        raise ValueError(f"{rows.source.label}: 1 row with a target; at least 2 are needed, and many more to judge.")
    is_known = note_training_rows(fitted, data)
    label = rows.source.label + (", the rows it was fitted to" if is_known else "")
    known = whole_table(fitted, training, **reading) if training is not None else rows if is_known else None
    from dropbayes.app.report import report as page

    command = shlex.join(["dropbayes", *context.obj])
    schema, inputs = fitted.schema, itertools.count()
    features = {column.name: [next(inputs) for _ in column.inputs] for column in schema.columns}
    html = page(
        fitted.ensemble,
        rows.encoded.x,
        rows.y,
        target=schema.target,
        columns={name: rows.table[name].to_pylist() for name in rows.table.column_names if name != schema.target},
        names=schema.inputs,
        title=f"{schema.target}: {label}",
        provenance=explaining.provenance(fitted, f"{label}, {len(rows.y):,} rows", command),
        training=None if known is None else (known.encoded.x, known.y),
        features=features,
        ranges=explaining.ranges(fitted),
        numbers=rows.numbers + 1,
        band_feature=next(iter(features.get(fitted.origin.get("time", ""), [])), None),
    )
    if output == "-":
        sys.stdout.write(html)
    else:
        files.write_text(output, html)
        found = {"model": str(fitted.path), "data": label, "n_rows": len(rows.y), "output": output}
        print_result(found, [f"report on {len(rows.y):,} rows written to {bold(output)}"], as_json=as_json)


def explain(
    model: options.ModelFolder,
    data: Annotated[str | None, options.data(metavar="[DATA]", help="A CSV or Parquet file of rows.")] = None,
    rows: Annotated[int | None, options.count(help="Rows to explain, the least sure ones; 5 by default.")] = None,
    background: Annotated[
        str | None, options.file(help="Rows to compare with, such as those of training; by default a typical one.")
    ] = None,
    allow_new: options.AllowNew = False,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    as_json: options.Json = False,
) -> None:
    """Describe a model, or say why it predicts what it does.

    Without rows: the columns with their ranges, the sizes of the networks, drop probabilities, precision and
    length-scales.

    With rows: for each column what it adds to the prediction, and its share of the epistemic variance (for classes, of
    the mutual information), against typical rows.
    """
    from dropbayes.app.cli import explaining
    from dropbayes.app.cli.rows import whole_table

    if data is None and (background or allow_new or delimiter or encoding or rows):
        raise typer.BadParameter("are for rows to explain; name a table", param_hint="'--rows, --background ...'")
    fitted = app.load(model)
    if data is None:
        about = explaining.facts(fitted)
        print_result({"model": str(fitted.path), **about}, explaining.model_lines(fitted, about), as_json=as_json)
        return
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new, "judged": False}
    typical = None if background is None else whole_table(fitted, background, title="background", **reading).encoded.x
    given = whole_table(fitted, data, **reading)
    found = explaining.reasons(fitted, given, typical, n_rows=rows or 5)
    parts = [(name, abs(part["uncertainty"]), one) for one in found for name, part in one["columns"].items()]
    far = dict.fromkeys(name for name, share, one in parts if share > one["uncertainty"])
    if len(far) > 1:
        what = "columns that go together are exchanged one without the others; read their shares as one"
        note(f"shares of {', '.join(map(repr, far))} beyond 100 %: {what}, or fit with one of them alone.")
    result = {"model": str(fitted.path), "target": fitted.schema.target, "rows": found}
    print_result(result, explaining.reason_lines(fitted, found), as_json=as_json)
