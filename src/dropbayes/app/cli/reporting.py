"""`dropbayes report`: a model's predictions against a table, as one page."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from dropbayes.app.cli.messages import count, note, out, print_json
from dropbayes.app.cli.predictions import note_training_rows, targets, windows
from dropbayes.app.models.model import Model, load
from dropbayes.app.tables import open_table, write_whole
from dropbayes.columns.dates import date_inputs
from dropbayes.runtime.files import check_output
from dropbayes.runtime.validation import quote
from dropbayes.runtime.version import __version__

__all__ = ["report"]


def report(
    model_path: str,
    data: str,
    *,
    output: str,
    title: str | None,
    training: str | None,
    n_draws: int | None,
    seed: int | None,
    delimiter: str | None,
    encoding: str | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Writes a report; see `dropbayes report --help`."""
    if output != "-":
        check_output(output)
    model = load(model_path).with_draws(n_draws=n_draws, seed=seed)
    options: dict[str, Any] = {"delimiter": delimiter, "encoding": encoding, "allow_new": allow_new}
    x, y, columns, label = _rows(model, data, **options)
    known = None if training is None else _rows(model, training, **options)[:2]
    if note_training_rows(model, data):
        label += ", the rows it was fitted to"
    from dropbayes.app.report import report as page

    command = ["dropbayes", "report", model_path, data, "-o", output]
    command += ["--training", training] if training is not None else []
    command += ["--n-draws", str(n_draws)] if n_draws is not None else []
    command += ["--seed", str(seed)] if seed is not None else []
    html = page(
        model.estimator, x, y, target=model.schema.target, columns=columns, names=model.schema.inputs,
        title=title or f"{model.schema.target}: {label}",
        provenance=_provenance(model, label, len(x), shlex.join(command)),
        n_draws=n_draws, seed=model.ensemble.seed_ if seed is None else seed, training=known,
        features=_features(model), ranges=_ranges(model), band_feature=_time_input(model),
    )  # fmt: skip
    write_whole(output, html)
    if as_json:
        print_json({"model": str(model.path), "data": label, "n_rows": len(x), "output": output})
    elif output != "-":
        from rich.markup import escape

        out().print(f"report on {len(x):,} rows written to [bold]{escape(output)}[/bold]")


def _rows(
    model: Model, data: str, *, delimiter: str | None, encoding: str | None, allow_new: bool
) -> tuple[Any, Any, dict[str, list[Any]], str]:
    """The inputs, the outcomes and the columns of all rows that have an outcome, and the name of their table."""
    xs: list[Any] = []
    ys: list[Any] = []
    n_absent = 0
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        columns: dict[str, list[Any]] = {name: [] for name in source.names if name != model.schema.target}
        for window in windows(model, source, block_rows=None, allow_new=allow_new, title="read", with_target=True):
            y, present = targets(model, window, source)
            n_absent += int((~present).sum())
            xs.append(window.x[present])
            ys.append(y[present])
            rows = window.table.filter(present)
            for name, values in columns.items():
                values.extend(rows[name].to_pylist())
    x, y = np.concatenate(xs), np.concatenate(ys)
    if not len(x):
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to score against.")
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")
    return x, y if model.schema.task == "regression" else model.ensemble.classes_[y], columns, source.label


def _features(model: Model) -> dict[str, list[int]]:
    """The indices of the inputs that each column became."""
    groups, start = {}, 0
    for column in model.schema.columns:
        groups[column.name] = list(range(start, start + len(column.inputs)))
        start += len(column.inputs)
    return groups


def _time_input(model: Model) -> int | None:
    """The input of the column that the model was fitted along, if it was fitted along the time."""
    return next(iter(_features(model).get(model.origin.get("time", ""), [])), None)


def _ranges(model: Model) -> dict[str, tuple[float, float]]:
    """The ends of each number, and of each date as a decimal year."""
    ranges = {}
    for column in model.schema.columns:
        if column.kind in ("number", "date") and column.low is not None and column.high is not None:
            ends = np.array([column.low, column.high])
            low, high = date_inputs(ends, ("year",))[:, 0] if column.kind == "date" else ends
            ranges[column.name] = (float(low), float(high))
    return ranges


def _provenance(model: Model, label: str, n_rows: int, command: str) -> dict[str, str]:
    """What the page says was done, in order."""
    origin = model.origin
    versions = {**origin.get("versions", {}), "dropbayes": __version__}
    facts = {
        "data": f"{label}, {n_rows:,} rows",
        "model": f"{model.schema.task}, fitted on {origin['n_rows']:,} rows of {origin['file']}",
        "SHA-256 of the training data": origin.get("sha256", ""),
        "settings": ", ".join(f"{name}={value}" for name, value in origin.get("settings", {}).items()),
        "calibration": _calibration_text(origin.get("calibration")),
        "draws": _draws_text(int(model.ensemble.n_draws), len(model.ensemble.population_)),
        "seed of the draws": str(model.ensemble.seed_),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "to fit": origin.get("command", ""),
        "to repeat": command,
    }
    return {name: text for name, text in facts.items() if text}


def _draws_text(n_draws: int, n_networks: int) -> str:
    return f"{n_draws} from one network" if n_networks == 1 else f"{n_draws} from each of {n_networks} networks"


def _calibration_text(calibration: Any) -> str:
    return (
        ""
        if calibration is None
        else f"{calibration['method']}, on {calibration['n_rows']:,} rows of {calibration['file']}"
    )
