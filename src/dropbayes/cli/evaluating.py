"""`dropbayes evaluate`: a model's predictions against the outcomes in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes import folders, scores
from dropbayes.cli.messages import count, note, number, out, print_json, table
from dropbayes.cli.predictions import Window, check_finite, targets, windows
from dropbayes.mixtures import draw_mean
from dropbayes.tables import Source, open_table, quoted

__all__ = ["evaluate"]

COVERAGES = (0.5, 0.8, 0.95)

# What each score is called and says, and which way is better.
_MEANINGS = {
    "log_likelihood": ("log-likelihood", "nats per row, higher is better"),
    "rmse": ("RMSE", "root mean squared error, in units of the target"),
    "mae": ("MAE", "mean absolute error, in units of the target"),
    "sharpness": ("sharpness", "root mean predictive variance, in units of the target"),
    "coverage_50": ("coverage of 50 %", "share of outcomes inside their 50 % interval"),
    "coverage_80": ("coverage of 80 %", "share of outcomes inside their 80 % interval"),
    "coverage_95": ("coverage of 95 %", "share of outcomes inside their 95 % interval"),
    "accuracy": ("accuracy", "share of rows whose most probable class is right"),
    "brier": ("Brier score", "0 to 2, lower is better"),
    "calibration_error": ("calibration error", "mean gap of confidence and accuracy over 15 bins, lower is better"),
}


def evaluate(
    model_path: str,
    data: str,
    *,
    n_draws: int | None,
    seed: int | None,
    delimiter: str | None,
    encoding: str | None,
    block_rows: int | None,
    allow_new: bool,
    as_json: bool,
) -> None:
    """Scores a model against outcomes; see `dropbayes evaluate --help`."""
    model = folders.load(model_path).with_draws(n_draws=n_draws, seed=seed)
    judged = _judged_numbers if model.schema.task == "regression" else _judged_classes
    parts: list[dict[str, Tensor]] = []
    n_absent = 0
    options = {"block_rows": block_rows, "allow_new": allow_new, "title": "evaluate", "with_target": True}
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        for window in windows(model, source, **options):  # type: ignore[arg-type]
            y, present = targets(model, window, source)
            n_absent += int((~present).sum())
            if present.any():
                parts.append(judged(model, window, y, present, source))
    if not parts:
        raise ValueError(f"{source.label}, column {quoted(model.schema.target)}: no row has a value to score against.")
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = (_number_scores if model.schema.task == "regression" else _class_scores)(rows)
    _say(model, source, len(next(iter(rows.values()))), found, as_json=as_json)


def _judged_numbers(model: folders.Model, window: Window, y: Any, present: Any, source: Source) -> dict[str, Tensor]:
    """What the scores of regression need of each row."""
    mixture = model.estimator.predictive(window.x)
    check_finite([mixture.mean.numpy()], window, source)
    outcome = torch.from_numpy(np.where(present, y, 0.0))
    rows = {
        "y": outcome,
        "mean": mixture.mean,
        "std": mixture.std,
        "log_likelihood": mixture.log_density(outcome),
        "pit": mixture.pit(outcome),
    }
    return {name: values[torch.from_numpy(present)] for name, values in rows.items()}


def _number_scores(rows: dict[str, Tensor]) -> dict[str, float]:
    found = {
        "log_likelihood": float(rows["log_likelihood"].mean()),
        "rmse": float(scores.rmse(rows["mean"], rows["y"])),
        "mae": float(scores.mae(rows["mean"], rows["y"])),
        "sharpness": float(scores.sharpness(rows["std"])),
    }
    for level in COVERAGES:  # a row is inside the central interval when its percentile is
        found[f"coverage_{level * 100:.0f}"] = float(((2 * rows["pit"] - 1).abs() <= level).double().mean())
    return found


def _judged_classes(model: folders.Model, window: Window, y: Any, present: Any, source: Source) -> dict[str, Tensor]:
    probabilities = draw_mean(model.estimator.draws(window.x))
    check_finite([probabilities.sum(1).numpy()], window, source)
    return {"probabilities": probabilities[present], "y": torch.from_numpy(y[present])}


def _class_scores(rows: dict[str, Tensor]) -> dict[str, float]:
    probabilities, y = rows["probabilities"], rows["y"]
    return {
        "log_likelihood": float(scores.class_log_likelihood(probabilities, y).mean()),
        "accuracy": float(scores.accuracy(probabilities, y)),
        "brier": float(scores.brier_score(probabilities, y).mean()),
        "calibration_error": float(scores.expected_calibration_error(probabilities, y)),
    }


def _say(model: folders.Model, source: Source, n_rows: int, found: dict[str, float], *, as_json: bool) -> None:
    n_draws = int(model.estimator.n_draws) * len(model.estimator.population_)
    if as_json:
        print_json({"model": str(model.path), "data": source.label, "n_rows": n_rows, "n_draws": n_draws, **found})
        return
    from rich.markup import escape

    console = out()
    about = f"[bold]{escape(model.schema.target)}[/bold] in {escape(source.label)}: {n_rows:,} rows, {n_draws} draws"
    console.print(about + "\n")
    rows = [[_MEANINGS[name][0], number(value), _MEANINGS[name][1]] for name, value in found.items()]
    console.print(table("", ["score", "value", "meaning"], rows, numbers=(1,)))
