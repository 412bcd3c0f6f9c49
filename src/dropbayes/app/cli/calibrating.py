"""`dropbayes calibrate`: a model whose intervals or probabilities are corrected on held-out rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dropbayes.app.cli.messages import count, note, number, out, print_json
from dropbayes.app.cli.predictions import note_training_rows, targets, windows
from dropbayes.app.models.model import Model, load
from dropbayes.app.tables import open_table
from dropbayes.estimators.recalibration import fit_recalibration
from dropbayes.runtime.validation import quote

__all__ = ["calibrate", "labelled_rows"]


def calibrate(
    model_path: str,
    data: str | None,
    *,
    method: Any,
    delimiter: str | None,
    encoding: str | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Calibrates a model on held-out rows, or removes its calibration; see `dropbayes calibrate --help`."""
    model = load(model_path)
    if method == "none":
        model = model.with_recalibration(None)
        model.save_calibration()
        _say(model, None, as_json=as_json)
        return
    if data is None:
        raise ValueError("held-out rows are needed to calibrate on; name a table, or use `method` none.")
    x, y, source = labelled_rows(model, data, delimiter=delimiter, encoding=encoding, allow_new=allow_new)
    if not note_training_rows(model, data) and source.label == model.origin.get("file"):
        note(f"{source.label!r} has the name of the training table; calibrate on rows that the model has not seen.")
    y = y if model.schema.task == "regression" else model.ensemble.classes_[y]
    recalibration = fit_recalibration(model.ensemble, x, y, method=method)
    model = model.with_recalibration(recalibration, source.label, x)
    model.save_calibration()
    _say(model, recalibration, as_json=as_json)


def labelled_rows(
    model: Model, data: str, *, delimiter: str | None, encoding: str | None, allow_new: bool
) -> tuple[Any, Any, Any]:
    """The inputs and outcomes (class numbers for classes) of all rows that have one, and the table they are from."""
    xs: list[Any] = []
    ys: list[Any] = []
    n_absent = 0
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        for window in windows(model, source, block_rows=None, allow_new=allow_new, title="read", with_target=True):
            y, present = targets(model, window, source)
            n_absent += int((~present).sum())
            xs.append(window.x[present])
            ys.append(y[present])
    x, y = np.concatenate(xs), np.concatenate(ys)
    if not len(x):
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to calibrate on.")
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")
    return x, y, source


def _say(model: Model, recalibration: Any, *, as_json: bool) -> None:
    if as_json:
        print_json({
            "model": str(model.path), "method": None if recalibration is None else recalibration.method,
            "n_rows": None if recalibration is None else recalibration.n_rows,
            "factor": recalibration.factor if recalibration is not None and recalibration.method == "scale" else None,
        })  # fmt: skip
        return
    from rich.markup import escape

    console = out()
    if recalibration is None:
        console.print(f"[bold]{escape(str(model.path))}[/bold] predicts uncalibrated, as it was fitted")
        return
    regression = model.schema.task == "regression"
    if recalibration.method == "scale" and regression:
        what = f"every standard deviation is multiplied by {number(recalibration.factor)}"
    elif recalibration.method == "scale":
        what = f"every logit, relative to the class shares, is divided by {number(recalibration.factor)}"
    elif recalibration.method == "isotonic":
        what = "the levels of every interval are mapped to those observed"
    else:
        what = "intervals are conformal" if regression else "each row is given the labels of a conformal set"
    console.print(f"calibrated on {count(recalibration.n_rows, 'row')}: {what}")
    console.print(
        f"recorded in [bold]{escape(str(model.path))}[/bold]; predict, evaluate and report use it from now on"
    )
