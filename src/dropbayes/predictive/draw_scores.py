"""The draws of a network against outcomes, row by row: the one scorer of `evaluate`, `check` and `choose_dropout`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import Categorical, ClassLikelihood, Gaussian, Likelihood
from dropbayes.predictive.scoring import ClassOutcomes, RegressionOutcomes
from dropbayes.predictive.statistics import Request, RowResults, RowStatistics
from dropbayes.runtime.validation import Array
from dropbayes.sampling import LogMean, Mean, evaluation_output


class DrawScores:
    """The draws of some rows beside the outcomes of these rows, added block by block.

    Args:
        likelihood: The observation model.
        y: The outcomes, `[row, ...]`.
    """

    def __init__(self, likelihood: Likelihood, y: Tensor) -> None:
        self.y = y
        self.statistics = RowStatistics(Request(likelihood), likelihood)
        self.densities, self.transforms = LogMean(), Mean()

    def add(self, output: Tensor) -> Tensor:
        """Adds outputs `[draw, row, ...]`; the log-density of the outcomes under each draw, `[draw, row]`."""
        self.statistics.add(output, None)
        likelihood, exact = self.statistics.likelihood, output.double()
        assert likelihood is not None
        likelihood.check(output, self.y)
        density = likelihood.log_density(exact, self.y)
        self.densities.add(density)
        if not isinstance(likelihood, ClassLikelihood):
            # The distribution function at the outcome, of the Gaussian with each draw's mean and variance.
            standard = (self.y - likelihood.mean(exact)) / likelihood.variance(exact).sqrt()
            self.transforms.add(torch.special.ndtr(standard))
        return density

    def results(self) -> dict[str, Tensor]:
        """The statistics of the rows by name, with their `log_likelihood`, and for numbers `pit`."""
        self.densities.finish()
        self.transforms.finish()
        scored = self.statistics.results(torch.float64) | {"log_likelihood": self.densities.value}
        return scored | ({"pit": self.transforms.value} if self.transforms.count else {})


@dataclass(frozen=True)
class RowScores:
    """The scored rows of one output of a network: the log-likelihood of each row, and what all scores follow from."""

    log_likelihood: Tensor
    outcomes: RegressionOutcomes | ClassOutcomes


def row_scores(
    results: RowResults, y: Tensor, likelihood: Likelihood, *, index: int = 0, sample_weight: Array | None = None
) -> RowScores:
    """The scores of the rows of one output.

    Args:
        results: The results of the rows (`DrawScores.results`).
        y: The outcomes of all rows.
        likelihood: The observation model.
        index: The number of the output in the results.
        sample_weight: The weight of each row.
    """
    density, mean = results.join_rows("log_likelihood", index), results.join_rows("mean", index)
    likelihood = likelihood.for_output(mean.dim())
    if isinstance(likelihood, ClassLikelihood):
        probabilities = likelihood.class_probabilities(mean)
        if sample_weight is not None:  # each of a row's labels has the row's weight
            sample_weight = torch.as_tensor(sample_weight).repeat_interleave(y[0].numel())
        return RowScores(density, ClassOutcomes(y.long().flatten(), probabilities.flatten(0, -2), sample_weight))
    std = (results.join_rows("epistemic", index) + results.join_rows("aleatoric", index)).sqrt()
    pit = results.join_rows("pit", index)
    return RowScores(density, RegressionOutcomes(y, mean, std, pit, density, sample_weight))


def score_draws(sampled: Tensor, y: Tensor, likelihood: Likelihood | None) -> RowScores:
    """The scores of draws `[draw, row, ...]`; without a likelihood, with the Gaussian noise that fits them best."""
    if likelihood is None:
        sampled, y = sampled.reshape(len(sampled), len(y), -1), y.reshape(len(y), -1)
        likelihood = _fitted_noise(sampled.double(), y.double())
    scores, results = DrawScores(likelihood, y), RowResults()
    scores.add(sampled)
    results.add([scores.results()])
    return row_scores(results, y, likelihood)


def _fitted_noise(location: Tensor, y: Tensor) -> Gaussian:
    """The Gaussian noise with the largest likelihood of the mixture, of one precision for each output."""
    from scipy.optimize import minimize_scalar

    precisions = []
    for column in (y - location).square().unbind(-1):

        def loss(log_scale: float, column: Tensor = column) -> float:
            return log_scale - float((-0.5 * column * math.exp(-2 * log_scale)).logsumexp(0).mean())

        low, high = (math.log(max(float(value), 1e-12)) / 2 for value in (column.amin(0).mean(), column.mean()))
        precisions.append(math.exp(-2 * minimize_scalar(loss, bounds=(low, high + 0.1), method="bounded").x))
    return Gaussian(torch.tensor(precisions, dtype=torch.float64, device=location.device))


def evaluation_tensor(net: nn.Module, x: PyTree) -> Tensor:
    """One pass without dropout; the network is not changed."""
    output = evaluation_output(net, x)
    if not isinstance(output, Tensor):
        raise TypeError(f"`net` must return one tensor; got {type(output).__name__}. Wrap it to return its logits.")
    return output


def checked_likelihood(likelihood: Likelihood | None, y: Tensor, output: Tensor) -> Likelihood | None:
    """The likelihood of such outcomes and outputs: by default Categorical for integers and several columns."""
    if likelihood is not None:
        return likelihood.for_output(output.dim())
    is_class = not y.is_floating_point() and output.dim() == 2 and output.shape[1] > 1
    return Categorical(class_axis=-1) if is_class else None


def checked_targets(y: Any, output: Tensor, likelihood: Likelihood | None) -> Tensor:
    """The outcomes as a tensor, one for each row of the output."""
    targets = torch.as_tensor(y, device=output.device)
    if len(targets) != len(output):
        raise ValueError(f"`y` must have one outcome for each of the {len(output)} rows; got {len(targets)}.")
    judged = checked_likelihood(likelihood, targets, output)
    if isinstance(judged, ClassLikelihood):
        return targets
    mean = output if judged is None else judged.mean(output)
    if targets.numel() != mean.numel():
        raise ValueError(
            f"`y` must have the shape {tuple(mean.shape)} of the network's output; got {tuple(targets.shape)}."
        )
    return targets.reshape(mean.shape)
