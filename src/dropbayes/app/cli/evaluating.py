"""`dropbayes evaluate`: a model's predictions against the outcomes in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.app.cli.messages import count, note, number, out, print_json, table
from dropbayes.app.cli.predictions import Window, check_finite, note_training_rows, targets, windows
from dropbayes.app.models.model import Model, load
from dropbayes.app.tables import Source, open_table
from dropbayes.predictive.mixtures import draw_mean
from dropbayes.predictive.outcomes import ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.scoring import CLASS_SCORES, REGRESSION_SCORES, core_scores
from dropbayes.runtime.validation import quote

__all__ = ["evaluate"]


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
    model = load(model_path).with_draws(n_draws=n_draws, seed=seed)
    row_values = _number_rows if model.schema.task == "regression" else _class_rows
    blocks: list[dict[str, Tensor]] = []
    n_absent = 0
    options = {"block_rows": block_rows, "allow_new": allow_new, "title": "evaluate", "with_target": True}
    with open_table(data, delimiter=delimiter, encoding=encoding) as source:
        for window in windows(model, source, **options):  # type: ignore[arg-type]
            y, present = targets(model, window, source)
            n_absent += int((~present).sum())
            if present.any():
                blocks.append(row_values(model, window, y, present, source))
    if not blocks:
        raise ValueError(f"{source.label}, column {quote(model.schema.target)}: no row has a value to score against.")
    note_training_rows(model, data)
    if n_absent:
        note(f"{count(n_absent, 'row')} without a target left out.")
    rows = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    if model.schema.task == "regression":
        values = core_scores(REGRESSION_SCORES, RegressionOutcomes(**rows))
    else:
        values = core_scores(CLASS_SCORES, ClassOutcomes(rows["y"], rows["probabilities"]))
    _say(model, source, len(next(iter(rows.values()))), values, as_json=as_json)


def _number_rows(model: Model, window: Window, y: Any, present: Any, source: Source) -> dict[str, Tensor]:
    """What the scores of a regression need per row."""
    mixture = model.ensemble.predictive(window.x)
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


def _class_rows(model: Model, window: Window, y: Any, present: Any, source: Source) -> dict[str, Tensor]:
    probabilities = draw_mean(model.ensemble.draws(window.x))
    check_finite([probabilities.sum(1).numpy()], window, source)
    return {"probabilities": probabilities[present], "y": torch.from_numpy(y[present])}


def _say(model: Model, source: Source, n_rows: int, values: dict[str, float], *, as_json: bool) -> None:
    n_draws = int(model.ensemble.n_draws) * len(model.ensemble.population_)
    if as_json:
        print_json({"model": str(model.path), "data": source.label, "n_rows": n_rows, "n_draws": n_draws, **values})
        return
    from rich.markup import escape

    console = out()
    about = f"[bold]{escape(model.schema.target)}[/bold] in {escape(source.label)}: {n_rows:,} rows, {n_draws} draws"
    console.print(about + "\n")
    scores = REGRESSION_SCORES if model.schema.task == "regression" else CLASS_SCORES
    rows = [[scores[name].label, number(value), scores[name].description] for name, value in values.items()]
    console.print(table("", ["score", "value", "meaning"], rows, numbers=(1,)))
