"""Predictions of one kind of outcome, numbers or classes, scored from the draws of a network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import Categorical, ClassLikelihood, Gaussian, Likelihood
from dropbayes.predictive.mixtures import Mixture
from dropbayes.sampling import evaluation_output
from dropbayes.scores import confidence_and_correctness, expected_calibration_error

__all__ = ["ClassJudge", "NumberJudge", "checked_targets", "judge_of", "plain_output"]


def judge_of(targets: Tensor, plain: Tensor, likelihood: Likelihood | None) -> ClassJudge | NumberJudge:
    if not is_classes(targets, plain, likelihood):
        return NumberJudge(likelihood)
    likelihood = likelihood if isinstance(likelihood, Categorical) else Categorical()
    return ClassJudge(likelihood.for_output(plain.dim()))


class NumberJudge:
    """Scores regression, with Gaussian noise of given precision or of the maximum-likelihood precision."""

    def __init__(self, likelihood: Likelihood | None) -> None:
        self.likelihood = likelihood

    def mixture(self, sampled: Tensor, y: Tensor) -> Mixture:
        """The predictive mixture of draws `[draw, row, output]`, one column per output."""
        location = sampled.double().reshape(len(sampled), len(y), -1)
        outcome = y.double().reshape(len(y), -1)
        if isinstance(self.likelihood, Gaussian):
            return Mixture(location, torch.tensor(float(self.likelihood.precision) ** -0.5, dtype=torch.float64))
        if self.likelihood is not None:
            raise TypeError(f"`likelihood` must be Gaussian or a class likelihood; got {self.likelihood}.")
        return Mixture(location, _best_scale(location, outcome))

    def log_densities(self, sampled: Tensor, y: Tensor) -> Tensor:
        return self.mixture(sampled, y).log_density(y.double().reshape(len(y), -1))

    def uncertainty_and_loss(self, sampled: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mixture = self.mixture(sampled, y)
        error = (mixture.mean - y.double().reshape(len(y), -1)).abs().mean(-1)
        return mixture.variance.sum(-1), error

    def coverage(self, sampled: Tensor, y: Tensor) -> dict[float, float]:
        pit = self.mixture(sampled, y).pit(y.double().reshape(len(y), -1))
        return {level: float(((2 * pit - 1).abs() <= level).double().mean()) for level in (0.5, 0.8, 0.95)}

    def calibration_error(self, sampled: Tensor, y: Tensor) -> None:
        del sampled, y


class ClassJudge:
    """Scores classification; the likelihood says whether outputs are logits or probabilities, and where the classes."""

    def __init__(self, likelihood: Categorical) -> None:
        self.likelihood = likelihood

    def probabilities(self, sampled: Tensor) -> Tensor:
        """The mean probabilities, classes last."""
        return self.likelihood.class_probabilities(self.likelihood.mean(sampled.double()).mean(0))

    def log_densities(self, sampled: Tensor, y: Tensor) -> Tensor:
        densities = self.likelihood.log_density(sampled.double(), y)
        return densities.logsumexp(0) - math.log(len(densities))

    def uncertainty_and_loss(self, sampled: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.probabilities(sampled)
        entropy = -(mean * mean.clamp_min(1e-300).log()).sum(-1)
        return entropy.flatten(), 1 - confidence_and_correctness(mean.flatten(0, -2), y.flatten())[1]

    def coverage(self, sampled: Tensor, y: Tensor) -> dict[float, float]:
        del sampled, y
        return {}

    def calibration_error(self, sampled: Tensor, y: Tensor) -> float:
        probabilities = self.probabilities(sampled)
        return float(expected_calibration_error(probabilities.flatten(0, -2), y.flatten()))


def _best_scale(location: Tensor, y: Tensor) -> Tensor:
    """The scale of Gaussian noise with the largest likelihood of the mixture, one per output, by golden section."""
    error = (y - location).square()
    scales = []
    for k in range(y.shape[1]):
        column = error[..., k]
        low = math.log(max(float(column.amin(0).mean()), 1e-12)) / 2
        high = math.log(max(float(column.mean()), 1e-12)) / 2 + 0.1

        def likelihood(log_scale: float, column: Tensor = column) -> float:
            density = -0.5 * column * math.exp(-2 * log_scale)
            return float(density.logsumexp(0).mean()) - log_scale

        for _ in range(40):
            first, second = (low + share * (high - low) for share in (0.381966, 0.618034))
            low, high = (low, second) if likelihood(first) > likelihood(second) else (first, high)
        scales.append(math.exp((low + high) / 2))
    return torch.tensor(scales, dtype=torch.float64, device=location.device)


def plain_output(net: nn.Module, x: PyTree) -> Tensor:
    """One pass without dropout; the network is not changed."""
    output = evaluation_output(net, x)
    if not isinstance(output, Tensor):
        raise TypeError(f"`net` must return one tensor; got {type(output).__name__}. Wrap it to return its logits.")
    return output


def is_classes(y: Tensor, output: Tensor, likelihood: Likelihood | None) -> bool:
    if likelihood is not None:
        if isinstance(likelihood, ClassLikelihood) and not isinstance(likelihood, Categorical):
            raise TypeError(f"`likelihood` must be Categorical or Gaussian; got {likelihood}.")
        return isinstance(likelihood, Categorical)
    return not y.is_floating_point() and output.dim() == 2 and output.shape[1] > 1


def checked_targets(y: Any, output: Tensor, likelihood: Likelihood | None) -> Tensor:
    targets = torch.as_tensor(y, device=output.device)
    if len(targets) != len(output):
        raise ValueError(f"`y` must have one outcome for each of the {len(output)} rows; got {len(targets)}.")
    if not is_classes(targets, output, likelihood) and targets.numel() != output.numel():
        raise ValueError(
            f"`y` must have the shape {tuple(output.shape)} of the network's output; got {tuple(targets.shape)}."
        )
    return targets
