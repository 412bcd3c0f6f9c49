"""`dropbayes evaluate`, `calibrate` and `report`: a model's predictions against the outcomes in a table."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dropbayes import app
from dropbayes.app.cli import options
from dropbayes.app.cli.messages import bold, escaped, note, print_result, table
from dropbayes.runtime import __version__
from dropbayes.runtime.formatting import count, plain_number

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    from dropbayes.app.cli.rows import judged_windows, note_training_rows, scores_of
    from dropbayes.app.models.fields import Judged, outcome_columns

    fitted = app.load(model).with_draws(n_draws=n_draws, seed=seed)
    regression, label = fitted.schema.task == "regression", data

    def parts() -> Iterator[Judged]:
        nonlocal label
        for rows in judged_windows(fitted, data, delimiter=delimiter, encoding=encoding, allow_new=allow_new):
            y, label = rows.y if regression else fitted.ensemble.classes_.searchsorted(rows.y), rows.source.label
            yield rows.encoded.x, y, rows.place

    _, columns = outcome_columns(fitted.ensemble, parts())
    n_rows = len(columns["epistemic"])
    note_training_rows(fitted, data)
    n_draws = int(fitted.ensemble.n_draws) * len(fitted.ensemble.population_)
    scores, constant = scores_of(columns)
    errors = {name: one.error for name, one in scores.items() if one.error is not None}
    some = f" ({len(columns['crps']):,} rows)" if len(columns.get("crps", ())) not in (0, n_rows) else ""

    def lines() -> Iterator[RenderableType]:
        yield f"{bold(fitted.schema.target)} in {escaped(label)}: {n_rows:,} rows, {n_draws} draws\n"
        cells = [
            [
                one.score.label,
                plain_number(one.value),
                "" if one.error is None else plain_number(one.error, digits=2),
                plain_number(constant[name]) if name in constant else "",
                one.meaning + (some if name == "crps" else ""),
            ]
            for name, one in scores.items()
        ]
        yield table("", ["score", "value", "±", "constant", "meaning"], cells, numbers=(1, 2, 3))
        what = "mean and standard deviation" if regression else "class shares"
        yield f"\n± one standard error; constant: the {what} of these very outcomes, predicted for every row"

    found = {"model": str(fitted.path), "data": label, "n_rows": n_rows, "n_draws": n_draws}
    found |= {name: one.value for name, one in scores.items()}
    print_result(found | {"standard_errors": errors, "constant": constant}, lines(), as_json=as_json)


def calibrate(
    model: options.ModelFolder,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Held-out rows with the target column.")] = None,
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
    from dropbayes.app.cli.rows import joined_rows, judged_windows, note_training_rows

    fitted = app.load(model)
    found: dict[str, object] = {"model": str(fitted.path), "method": None, "n_rows": None, "factor": None}
    if method == "none":
        fitted.uncalibrated().save_calibration()
        print_result(found, [f"{bold(model)} predicts uncalibrated, as it was fitted"], as_json=as_json)
        return
    if data is None:
        raise ValueError("held-out rows are needed to calibrate on; name a table, or use `method` none.")
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new}
    rows = joined_rows(judged_windows(fitted, data, **reading))
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
    lines = [
        f"calibrated on {count(recalibration.n_rows, 'row')}: {changes[method]}",
        f"recorded in {bold(model)}; predict, evaluate and report use it from now on",
    ]
    found |= {"method": method, "n_rows": recalibration.n_rows, "factor": factor}
    print_result(found, lines, as_json=as_json)


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
    options.check_one_output(output, as_json)
    from dropbayes.app.cli.rows import joined_rows, judged_windows, note_training_rows
    from dropbayes.runtime import files

    if output != "-":
        files.check_output(output)
    fitted = app.load(model).with_draws(n_draws=n_draws, seed=seed)
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new}
    rows = joined_rows(judged_windows(fitted, data, **reading))
    known = None if training is None else joined_rows(judged_windows(fitted, training, **reading))
    label = rows.source.label + (", the rows it was fitted to" if note_training_rows(fitted, data) else "")
    from dropbayes.app.report import report as page

    command = shlex.join(["dropbayes", *context.obj])
    schema, inputs = fitted.schema, itertools.count()
    features = {column.name: [next(inputs) for _ in column.inputs] for column in schema.columns}
    html = page(
        fitted.estimator,
        rows.encoded.x,
        rows.y,
        target=schema.target,
        columns={name: rows.table[name].to_pylist() for name in rows.table.column_names if name != schema.target},
        names=schema.inputs,
        title=f"{schema.target}: {label}",
        provenance=_provenance(fitted, f"{label}, {len(rows.y):,} rows", command),
        training=None if known is None else (known.encoded.x, known.y),
        features=features,
        ranges=_ranges(fitted),
        band_feature=next(iter(features.get(fitted.origin.get("time", ""), [])), None),
    )
    if output == "-":
        sys.stdout.write(html)
    else:
        files.write_text(output, html)
        found = {"model": str(fitted.path), "data": label, "n_rows": len(rows.y), "output": output}
        print_result(found, [f"report on {len(rows.y):,} rows written to {bold(output)}"], as_json=as_json)


def _ranges(model: app.Model) -> dict[str, tuple[float, float]]:
    """The ends of each number, and of each date as a decimal year."""
    import numpy as np

    from dropbayes.estimators.columns.dates import date_inputs

    ranges = {}
    for column in model.schema.columns:
        if column.kind in ("number", "date") and column.low is not None and column.high is not None:
            ends = np.array([column.low, column.high])
            low, high = date_inputs(ends, ("year",))[:, 0] if column.kind == "date" else ends
            ranges[column.name] = (float(low), float(high))
    return ranges


def _provenance(model: app.Model, data: str, command: str) -> dict[str, str]:
    """The origin of the page, in the order of what was done."""
    from dropbayes.app.models.storage import calibration_text

    origin = model.origin
    versions = {**origin.get("versions", {}), "dropbayes": __version__}
    n_draws, n_networks = int(model.ensemble.n_draws), len(model.ensemble.population_)
    facts = {
        "data": data,
        "model": f"{model.schema.task}, fitted on {origin['n_rows']:,} rows of {origin['file']}",
        "SHA-256 of the training data": origin.get("sha256", ""),
        "settings": ", ".join(f"{name}={value}" for name, value in origin.get("settings", {}).items()),
        "calibration": calibration_text(origin),
        "draws": f"{n_draws} from " + ("one network" if n_networks == 1 else f"each of {n_networks} networks"),
        "seed of the draws": str(model.ensemble.seed_),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "to fit": origin.get("command", ""),
        "to repeat": command,
    }
    return {name: text for name, text in facts.items() if text}
