r"""Scores of a regression: errors of the mean, log-likelihoods, intervals and quantiles."""

import math

import torch
from torch import Tensor

from dropbayes.likelihoods import Gaussian, predictive_log_density
from dropbayes.runtime.validation import Array, check_probability, check_values, finite_tensor, matching_tensors
from dropbayes.scores.averages import weighted_mean


def rmse(mean: Array, y: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The root mean squared error $\sqrt{\tfrac1N \sum_n (y_n - \bar y_n)^2}$.

    Examples:
        >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(1.4142)
    """
    predicted, outcome = matching_tensors({"mean": mean, "y": y})
    return weighted_mean((outcome - predicted).square(), sample_weight).sqrt()


def mae(mean: Array, y: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The mean absolute error $\tfrac1N \sum_n |y_n - \bar y_n|$.

    Examples:
        >>> mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(1.)
    """
    predicted, outcome = matching_tensors({"mean": mean, "y": y})
    return weighted_mean((outcome - predicted).abs(), sample_weight)


def mixture_log_likelihood(log_density_draws: Array) -> Tensor:
    r"""The predictive log-likelihood $\log \tfrac1T \sum_t p(y \mid \omega_t)$ of the mixture of all draws, `[row]`.

    [GG16, eq:predictive_dist], from $\log p(y_n \mid \omega_t)$ of any likelihood, `[draw, row]`.

    Examples:
        >>> mixture_log_likelihood(torch.tensor([[0.0, -1000.0], [0.0, -1001.0]]))  # no underflow
        tensor([    0.0000, -1000.3799])
    """
    log_density = finite_tensor("log_density_draws", log_density_draws, axes="[draw, row, ...]", infinite=True)
    return log_density.logsumexp(0) - math.log(log_density.shape[0])


def gaussian_mixture_log_likelihood(draws: Array, y: Array, *, precision: float) -> Tensor:
    r"""The predictive log-likelihood of regression, a mixture of $T$ Gaussians of precision $\tau$, `[row]`.

    [GG16, eq:predictive_dist_reg], with $D$ outputs per row:

    $$\operatorname{logsumexp}_t\!\Big(-\tfrac12 \tau \|y - \widehat y_t\|^2\Big) - \log T - \tfrac D2 \log 2\pi
    + \tfrac D2 \log \tau$$

    Examples:
        >>> gaussian_mixture_log_likelihood(torch.tensor([[-1.0], [1.0]]), torch.tensor([1.0]), precision=1.0)
        tensor([-1.4852])
    """
    outputs, outcome = matching_tensors({"draws": draws, "y": y}, draws="draws")
    return predictive_log_density(Gaussian(precision), outputs, outcome)


def gaussian_log_likelihood(mean: Array, variance: Array, y: Array) -> Tensor:
    r"""The log-likelihood of the moment-matched Gaussian $\mathcal N(y; \bar y, \operatorname{Var} y)$, `[row]`.

    That of the predictive mean and total variance ([GG16, prop:mean], [GG16, prop:var]). It has lower variance than
    `mixture_log_likelihood` with few draws, and is wrong when the predictive distribution has several modes.

    Examples:
        >>> gaussian_log_likelihood(torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([1.0]))
        tensor([-1.5155])
    """
    predicted, total, outcome = matching_tensors({"mean": mean, "variance": variance, "y": y})
    check_values("variance", total, positive=True)
    per_output = -0.5 * (torch.log(2 * math.pi * total) + (outcome - predicted).square() / total)
    return per_output.reshape(outcome.shape[0], -1).sum(-1)


def interval_score(lower: Array, upper: Array, y: Array, *, level: float) -> Tensor:
    r"""The interval (Winkler) score of a central interval of probability `level` $= 1 - \alpha$; smaller is better.

    $$(u - l) + \tfrac2\alpha (l - y)_+ + \tfrac2\alpha (y - u)_+$$

    Examples:
        >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.5]), level=0.9)
        tensor([11.])
    """
    check_probability("level", level)
    low, high, outcome = _interval(lower, upper, y)
    return (high - low) + 2 / (1 - level) * ((low - outcome).clamp_min(0) + (outcome - high).clamp_min(0))


def coverage(lower: Array, upper: Array, y: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The fraction of targets inside their interval, ends included.

    Examples:
        >>> coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor(0.5000)
    """
    low, high, outcome = _interval(lower, upper, y)
    return weighted_mean(((low <= outcome) & (outcome <= high)).to(outcome.dtype), sample_weight)


def _interval(lower: Array, upper: Array, y: Array) -> list[Tensor]:
    """The ends and the targets as tensors; an end may be infinite, as a conformal interval of few rows is."""
    low, high, outcome = matching_tensors({"lower": lower, "upper": upper, "y": y}, infinite=True)
    finite_tensor("y", outcome)
    if bool((low > high).any()):
        raise ValueError(f"`lower` must not exceed `upper`; it does in {int((low > high).sum())} places.")
    return [low, high, outcome]


def quantile_score(quantile: Array, y: Array, *, level: float) -> Tensor:
    r"""The quantile (pinball) score $(\mathbb 1[y \le q] - \alpha)(q - y)$ of the predicted $\alpha$-quantile $q$.

    Its integral over the levels $\alpha$, times two, is the CRPS. Smaller is better.

    Examples:
        >>> quantile_score(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), level=0.9)
        tensor([0.1000, 0.9000])
    """
    check_probability("level", level)
    predicted, outcome = matching_tensors({"quantile": quantile, "y": y})
    return torch.maximum(level * (outcome - predicted), (level - 1) * (outcome - predicted))


def sharpness(std: Array, *, sample_weight: Array | None = None) -> Tensor:
    r"""The root mean predictive variance $\sqrt{\tfrac1N \sum_n \sigma_n^2}$, whatever the outcomes.

    Examples:
        >>> sharpness(torch.tensor([1.0, 7.0]))
        tensor(5.)
    """
    deviation = finite_tensor("std", std, axes="[row, ...]")
    check_values("std", deviation)
    return weighted_mean(deviation.square(), sample_weight).sqrt()
