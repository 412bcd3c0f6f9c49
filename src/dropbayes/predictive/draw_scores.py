"""The draws of a network scored against outcomes, row by row: numbers, classes or texts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import Categorical, Gaussian, Likelihood
from dropbayes.predictive.mixtures import Mixture
from dropbayes.predictive.outcomes import ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.scoring import CLASS_SCORES, COVERAGE_LEVELS, REGRESSION_SCORES
from dropbayes.sampling import evaluation_output

__all__ = ["DrawScores", "checked_likelihood", "checked_targets", "evaluation_tensor", "score_draws"]


@dataclass(frozen=True)
class DrawScores:
    """The measurements of a verdict, one of each per row.

    Attributes:
        log_density: The log-density of the outcome under the mixture of the draws.
        uncertainty: The variance of a number, the entropy of a class.
        loss: The absolute error of the mean; 1 where the most probable class is wrong.
        coverage: The observed coverage of central intervals by the nominal one, for numbers.
        calibration_error: The expected calibration error, for classes.
    """

    log_density: Tensor
    uncertainty: Tensor
    loss: Tensor
    coverage: dict[float, float] = field(default_factory=dict)
    calibration_error: float | None = None


def score_draws(sampled: Tensor, y: Tensor, likelihood: Categorical | Gaussian | None) -> DrawScores:
    """The scores of draws `[draw, row, ...]`; without a likelihood, with the Gaussian noise that fits them best."""
    if isinstance(likelihood, Categorical):
        return _score_classes(sampled.double(), y, likelihood)
    location, outcome = sampled.double().reshape(len(sampled), len(y), -1), y.double().reshape(len(y), -1)
    if likelihood is None:
        scale = _best_scale(location, outcome)
    else:
        precision = torch.as_tensor(likelihood.precision, dtype=torch.float64, device=location.device)
        scale = precision.detach().rsqrt()
    mixture = Mixture(location, scale)
    density, pit = mixture.log_density(outcome), mixture.pit(outcome)
    rows = RegressionOutcomes(outcome, mixture.mean, mixture.std, pit, density)
    coverage = {level: float(REGRESSION_SCORES[f"coverage_{level:.0%}"[:-1]].value(rows)) for level in COVERAGE_LEVELS}
    return DrawScores(density, mixture.variance.sum(-1), rows.absolute_errors().mean(-1), coverage)


def _score_classes(sampled: Tensor, y: Tensor, likelihood: Categorical) -> DrawScores:
    densities = likelihood.log_density(sampled, y)
    probabilities = likelihood.class_probabilities(likelihood.mean(sampled).mean(0)).flatten(0, -2)
    rows = ClassOutcomes(y.flatten(), probabilities)
    error = float(CLASS_SCORES["calibration_error"].value(rows))
    density = densities.logsumexp(0) - math.log(len(densities))
    return DrawScores(density, rows.entropy(), 1 - rows.correct(), calibration_error=error)


def _best_scale(location: Tensor, y: Tensor) -> Tensor:
    """The scale of Gaussian noise with the largest likelihood of the mixture, one per output."""
    from scipy.optimize import minimize_scalar

    scales = []
    for column in (y - location).square().unbind(-1):

        def loss(log_scale: float, column: Tensor = column) -> float:
            return log_scale - float((-0.5 * column * math.exp(-2 * log_scale)).logsumexp(0).mean())

        low, high = (math.log(max(float(value), 1e-12)) / 2 for value in (column.amin(0).mean(), column.mean()))
        scales.append(math.exp(minimize_scalar(loss, bounds=(low, high + 0.1), method="bounded").x))
    return torch.tensor(scales, dtype=torch.float64, device=location.device)


def evaluation_tensor(net: nn.Module, x: PyTree) -> Tensor:
    """One pass without dropout; the network is not changed."""
    output = evaluation_output(net, x)
    if not isinstance(output, Tensor):
        raise TypeError(f"`net` must return one tensor; got {type(output).__name__}. Wrap it to return its logits.")
    return output


def checked_likelihood(likelihood: Likelihood | None, y: Tensor, output: Tensor) -> Categorical | Gaussian | None:
    """The likelihood of such outcomes and outputs: by default Categorical for integers and several columns."""
    if likelihood is None:
        is_class = not y.is_floating_point() and output.dim() == 2 and output.shape[1] > 1
        return Categorical(class_axis=-1) if is_class else None
    if isinstance(likelihood, Categorical):
        return likelihood.for_output(output.dim())
    if isinstance(likelihood, Gaussian):
        return likelihood
    raise TypeError(f"`likelihood` must be Categorical or Gaussian; got {likelihood}.")


def checked_targets(y: Any, output: Tensor, likelihood: Likelihood | None) -> Tensor:
    """The outcomes as a tensor, one for each row of the output."""
    targets = torch.as_tensor(y, device=output.device)
    if len(targets) != len(output):
        raise ValueError(f"`y` must have one outcome for each of the {len(output)} rows; got {len(targets)}.")
    is_class = isinstance(checked_likelihood(likelihood, targets, output), Categorical)
    if not is_class and targets.numel() != output.numel():
        raise ValueError(
            f"`y` must have the shape {tuple(output.shape)} of the network's output; got {tuple(targets.shape)}."
        )
    return targets
