"""What the dropout adds: the verdict of `dropbayes.check` on a model's draws, against its networks without dropout."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from dropbayes import calibration, scores
from dropbayes.app.report.inputs import ReportInputs
from dropbayes.app.report.layout import Column, Section, Table
from dropbayes.app.report.measurements import ENOUGH_ROWS, Classification, Regression
from dropbayes.predictive.mixtures import Mixture, draw_mean
from dropbayes.predictive.verdict import Verdict, row_verdict

VERDICT_ROWS = 2000
"""The rows that the verdict is based on: beyond them, an even selection."""


def dropout_section(inputs: ReportInputs, measured: Regression | Classification) -> list[Section]:
    """The verdict as a table with its advice; no section where nothing is dropped or the rows are too few."""
    population = inputs.model.population_
    if len(inputs.x) < ENOUGH_ROWS or not bool((population.drop_prob > 0).any()):
        return []
    verdict = dropout_verdict(inputs.model, inputs.x, inputs.y, n_draws=measured.n_draws)
    columns = [Column("what", number=False), Column("value"), Column("meaning", number=False)]
    rows = [[_typeset(what), _typeset(value), meaning] for what, value, meaning in verdict.rows()[1:]]
    some = f" (evenly chosen from {len(inputs.x):,})" if verdict.n_rows < len(inputs.x) else ""
    caption = (
        f"{verdict.n_draws:,} draws against one pass through each of {len(population)} networks without dropout, on "
        f"{verdict.n_rows:,} rows{some}. Without dropout the noise was fitted anew to these very rows, in its favour."
    )
    advice = " ".join(re.sub(r" \([a-z_.]+\)", "", sentence) for sentence in verdict.advice)
    table = Table("dropout", caption, columns, rows)
    return [Section("dropout", "Is the dropout worth its draws?", advice, tables=[table])]


def _typeset(text: str) -> str:
    """The text with this page's typographic signs."""
    return re.sub(r"-(?=[\d.∞])", "−", text).replace("%", " %")


def dropout_verdict(model: Any, x: Any, y: Any, *, n_draws: int) -> Verdict:
    """The verdict on a fitted estimator's draws, on rows it was not fitted to; classes are numbers."""
    chosen = np.linspace(0, len(x) - 1, min(len(x), VERDICT_ROWS)).round().astype(int)
    x, truth = x[chosen], torch.from_numpy(np.asarray(y)[chosen])
    sites = [(f"layer {k + 1}", p) for k, p in enumerate(model.drop_prob_) if p > 0]
    if hasattr(model, "classes_"):
        probabilities, plain = draw_mean(model.draws(x)), model.without_dropout().draws(x)
        loss = (probabilities.argmax(1) != truth).double()
        uncertainty = -(probabilities * probabilities.clamp_min(1e-300).log()).sum(1)
        return row_verdict(
            _class_densities(probabilities, truth), _class_densities(_tempered_probabilities(plain, truth), truth),
            uncertainty, loss, sites=sites, n_draws=n_draws, coverage={},
            calibration_error=float(scores.expected_calibration_error(probabilities, truth)),
        )  # fmt: skip
    mixture, plain = model.predictive(x), model.without_dropout().predictive(x)
    pit = mixture.pit(truth)
    coverage = {level: float(((2 * pit - 1).abs() <= level).double().mean()) for level in (0.5, 0.8, 0.95)}
    return row_verdict(
        mixture.log_density(truth), _rescale_noise(plain, truth).log_density(truth), mixture.std,
        (mixture.mean - truth).abs(), sites=sites, n_draws=n_draws, coverage=coverage, calibration_error=None,
    )  # fmt: skip


def _class_densities(probabilities: Tensor, truth: Tensor) -> Tensor:
    return probabilities.gather(1, truth[:, None])[:, 0].clamp_min(1e-300).log()


def _tempered_probabilities(draws: Tensor, truth: Tensor) -> Tensor:
    """The class probabilities of draws at the temperature of largest likelihood on these rows."""
    logits = draws.clamp_min(1e-30).log()
    return draw_mean((logits / calibration.temperature(logits, truth)).softmax(-1))


def _rescale_noise(mixture: Mixture, truth: Tensor) -> Mixture:
    """The mixture with its noise multiplied by the factor of largest likelihood on these rows."""

    def at(log_factor: float) -> Mixture:
        return mixture.with_noise(float(np.exp(log_factor)))

    best = scipy.optimize.minimize_scalar(
        lambda log_factor: -float(at(log_factor).log_density(truth).mean()), bounds=(-3, 3), method="bounded"
    )
    return at(float(best.x))
