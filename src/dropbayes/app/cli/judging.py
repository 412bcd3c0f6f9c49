"""`dropbayes evaluate`, `calibrate` and `report`: a model's predictions against the outcomes in a table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dropbayes.app.cli.messages import bold, count, note, number, print_result, table
from dropbayes.app.cli.options import (
    AllowNew,
    BlockRows,
    Delimiter,
    Draws,
    Encoding,
    Json,
    ModelFolder,
    Outcomes,
    Seed,
    check_one_output,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from dropbayes.app.cli.rows import Window
    from dropbayes.app.models.model import Model
    from dropbayes.runtime.arrays import NumpyArray

__all__ = ["calibrate", "evaluate", "report"]


def evaluate(
    model: ModelFolder,
    data: Outcomes,
    n_draws: Draws = None,
    seed: Seed = None,
    allow_new: AllowNew = False,
    block_rows: BlockRows = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Score a model against the outcomes in a table."""
    import torch

    from dropbayes.app.cli.rows import labelled_windows, note_training_rows
    from dropbayes.app.models.model import load
    from dropbayes.app.tables import open_table
    from dropbayes.predictive.outcomes import ClassOutcomes, RegressionOutcomes
    from dropbayes.predictive.scoring import CLASS_SCORES, REGRESSION_SCORES, core_scores

    fitted = load(model).with_draws(n_draws=n_draws, seed=seed)
    regression = fitted.schema.task == "regression"
    per_row = _number_outcomes if regression else _class_outcomes
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        blocks = [
            {name: values[torch.from_numpy(known)] for name, values in per_row(fitted, window, y).items()}
            for window, y, known in labelled_windows(
                fitted, source, allow_new=allow_new, title="evaluate", purpose="to score against", block_rows=block_rows
            )
        ]
    note_training_rows(fitted, data)
    rows = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    scores = REGRESSION_SCORES if regression else CLASS_SCORES
    values = core_scores(scores, RegressionOutcomes(**rows) if regression else ClassOutcomes(**rows))
    n_rows, n_draws = len(next(iter(rows.values()))), int(fitted.ensemble.n_draws) * len(fitted.ensemble.population_)

    def lines() -> Iterator[RenderableType]:
        from rich.markup import escape

        yield f"{bold(fitted.schema.target)} in {escape(source.label)}: {n_rows:,} rows, {n_draws} draws\n"
        cells = [[scores[name].label, number(value), scores[name].description] for name, value in values.items()]
        yield table("", ["score", "value", "meaning"], cells, numbers=(1,))

    found = {"model": str(fitted.path), "data": source.label, "n_rows": n_rows, "n_draws": n_draws, **values}
    print_result(found, lines(), as_json=as_json)


def _number_outcomes(model: Model, window: Window, y: NumpyArray) -> dict[str, Tensor]:
    """The columns of `RegressionOutcomes` for a window's rows."""
    import torch

    mixture = model.ensemble.predictive(window.x)
    window.check_finite([mixture.mean.numpy()])
    outcome = torch.from_numpy(y).nan_to_num()  # rows without an outcome are left out afterwards
    return {
        "y": outcome,
        "mean": mixture.mean,
        "std": mixture.std,
        "log_likelihood": mixture.log_density(outcome),
        "pit": mixture.pit(outcome),
    }


def _class_outcomes(model: Model, window: Window, y: NumpyArray) -> dict[str, Tensor]:
    """The columns of `ClassOutcomes` for a window's rows."""
    import torch

    from dropbayes.predictive.mixtures import draw_mean

    probabilities = draw_mean(model.ensemble.draws(window.x))
    window.check_finite([probabilities.sum(1).numpy()])
    return {"labels": torch.from_numpy(y), "probabilities": probabilities}


def calibrate(
    model: ModelFolder,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="Held-out rows with the target column.")] = None,
    method: Annotated[
        Literal["scale", "isotonic", "conformal", "none"], typer.Option(help="How to correct; none takes it back.")
    ] = "scale",
    allow_new: AllowNew = False,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Correct a model's intervals or probabilities on held-out rows.

    The correction is recorded in the model: predict, evaluate and report use it from then on.
    """
    from dropbayes.app.cli.rows import labelled_rows, note_training_rows
    from dropbayes.app.models.model import load
    from dropbayes.estimators.recalibration import fit_recalibration

    fitted = load(model)
    found: dict[str, object] = {"model": str(fitted.path), "method": None, "n_rows": None, "factor": None}
    if method == "none":
        fitted.with_recalibration(None).save_calibration()
        print_result(found, [f"{bold(model)} predicts uncalibrated, as it was fitted"], as_json=as_json)
        return
    if data is None:
        raise ValueError("held-out rows are needed to calibrate on; name a table, or use `method` none.")
    rows = labelled_rows(
        fitted, data, delimiter=delimiter, encoding=encoding, allow_new=allow_new, purpose="to calibrate on"
    )
    if not note_training_rows(fitted, data) and rows.label == fitted.origin.get("file"):
        note(f"{rows.label!r} has the name of the training table; calibrate on rows that the model has not seen.")
    recalibration = fit_recalibration(fitted.ensemble, rows.x, rows.y, method=method)
    fitted.with_recalibration(recalibration, rows.label, rows.x).save_calibration()
    factor = recalibration.factor if method == "scale" else None
    regression = fitted.schema.task == "regression"
    if factor is not None:
        scaled = (
            "every standard deviation is multiplied"
            if regression
            else "every logit, relative to the class shares, is divided"
        )
        change = f"{scaled} by {number(factor)}"
    elif method == "isotonic":
        change = "the levels of every interval are mapped to those observed"
    else:
        change = "intervals are conformal" if regression else "each row is given the labels of a conformal set"
    lines = [
        f"calibrated on {count(recalibration.n_rows, 'row')}: {change}",
        f"recorded in {bold(model)}; predict, evaluate and report use it from now on",
    ]
    found |= {"method": method, "n_rows": recalibration.n_rows, "factor": factor}
    print_result(found, lines, as_json=as_json)


def report(
    model: ModelFolder,
    data: Outcomes,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The HTML file to write; - is standard output.", metavar="FILE")
    ],
    title: Annotated[str | None, typer.Option(help="Title of the page.", metavar="TEXT")] = None,
    training: Annotated[
        str | None,
        typer.Option(help="The training table, for simple models and a comparison of rows.", metavar="DATA"),
    ] = None,
    n_draws: Draws = None,
    seed: Seed = None,
    allow_new: AllowNew = False,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    as_json: Json = False,
) -> None:
    """Write an HTML report on a model's predictions for a table."""
    check_one_output(output, as_json)
    from dropbayes.app.cli.rows import labelled_rows, note_training_rows
    from dropbayes.app.models.model import load
    from dropbayes.app.tables import write_whole
    from dropbayes.runtime.files import check_output

    if output != "-":
        check_output(output)
    fitted = load(model).with_draws(n_draws=n_draws, seed=seed)
    reading: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new}
    rows = labelled_rows(fitted, data, **reading, purpose="to score against")
    known = None if training is None else labelled_rows(fitted, training, **reading, purpose="to score against")
    label = rows.label + (", the rows it was fitted to" if note_training_rows(fitted, data) else "")
    from dropbayes.app.report import report as page

    given = {"--training": training, "--n-draws": n_draws, "--seed": seed}
    options = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    command = shlex.join(["dropbayes", "report", model, data, "-o", output, *options])
    schema = fitted.schema
    html = page(
        fitted.estimator,
        rows.x,
        rows.y,
        target=schema.target,
        columns={name: rows.table[name].to_pylist() for name in rows.table.column_names if name != schema.target},
        names=schema.inputs,
        title=title or f"{schema.target}: {label}",
        provenance=_provenance(fitted, f"{label}, {len(rows.x):,} rows", command),
        n_draws=n_draws,
        seed=fitted.ensemble.seed_ if seed is None else seed,
        training=None if known is None else (known.x, known.y),
        features=_features(fitted),
        ranges=_ranges(fitted),
        band_feature=next(iter(_features(fitted).get(fitted.origin.get("time", ""), [])), None),
    )
    write_whole(output, html)
    if output != "-":
        found = {"model": str(fitted.path), "data": label, "n_rows": len(rows.x), "output": output}
        print_result(found, [f"report on {len(rows.x):,} rows written to {bold(output)}"], as_json=as_json)


def _ranges(model: Model) -> dict[str, tuple[float, float]]:
    """The ends of each number, and of each date as a decimal year."""
    import numpy as np

    from dropbayes.columns.dates import date_inputs

    ranges = {}
    for column in model.schema.columns:
        if column.kind in ("number", "date") and column.low is not None and column.high is not None:
            ends = np.array([column.low, column.high])
            low, high = date_inputs(ends, ("year",))[:, 0] if column.kind == "date" else ends
            ranges[column.name] = (float(low), float(high))
    return ranges


def _features(model: Model) -> dict[str, list[int]]:
    """The indices of the inputs that each column became."""
    groups, start = {}, 0
    for column in model.schema.columns:
        groups[column.name] = list(range(start, start + len(column.inputs)))
        start += len(column.inputs)
    return groups


def _provenance(model: Model, data: str, command: str) -> dict[str, str]:
    """The origin of the page, in the order of what was done."""
    from dropbayes.runtime.version import __version__

    origin = model.origin
    versions = {**origin.get("versions", {}), "dropbayes": __version__}
    n_draws, n_networks = int(model.ensemble.n_draws), len(model.ensemble.population_)
    calibration = origin.get("calibration")
    facts = {
        "data": data,
        "model": f"{model.schema.task}, fitted on {origin['n_rows']:,} rows of {origin['file']}",
        "SHA-256 of the training data": origin.get("sha256", ""),
        "settings": ", ".join(f"{name}={value}" for name, value in origin.get("settings", {}).items()),
        "calibration": ""
        if calibration is None
        else f"{calibration['method']}, on {calibration['n_rows']:,} rows of {calibration['file']}",
        "draws": f"{n_draws} from " + ("one network" if n_networks == 1 else f"each of {n_networks} networks"),
        "seed of the draws": str(model.ensemble.seed_),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "to fit": origin.get("command", ""),
        "to repeat": command,
    }
    return {name: text for name, text in facts.items() if text}
